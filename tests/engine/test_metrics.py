# SPDX-License-Identifier: Apache-2.0
"""From a worker's counters to ``/metrics``, by way of the scheduler and vLLM's messages between processes."""

from __future__ import annotations

import math
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics import reader
from vllm.v1.metrics.loggers import LoggingStatLogger
from vllm.v1.metrics.perf import DebugPerfStats, PerfStats
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_ext.engine import counters, metrics, step_extras, worker_part
from vllm_ext.engine.counters import Counters
from vllm_ext.engine.scheduler.counts import Counts


@pytest.fixture
def vllm_config(tmp_path: Path) -> SimpleNamespace:
    return SimpleNamespace(
        additional_config={"vllm_ext": {"speculation": {"method": "token_recycling"}}},
        model_config=SimpleNamespace(served_model_name=f"model-{tmp_path.name}"),
        parallel_config=SimpleNamespace(data_parallel_index=0, rank=0),
    )


class VllmWorker:
    """What vLLM's worker does in a step: the tokens come from the second call, if there are any."""

    output: Any

    def execute_model(self, has_requests: bool) -> Any:
        return None if has_requests else EMPTY_MODEL_RUNNER_OUTPUT

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
        return self.output


class VllmScheduler:
    """What vLLM's scheduler does with statistics."""

    log_stats = True
    busy = False

    def has_requests(self) -> bool:
        return self.busy

    def schedule(self) -> str:
        return "a step"

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        return EngineCoreOutputs(scheduler_stats=self.make_stats())

    def make_stats(self) -> Any:
        return SchedulerStats() if self.log_stats else None


class Worker(worker_part.Counts, VllmWorker):
    pass


class Scheduler(Counts, VllmScheduler):
    pass


class Engine:
    """A worker, its scheduler in another process, and API servers in others."""

    def __init__(self, vllm_config: Any, index: int = 0) -> None:
        self.worker, self.scheduler = Worker(), Scheduler()
        self.counters = self.worker.counters = Counters(vllm_config)
        self.server = metrics.StatLogger(vllm_config, index)
        self.server.log_engine_initialized()

    def step(self, has_requests: bool = True) -> Any:
        """What an API server gets of a step."""
        output = self.worker.execute_model(has_requests)
        if output is None:
            output = self.worker.sample_tokens(None)
        outputs = self.scheduler.update_from_output(None, pickle.loads(pickle.dumps(output)))
        sent = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
        return sent.scheduler_stats

    def record(self, stats: Any) -> Any:
        self.server.record(stats, None)
        return stats


def exported(vllm_config: Any, name: str, **labels: str) -> float | None:
    labels = {
        "model_name": vllm_config.model_config.served_model_name,
        "engine": "0",
        "method": "token_recycling",
    } | labels
    return prometheus_client.REGISTRY.get_sample_value(f"vllm_ext:{name}", labels)


def test_worker_to_metrics_page(vllm_config: Any) -> None:
    engine = Engine(vllm_config)
    # Present from the start, so that a rate() has a beginning.
    for name in counters.DOCUMENTATION:
        assert exported(vllm_config, f"{name}_total") == 0, name
    for name in counters.GAUGES:
        assert exported(vllm_config, name) == 0, name
    assert exported(vllm_config, "fallbacks_total", reason="proposer_error") == 0
    engine.counters.add({"spec_steps": 3, "spec_emitted_tokens": 5})
    engine.record(engine.step())
    engine.record(engine.step())
    engine.counters.add({"spec_steps": 1, "fallbacks:proposer_error": 1})
    engine.record(engine.step(has_requests=False))
    assert exported(vllm_config, "spec_steps_total") == 4
    assert exported(vllm_config, "spec_emitted_tokens_total") == 5
    assert exported(vllm_config, "fallbacks_total", reason="proposer_error") == 1
    assert engine.counters.totals()["spec_steps"] == 4
    with pytest.raises(KeyError):
        engine.counters.count("spec_step")


