# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

pytest.importorskip("vllm")

from vllm_ext import metrics


@pytest.fixture
def vllm_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return SimpleNamespace(
        additional_config={"vllm_ext": {"speculation": {"method": "token_recycling"}}},
        model_config=SimpleNamespace(served_model_name=f"model-{tmp_path.name}"),
        instance_id="0123",
    )


def exported(vllm_config: Any, name: str, **labels: str) -> float | None:
    labels = {
        "model_name": vllm_config.model_config.served_model_name,
        "engine": "0",
        "method": "token_recycling",
    } | labels
    return prometheus_client.REGISTRY.get_sample_value(f"vllm_ext:{name}_total", labels)


def test_worker_to_metrics_page(vllm_config: Any) -> None:
    worker = metrics.CounterFile(metrics.counter_path(vllm_config, 0), create=True)
    server = metrics.StatLogger(vllm_config, 0)
    server.record(None, None)
    # Present from the start, so that a rate() has a beginning.
    assert exported(vllm_config, "spec_steps") == 0
    assert exported(vllm_config, "fallbacks", reason="proposer_error") == 0
    worker.add({"spec_steps": 3, "spec_emitted_tokens": 5})
    server.record(None, None)
    server.record(None, None)
    worker.add({"spec_steps": 1, "fallbacks:proposer_error": 1})
    server.record(None, None)
    assert exported(vllm_config, "spec_steps") == 4
    assert exported(vllm_config, "spec_emitted_tokens") == 5
    assert exported(vllm_config, "fallbacks", reason="proposer_error") == 1


def test_several_api_servers_export_each_increment_once(vllm_config: Any) -> None:
    path = metrics.counter_path(vllm_config, 0)
    worker = metrics.CounterFile(path, create=True)
    servers = [metrics.CounterFile(path, create=False) for _ in range(2)]
    taken = 0
    for round_number in range(10):
        worker.add({"spec_steps": 7})
        taken += servers[round_number % 2].take().get("spec_steps", 0)
    assert taken == 70
    assert worker.totals()["spec_steps"] == 70


def test_an_engine_elsewhere_is_said_once_and_exports_nothing(vllm_config: Any) -> None:
    server = metrics.StatLogger(vllm_config, 0)
    server.record(None, None)
    server.record(None, None)
    assert exported(vllm_config, "spec_steps") is None


def test_not_asked_for_is_no_work() -> None:
    server = metrics.StatLogger(SimpleNamespace(additional_config={}), 0)
    server.record(None, None)


def test_data_parallel_engines_have_a_file_each(vllm_config: Any) -> None:
    paths = {metrics.counter_path(vllm_config, index) for index in range(3)}
    assert len(paths) == 3
    worker_side = SimpleNamespace(instance_id=vllm_config.instance_id + "_dp2")
    assert metrics.counter_path(worker_side, 2) in paths
