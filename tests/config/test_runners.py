# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's model runners a method gets, and as which of vLLM's own methods. No engine is started."""

from __future__ import annotations

import logging
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import tiny_eagle
import v1_processors
import vllm.config.vllm as vllm_config_module
from v1_processors import Sums
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor import Executor as AnyExecutor
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import loader

from vllm_ext.config import refusals, runners, schedulers
from vllm_ext.config.speculative import parse
from vllm_ext.doctor import environment
from vllm_ext.engine.composed import scheduler, worker
from vllm_ext.engine.processors import v1_interface
from vllm_ext.features import class_paths
from vllm_ext.features.base import Asked
from vllm_ext.features.speculation import Speculation
from vllm_ext.proposers.registry import METHODS, load_method

METHOD = {"method": "token_recycling", "num_speculative_tokens": 12}


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Triton had a driver for this machine: vLLM then runs V2."""
    # Not vLLM's own constant: what it imports from now on would look for Triton.
    monkeypatch.setattr(runners, "_has_triton", lambda: True)
    monkeypatch.setattr(vllm_config_module, "HAS_TRITON", True)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


def made(model_dir: str, method: dict[str, Any] = METHOD, **options: Any) -> Any:
    args = EngineArgs(
        model=model_dir, speculative_config=dict(method), dtype="float32", max_model_len=256, **options
    )
    return args.create_engine_config()


def test_on_v2_a_method_is_the_one_that_drafts_on_the_device(
    model_dir: str, with_triton: None, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.INFO, "vllm.vllm_ext"):
        config = made(model_dir)
    assert config.use_v2_model_runner
    assert config.speculative_config.method == class_paths.DEVICE_METHOD
    assert config.speculative_config.model == class_paths.DEVICE_DRAFTER
    assert config.parallel_config.worker_cls == worker.path_of(["V2Speculation", "Counts"])
    assert config.parallel_config.distributed_executor_backend == class_paths.LEAVING_EXECUTOR
    assert AnyExecutor.get_class(config).supports_async_scheduling()
    schedule = config.speculative_config.num_speculative_tokens_per_batch_size
    assert [level for *_, level in schedule] == [12, 6, 3, 0]
    assert config.scheduler_config.scheduler_cls == scheduler.path_of(
        ["StructuredDrafts", "Budget", "DraftBlocks", "Counts"], ahead=False
    )
    assert (
        config.scheduler_config.get_scheduler_cls().__name__ == "StructuredDrafts_Budget_DraftBlocks_Counts"
    )
    fixed = made(model_dir, {**METHOD, "budget": "fixed"})
    assert fixed.speculative_config.num_speculative_tokens_per_batch_size is None
    assert fixed.scheduler_config.scheduler_cls == scheduler.path_of(
        ["StructuredDrafts", "DraftBlocks", "Counts"], ahead=False
    )


@pytest.mark.parametrize("state", [False, True])
def test_methods_that_draft_on_the_host_run_on_v2_and_say_that_they_wait(
    model_dir: str, with_triton: None, caplog: pytest.LogCaptureFixture, tmp_path: Any, state: bool
) -> None:
    logging.getLogger("vllm").propagate = True
    folder = {"state_dir": str(tmp_path)} if state else {}
    with caplog.at_level(logging.INFO, "vllm.vllm_ext"):
        config = made(model_dir, {"method": "suffix_tree", "num_speculative_tokens": 12, **folder})
    assert config.use_v2_model_runner
    assert config.speculative_config.method == class_paths.DEVICE_METHOD
    assert config.parallel_config.worker_cls == worker.path_of(["V2Speculation", "Counts"])
    assert config.scheduler_config.scheduler_cls == scheduler.path_of(
        ["StructuredDrafts", "Budget", "DraftBlocks", "Counts"], ahead=False
    )
    assert runners.WAITS in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "vllm.vllm_ext"):
        made(model_dir)
        made(model_dir, {"method": "hybrid", **folder})
        assert made(model_dir, {**METHOD, **folder}).use_v2_model_runner
    assert runners.WAITS not in caplog.text  # these draft on the device


def test_adapters_go_with_trees_on_v2(model_dir: str, with_triton: None) -> None:
    assert made(model_dir, METHOD, enable_lora=True).use_v2_model_runner


def test_hybrid_drafts_on_the_device_unless_it_is_asked_for_more() -> None:
    def on_device(**options: Any) -> bool:
        return runners.is_on_device(parse({"method": "hybrid", **options}))

    assert on_device()
    assert on_device(drafters=["suffix_tree", "token_recycling"])
    assert not on_device(drafters=["suffix_tree", "aded"])
    assert not on_device(drafters=["suffix_tree", {"method": "token_recycling", "context_tokens": 2}])
    assert on_device(state_dir="/tmp")


@pytest.mark.parametrize(("given", "nodes"), [({}, 15), ({"num_speculative_tokens": 16}, 16)])
def test_trees_fill_tiles_where_nobody_says_how_large_they_are(
    model_dir: str, with_triton: None, given: dict[str, int], nodes: int
) -> None:
    config = made(model_dir, {"method": "token_recycling", **given})
    assert config.speculative_config.num_speculative_tokens == nodes
    assert config.additional_config["vllm_ext"]["speculation"]["num_speculative_tokens"] == nodes


def test_where_methods_draft_on_v2() -> None:
    from vllm_ext.proposers.draft_model import DraftModelProposer

    places = {name: load_method(name).on_v2 for name in METHODS}
    with_model = {name for name in METHODS if issubclass(load_method(name), DraftModelProposer)}
    on_device = {name for name, place in places.items() if place == "device"}
    assert {name for name, place in places.items() if place is None} == {"del", "ppd", "rasd", "specdec_pp"}
    assert on_device == with_model - {"del", "specdec_pp"} | {"token_recycling", "hybrid"}


def test_what_is_pruned_on_the_host_runs_on_v1(slice_dir: str, with_triton: None) -> None:
    made_of = parse({"method": "rasd", "model": "self"})
    reason = runners.choose(EngineArgs(slice_dir), made_of, None)
    why = "method 'rasd' prunes what was retrieved on the host, by the draft's first distribution"
    assert (reason.runner, reason.reason) == ("V1", why)


def test_what_is_verified_lossily_runs_on_v1(slice_dir: str, with_triton: None) -> None:
    lossy = parse({"method": "token_recycling", "verify": "typical"})
    reason = runners.choose(EngineArgs(slice_dir), lossy, None)
    assert (reason.runner, reason.reason) == ("V1", "verify='typical' is lossy")
    exact = parse({"method": "token_recycling", "verify": "exact", "verify_threshold": 0.2})
    assert runners.choose(EngineArgs(slice_dir), exact, None).runner == "V2"


def test_where_heads_draft(slice_dir: str, with_triton: None, tmp_path: Path) -> None:
    target = Path(slice_dir)
    eagle = {"method": "eagle_tree", "model": tiny_eagle.random(tmp_path / "eagle", target)}
    alone = made(slice_dir, eagle)
    assert alone.use_v2_model_runner
    assert "DraftSlots" in alone.scheduler_config.scheduler_cls
    fspad = tiny_eagle.random(tmp_path / "fspad", target, architecture=tiny_eagle.FSPAD)
    assert made(slice_dir, {**eagle, "model": fspad}).use_v2_model_runner
    falcon = tiny_eagle.random(tmp_path / "falcon", target, architecture=tiny_eagle.FALCON)
    reason = runners.choose(EngineArgs(slice_dir), parse({**eagle, "model": falcon}), None)
    assert (reason.runner, reason.reason) == ("V1", "its head says two tokens a pass (Falcon)")
    # In a hybrid they go on below what is on the device.
    fused = made(slice_dir, {"method": "hybrid", "drafters": ["token_recycling", eagle, "suffix_tree"]})
    assert fused.use_v2_model_runner
    assert "DraftSlots" in fused.scheduler_config.scheduler_cls

    def chosen(*drafters: Any) -> runners.RunnerChoice:
        config = parse({"method": "hybrid", "drafters": list(drafters)})
        return runners.choose(EngineArgs(slice_dir), config, None)

    assert chosen("token_recycling", "suffix_tree", {**eagle, "model": falcon}).reason == reason.reason
    for others in (
        ["token_recycling"],
        ["token_recycling", "stand"],
        ["token_recycling", "suffix_tree", "stand"],
    ):
        assert chosen(*others, eagle).runner == "V1"
    wider = {"method": "token_recycling", "matrix_width": 4}
    assert (
        "heads and draft models go with suffix_tree and token_recycling"
        in chosen(wider, "suffix_tree", eagle).reason
    )


def test_draft_models_have_their_slots_on_v2(model_dir: str, with_triton: None) -> None:
    method = {"method": "dyspec", "model": "self", "num_speculative_tokens": 12}
    config = made(model_dir, method)
    assert config.use_v2_model_runner
    assert config.speculative_config.method == class_paths.DEVICE_METHOD
    assert config.scheduler_config.scheduler_cls == scheduler.path_of(
        ["DraftSlots", "StructuredDrafts", "Budget", "DraftBlocks", "Counts"], ahead=False
    )
    fixed = made(model_dir, {**method, "budget": "fixed"})
    assert fixed.scheduler_config.scheduler_cls == scheduler.path_of(
        ["DraftSlots", "StructuredDrafts", "DraftBlocks", "Counts"], ahead=False
    )


def test_a_draft_that_learns_online_goes_to_v1(slice_dir: str, with_triton: None) -> None:
    method = {"method": "dyspec", "model": "m", "online": {"dir": "d"}}
    choice = runners.choose(EngineArgs(slice_dir), parse(method), None)
    assert (choice.runner, choice.reason) == (
        "V1",
        "online is set: drafts on the device do not see answers",
    )


def local_class(base: type[Any]) -> type[Any]:
    """One that no other process finds by its name."""

    class Local(base):  # type: ignore[misc]
        pass

    return Local


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ({"method": "del"}, {}, "method 'del' chooses its exits on the host"),
        (
            {"method": "dyspec", "model": "self", "export_dir": "/tmp"},
            {},
            "export_dir is set",
        ),
        (
            {"method": "rsd_c", "model": "self", "num_speculative_tokens": 54},
            {},
            "num_speculative_tokens=54 is more than 53",
        ),
        (
            METHOD,
            {"scheduler_cls": "vllm.v1.core.sched.interface.SchedulerInterface"},
            "scheduler_cls='vllm.v1.core.sched.interface.SchedulerInterface' does not derive from vLLM's Scheduler",
        ),
        (METHOD, {"scheduler_cls": local_class(Scheduler)}, "Local' has no such name in its module"),
        (
            METHOD,
            {"logits_processors": [local_class(MinPLogitsProcessor)]},
            "Local' has the V1 runner's interface and no such name",
        ),
        (METHOD, {"logits_processors": ["builtins:int"]}, "'builtins:int' has neither runner's interface"),
        (
            METHOD,
            {"additional_config": {"vllm_ext": {"rules": {"rpg": {}, "adadec": {}}}}},
            "sampling rules ['adadec'] go with it",
        ),
    ],
    ids=[
        "method",
        "export",
        "nodes",
        "scheduler",
        "local scheduler",
        "local processor",
        "no processor",
        "rules",
    ],
)
def test_what_v2_cannot_do_goes_to_v1_and_says_why(
    model_dir: str,
    with_triton: None,
    caplog: pytest.LogCaptureFixture,
    method: dict[str, Any],
    options: dict[str, Any],
    reason: str,
) -> None:
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.INFO, "vllm.vllm_ext"):
        config = made(model_dir, method, **options)
    assert not config.use_v2_model_runner
    assert config.speculative_config.method == "custom_class"
    assert re.search(f"model runner V1: .*{re.escape(reason)}", caplog.text)


MIN_P = "vllm.v1.sample.logits_processor.builtin:MinPLogitsProcessor"


def test_processors_of_v1s_interface_run_behind_an_adapter(
    model_dir: str, with_triton: None, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm").propagate = True
    own = ["v2_requests:NoEcho", MIN_P, "v1_processors:V2Gap", Sums, "v1_processors:NoEcho"]
    with caplog.at_level(logging.INFO, "vllm.vllm_ext"):
        config = made(model_dir, logits_processors=own)
    assert config.use_v2_model_runner
    adapter = v1_interface.name_of([MIN_P, "v1_processors:Sums", "v1_processors:NoEcho"])
    expected = [own[0], adapter, own[2]]
    assert config.model_config.logits_processors == expected
    assert "processor v1_processors:Sums has the V1 runner's interface: on V2 all requests" in caplog.text
    assert "processor v1_processors:NoEcho has the V1 runner's interface: on V2 requests that" in caplog.text
    assert f"processor {MIN_P} has the V1 runner's interface: on V2 requests that" in caplog.text
    kinds = v1_interface.load(adapter).kinds
    assert kinds == [MinPLogitsProcessor, Sums, v1_processors.NoEcho]
    # Rules come behind them.
    rules: dict[str, Any] = {"additional_config": {"vllm_ext": {"rules": {"rpg": {}}}}}
    *first, last = made(model_dir, logits_processors=own, **rules).model_config.logits_processors
    assert first == expected
    assert "engine.v2.logits_processor" in last
    # What is not ours stays as it is: vLLM refuses them.
    plain = EngineArgs(model=model_dir, dtype="float32", max_model_len=256, logits_processors=own)
    assert plain.create_engine_config().model_config.logits_processors == own


def test_what_packages_have_registered_is_vllms_to_load(
    model_dir: str,
    with_triton: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered = EntryPoint("theirs", MIN_P, loader.LOGITSPROCS_GROUP)
    monkeypatch.setattr(loader, "entry_points", lambda group: [registered])
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.INFO, "vllm.vllm_ext"):
        config = made(model_dir)
    assert not config.use_v2_model_runner
    assert "V1: a logits processor that another package has registered has the V1" in caplog.text


@pytest.mark.parametrize(
    ("kind", "ahead"),
    [
        ("vllm.v1.core.sched.scheduler.Scheduler", False),
        ("vllm.v1.core.sched.async_scheduler.AsyncScheduler", None),
        (AsyncScheduler, None),
    ],
)
def test_a_scheduler_of_the_users_own_runs_behind_our_parts(
    model_dir: str, with_triton: None, caplog: pytest.LogCaptureFixture, kind: Any, ahead: bool | None
) -> None:
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.INFO, "vllm.vllm_ext"):
        config = made(model_dir, scheduler_cls=kind)
    assert config.use_v2_model_runner
    path = schedulers.path_of(kind)
    chosen = config.scheduler_config
    assert chosen.scheduler_cls == scheduler.path_over(
        ["StructuredDrafts", "Budget", "DraftBlocks", "Counts"], path
    )
    assert scheduler.has(config, "Budget")
    assert [each.__name__ for each in chosen.get_scheduler_cls().__mro__[1:6]] == [
        "StructuredDrafts",
        "Budget",
        "DraftBlocks",
        "Counts",
        path.rpartition(".")[2],
    ]
    assert (
        f"scheduler_cls {path} runs behind our StructuredDrafts, Budget, DraftBlocks, Counts" in caplog.text
    )
    args = EngineArgs(model=model_dir, scheduler_cls=kind)
    options = Speculation().options(args, Asked(runners.RunnerChoice("V2", ""), parse(METHOD)))
    assert options.get("async_scheduling") is ahead
    fixed = made(model_dir, {**METHOD, "budget": "fixed"}, scheduler_cls=kind)
    assert fixed.scheduler_config.scheduler_cls == scheduler.path_over(
        ["StructuredDrafts", "DraftBlocks", "Counts"], path
    )


def test_on_v1_counts_alone_go_before_a_scheduler_of_the_users_own(
    model_dir: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm").propagate = True
    path = schedulers.path_of(Scheduler)
    config = made(model_dir, scheduler_cls=path)
    assert not config.use_v2_model_runner
    assert config.scheduler_config.scheduler_cls == scheduler.path_over(["Counts"], path)
    others = "vllm.v1.core.sched.interface.SchedulerInterface"
    config = made(model_dir, scheduler_cls=others)
    assert config.scheduler_config.scheduler_cls == others
    assert f"no counters of ours on /metrics: scheduler_cls='{others}' does not derive from" in caplog.text


def test_draft_models_have_their_slots_before_a_scheduler_of_the_users_own(
    model_dir: str, with_triton: None
) -> None:
    method = {"method": "dyspec", "model": "self", "num_speculative_tokens": 7}
    config = made(model_dir, method, scheduler_cls=AsyncScheduler)
    path = schedulers.path_of(AsyncScheduler)
    assert config.scheduler_config.scheduler_cls == scheduler.path_over(
        ["DraftSlots", "StructuredDrafts", "Budget", "DraftBlocks", "Counts"], path
    )


def test_a_scheduler_that_cannot_be_taken_is_refused(model_dir: str, with_triton: None) -> None:
    with pytest.raises(ValueError, match=r"scheduler_cls='a\.B' cannot be loaded .*module\.Class"):
        made(model_dir, scheduler_cls="a.B")
    with pytest.raises(
        ValueError, match=r"scheduler_cls='vllm.*Scheduler': it must derive from vLLM's Async"
    ):
        made(model_dir, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler", async_scheduling=True)


def test_without_triton_all_is_v1(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runners.vllms_own().runner == "V1"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert not made(model_dir).use_v2_model_runner


def test_a_forced_runner_is_taken_or_refused(
    model_dir: str, with_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert not made(model_dir).use_v2_model_runner
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert made(model_dir).use_v2_model_runner
    with pytest.raises(ValueError, match=r"'del'.*VLLM_USE_V2_MODEL_RUNNER=1: it must be unset.*on the host"):
        made(model_dir, {"method": "del"})


def test_a_configuration_for_the_other_runner_is_refused(model_dir: str, with_triton: None) -> None:
    config = made(model_dir)
    with pytest.raises(
        ValueError, match=r"made for the V1 model runner \(a reason\).*VLLM_USE_V2_MODEL_RUNNER=0"
    ):
        refusals.check_vllm_config(config, "token_recycling", runners.RunnerChoice("V1", "a reason"))


def test_the_doctor_says_which(with_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = {check.what: check for check in environment._runners()}
    found = checks["runner V2"].found
    assert "token_recycling" in found
    assert all(name in found for name in METHODS if load_method(name).on_v2 == "host")
    assert "waits for each step's tokens" in found
    assert checks["runner V2"].status == "ok"
    assert checks["runner V1"].status == "ok"
    assert "del" in checks["runner V1"].found
    monkeypatch.setattr(runners, "_has_triton", lambda: False)
    (check,) = environment._runners()
    assert (check.status, check.what) == ("ok", "runner V1")
    assert "Triton" in check.found
    assert "all methods" in check.found


def test_proposers_of_vllms_own_are_checked(slice_dir: str, with_triton: None) -> None:
    """They run on V1, with slots for what they draft and room for what they read."""

    def hybrid(nodes: int = 12, **vllms: Any) -> dict[str, Any]:
        drafter = {"method": "vllm", "speculative_config": vllms}
        return {
            "method": "hybrid",
            "drafters": ["token_recycling", drafter],
            "num_speculative_tokens": nodes,
        }

    draft: dict[str, Any] = {"method": "draft_model", "model": slice_dir, "num_speculative_tokens": 3}
    config = made(slice_dir, hybrid(**draft), max_num_batched_tokens=512, max_num_seqs=8)
    assert not config.use_v2_model_runner
    assert "DraftSlots" in config.scheduler_config.scheduler_cls
    assert config.scheduler_config.max_num_scheduled_tokens == 512 - 8
    free = made(slice_dir, hybrid(method="ngram", num_speculative_tokens=3), max_num_batched_tokens=512)
    assert "DraftSlots" not in free.scheduler_config.scheduler_cls
    assert free.scheduler_config.max_num_scheduled_tokens == 512
    with pytest.raises(ValueError, match=r"num_speculative_tokens=3 is not allowed; allowed: at most .*=2"):
        made(slice_dir, hybrid(2, **draft))
    with pytest.raises(ValueError, match=r"vLLM does not take it: prompt_lookup_max=-1: "):
        made(slice_dir, hybrid(method="ngram", num_speculative_tokens=3, prompt_lookup_max=-1))
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=256 is too small .* max_num_seqs=200"):
        made(slice_dir, hybrid(**draft), max_num_batched_tokens=256, max_num_seqs=200)
    with pytest.raises(ValueError, match=r"method='draft_model' does not work with data_parallel_size=2"):
        made(slice_dir, hybrid(**draft), data_parallel_size=2)


def test_rules_that_read_grammars_read_the_cores_own_on_v2(
    model_dir: str, with_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a method and without; in one process alone, and behind a scheduler of ours."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # else a CPU has "mp" in any case
    rules: dict[str, Any] = {"additional_config": {"vllm_ext": {"rules": {"close_by_max_tokens": {}}}}}
    for method in (METHOD, None):
        config = engine_of(model_dir, method, distributed_executor_backend="uni", **rules)
        assert config.use_v2_model_runner
        assert scheduler.has(config, "SharedGrammars")
        assert not scheduler.has(config, "DeferredTokens")
    with pytest.raises(ValueError, match=r"'close_by_max_tokens' does not .*_backend='mp' .* must be 'uni'"):
        engine_of(model_dir, METHOD, distributed_executor_backend="mp", **rules)
    own = {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler", "distributed_executor_backend": "uni"}
    with pytest.raises(ValueError, match=r"does not work with scheduler_cls=.* must be unset, as grammars"):
        engine_of(model_dir, None, **own, **rules)


def engine_of(model_dir: str, method: dict[str, Any] | None, **options: Any) -> Any:
    return EngineArgs(
        model=model_dir, speculative_config=method, dtype="float32", max_model_len=256, **options
    ).create_engine_config()