@pytest.mark.parametrize("value", [0.1, 1e-300, 12.0, math.inf])
def test_a_gauge_arrives_as_it_was_and_stays(vllm_config: Any, value: float) -> None:
    engine = Engine(vllm_config)
    engine.counters.show_budget({"gain": value, "depth": 3.0})
    assert metrics.take(engine.step()) == {"spec_budget_gain": value}
    engine.counters.show_budget({"gain": value})
    assert not step_extras.of(engine.worker.sample_tokens(None)).counted  # as before: nothing is sent
    engine.counters.show_budget({"gain": value, "correction": 2.0})
    engine.record(engine.step())
    assert exported(vllm_config, "spec_budget_correction") == 2
    engine.counters.show_budget({"gain": 1.5})
    engine.record(engine.step())
    assert exported(vllm_config, "spec_budget_correction") == 0
    assert exported(vllm_config, "spec_budget_gain") == 1.5
    assert engine.counters.gauges()["spec_budget_gain"] == 1.5


def test_what_the_start_has_counted_comes_before_any_request(vllm_config: Any) -> None:
    engine = Engine(vllm_config)
    engine.counters.add({"state_set_aside": 1})
    assert engine.scheduler.has_requests()  # the engine takes a step
    engine.scheduler.schedule()
    assert not engine.scheduler.has_requests()  # and no more
    engine.record(engine.step(has_requests=False))
    assert exported(vllm_config, "state_set_aside_total") == 1
    assert not vars(EMPTY_MODEL_RUNNER_OUTPUT).get(step_extras.ATTRIBUTE)
    engine.scheduler.busy = True
    assert engine.scheduler.has_requests()
    silent = Scheduler()
    silent.log_stats = False
    assert not silent.has_requests()  # nothing is sent


def test_several_api_servers_export_each_increment_once(vllm_config: Any) -> None:
    engine = Engine(vllm_config)
    taken = [0.0, 0.0]
    for number in range(10):
        engine.counters.add({"spec_steps": 7})
        taken[number % 2] += metrics.take(engine.step()).get("spec_steps", 0)
    assert taken == [35, 35]


def test_statistics_that_nobody_makes_lose_no_count(vllm_config: Any) -> None:
    engine = Engine(vllm_config)
    for name, log_stats in (("a", False), ("b", False), ("c", True)):
        engine.scheduler.log_stats = log_stats
        engine.counters.add({"spec_steps": 2, "spec_draft_tokens": int(name == "a")})
        engine.counters.show_budget({"gain": 1.0 if name == "a" else 3.0})
        stats = engine.step()
    assert metrics.take(stats) == {"spec_steps": 6, "spec_draft_tokens": 1, "spec_budget_gain": 3.0}


def test_vllms_own_statistics_stay_as_they_are(vllm_config: Any) -> None:
    """Also those of its debugging, in whose place ours travel."""
    stats = SchedulerStats(perf_stats=PerfStats(1, 2, 3, DebugPerfStats(context_breakdown={"own": 4})))
    metrics.put(stats, {"spec_steps": 1, "spec_budget_gain": 0.5})
    assert metrics.take(stats) == {"spec_steps": 1, "spec_budget_gain": 0.5}
    assert stats == SchedulerStats(
        perf_stats=PerfStats(1, 2, 3, DebugPerfStats(context_breakdown={"own": 4}))
    )
    assert metrics.take(stats) == metrics.take(SchedulerStats()) == metrics.take(None) == {}


@pytest.mark.parametrize("debugging", [False, True])
def test_vllms_log_takes_no_notice(monkeypatch: pytest.MonkeyPatch, debugging: bool) -> None:
    """A script's engine has vLLM's logger, and not ours, which would take our names away."""
    if debugging:
        monkeypatch.setenv("VLLM_DEBUG_MFU_METRICS", "1")
    config = VllmConfig()
    config.observability_config.enable_mfu_metrics = debugging
    vllms = LoggingStatLogger(config)
    stats = SchedulerStats()
    metrics.put(stats, {"spec_steps": 1, "spec_budget_gain": 0.5})
    vllms.record(stats, None)
    vllms.log()
    assert not debugging or vllms.perf_metrics_logging.total_num_flops_per_gpu == 0


@pytest.mark.parametrize("attribute", ["model_runner_output", "_model_runner_output"])
def test_asynchronous_outputs_carry_counts_too(vllm_config: Any, attribute: str) -> None:
    engine = Engine(vllm_config)
    engine.counters.count("spec_steps")
    output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    whole = SimpleNamespace(**{attribute: output})
    assert engine.worker._with_counts(whole) is whole
    assert step_extras.of(output).counted == {"spec_steps": 1}


def test_threads_lose_no_count(vllm_config: Any) -> None:
    counting = Counters(vllm_config)
    found: dict[str, float] = {}

    def count() -> None:
        for _ in range(20_000):
            counting.count("state_saves")

    threads = [threading.Thread(target=count) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        counters.merge(found, counting.take_new())
    counters.merge(found, counting.take_new())
    assert found == {"state_saves": 40_000}
    assert counting.totals()["state_saves"] == 40_000


def test_a_script_sees_what_a_server_shows(vllm_config: Any) -> None:
    engine = Engine(vllm_config)
    others = Worker()
    others.counters = Counters(SimpleNamespace(parallel_config=SimpleNamespace(rank=1)))
    for worker in (engine.worker, others):
        assert worker.counters is not None
        worker.counters.add({"spec_steps": 3, "fallbacks:model_chain": 2})
        worker.counters.show_budget({"gain": 1.5})
    llm_engine = SimpleNamespace(
        vllm_config=vllm_config,
        collective_rpc=lambda name: [getattr(worker, name)() for worker in (others, engine.worker)],
    )
    found = metrics.snapshot(llm_engine)
    labels = {
        "model_name": vllm_config.model_config.served_model_name,
        "engine": "0",
        "method": "token_recycling",
    }
    assert reader.Counter("vllm_ext:spec_steps", labels, 3) in found
    assert reader.Counter("vllm_ext:fallbacks", {**labels, "reason": "model_chain"}, 2) in found
    assert reader.Gauge("vllm_ext:spec_budget_gain", labels, 1.5) in found
    assert len(found) == len(counters.COUNTERS) + len(counters.GAUGES)
    assert metrics.snapshot(SimpleNamespace(vllm_config=SimpleNamespace(additional_config={}))) == []


def test_rules_that_learn_count_what_they_keep_without_a_method(vllm_config: Any) -> None:
    vllm_config.additional_config = {"vllm_ext": {"rules": {"asap": {}}}}
    engine = Engine(vllm_config)
    engine.counters.add({"state_set_aside": 1})
    engine.record(engine.step(has_requests=False))
    assert exported(vllm_config, "state_set_aside_total", method="none") == 1
    assert exported(vllm_config, "state_saves_total", method="none") == 0
    assert exported(vllm_config, "spec_steps_total", method="none") is None
    assert exported(vllm_config, "spec_budget_gain", method="none") is None
    llm_engine = SimpleNamespace(
        vllm_config=vllm_config, collective_rpc=lambda name: [getattr(engine.worker, name)()]
    )
    names = {metric.name for metric in metrics.snapshot(llm_engine)}
    assert names == {f"vllm_ext:{name}" for name in counters.DOCUMENTATION if name.startswith("state_")}
    vllm_config.additional_config = {"vllm_ext": {"rules": {"rpg": {}}}}
    assert metrics.snapshot(llm_engine) == []


def test_not_asked_for_is_no_work() -> None:
    server = metrics.StatLogger(SimpleNamespace(additional_config={}), 0)
    server.log_engine_initialized()
    server.record(None, None)


def test_data_parallel_engines_have_their_own_series(vllm_config: Any) -> None:
    engines = [Engine(vllm_config, index) for index in range(3)]
    engines[1].counters.add({"spec_steps": 3})
    engines[2].counters.add({"spec_steps": 4})
    for engine in engines:
        engine.record(engine.step())
    assert [exported(vllm_config, "spec_steps_total", engine=str(index)) for index in range(3)] == [0, 3, 4]
