# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

pytest.importorskip("vllm")

from vllm.v1.metrics import reader

from vllm_ext.engine import counter_file, metrics
from vllm_ext.engine.counter_file import ServerCounts, WorkerCounts


@pytest.fixture
def vllm_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return SimpleNamespace(
        additional_config={"vllm_ext": {"speculation": {"method": "token_recycling"}}},
        model_config=SimpleNamespace(served_model_name=f"model-{tmp_path.name}"),
        parallel_config=SimpleNamespace(data_parallel_index=0),
        instance_id="0123",
    )


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog


def exported(vllm_config: Any, name: str, **labels: str) -> float | None:
    labels = {
        "model_name": vllm_config.model_config.served_model_name,
        "engine": "0",
        "method": "token_recycling",
    } | labels
    return prometheus_client.REGISTRY.get_sample_value(f"vllm_ext:{name}", labels)


def test_worker_to_metrics_page(vllm_config: Any) -> None:
    worker = metrics.worker_counts(vllm_config)
    server = metrics.StatLogger(vllm_config, 0)
    server.record(None, None)
    # Present from the start, so that a rate() has a beginning.
    assert exported(vllm_config, "spec_steps_total") == 0
    assert exported(vllm_config, "fallbacks_total", reason="proposer_error") == 0
    worker.add({"spec_steps": 3, "spec_emitted_tokens": 5})
    server.record(None, None)
    server.record(None, None)
    worker.add({"spec_steps": 1, "fallbacks:proposer_error": 1})
    server.record(None, None)
    assert exported(vllm_config, "spec_steps_total") == 4
    assert exported(vllm_config, "spec_emitted_tokens_total") == 5
    assert exported(vllm_config, "fallbacks_total", reason="proposer_error") == 1


def test_an_idle_server_shows_all_series_and_what_it_saves(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "IDLE_SECONDS", 0.01)
    worker = metrics.worker_counts(vllm_config)
    worker.add({"state_set_aside": 1})
    server = metrics.StatLogger(vllm_config, 0)
    server.log_engine_initialized()
    assert exported(vllm_config, "state_set_aside_total") == 1
    for name in counter_file.DOCUMENTATION:
        assert exported(vllm_config, f"{name}_total") is not None, name
    for name in counter_file.GAUGES:
        assert exported(vllm_config, name) == 0, name
    worker.add({"state_saves": 1})
    deadline = time.monotonic() + 10
    while exported(vllm_config, "state_saves_total") != 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_several_api_servers_export_each_increment_once(vllm_config: Any) -> None:
    worker = metrics.worker_counts(vllm_config)
    servers = [ServerCounts(metrics.counter_path(vllm_config, 0)) for _ in range(2)]
    taken = 0
    for round_number in range(10):
        worker.add({"spec_steps": 7})
        taken += servers[round_number % 2].take().get("spec_steps", 0)
    assert taken == 70
    assert worker.totals()["spec_steps"] == 70


def test_a_script_sees_what_a_server_shows(vllm_config: Any) -> None:
    worker = metrics.worker_counts(vllm_config)
    worker.add({"spec_steps": 3, "fallbacks:model_chain": 2})
    worker.set_gauges(dict.fromkeys(counter_file.GAUGES, 1.5))
    found = metrics.snapshot(vllm_config)
    labels = {
        "model_name": vllm_config.model_config.served_model_name,
        "engine": "0",
        "method": "token_recycling",
    }
    assert reader.Counter("vllm_ext:spec_steps", labels, 3) in found
    assert reader.Counter("vllm_ext:fallbacks", {**labels, "reason": "model_chain"}, 2) in found
    assert reader.Gauge("vllm_ext:spec_budget_gain", labels, 1.5) in found
    assert len(found) == len(counter_file.COUNTERS) + len(counter_file.GAUGES)
    assert metrics.snapshot(SimpleNamespace(additional_config={})) == []


def test_an_engine_elsewhere_is_said_once_and_exports_nothing(
    vllm_config: Any, heard: pytest.LogCaptureFixture
) -> None:
    server = metrics.StatLogger(vllm_config, 0)
    server.record(None, None)
    server.record(None, None)
    assert exported(vllm_config, "spec_steps_total") is None
    assert heard.text.count("counters of engine 0 are not exported") == 1


def test_a_file_cut_short_ends_no_process(vllm_config: Any, heard: pytest.LogCaptureFixture) -> None:
    worker = metrics.worker_counts(vllm_config)
    server = metrics.StatLogger(vllm_config, 0)
    server.record(None, None)
    os.truncate(metrics.counter_path(vllm_config, 0), 0)
    server.record(None, None)
    worker.add({"spec_steps": 1})
    server.record(None, None)
    assert "counter file has 0 bytes" in heard.text
    assert worker.totals()["spec_steps"] == 1


@pytest.mark.parametrize("what", ["open", "link", "file", "foreign"])
def test_a_folder_of_others_is_not_used(
    vllm_config: Any,
    tmp_path: Path,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    heard: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / f"vllm-ext-{os.geteuid()}"
    if what == "open":
        folder.mkdir()
        folder.chmod(0o777)
    elif what == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "theirs")
    elif what == "file":
        folder.touch(0o600)
    else:
        monkeypatch.setattr("os.geteuid", lambda: 54321)
        (tmp_path / "vllm-ext-54321").mkdir(mode=0o700)
    worker = metrics.worker_counts(vllm_config)
    worker.add({"spec_steps": 1})  # goes on, and is said
    assert worker.totals()["spec_steps"] == 1
    metrics.StatLogger(vllm_config, 0).log_engine_initialized()
    assert metrics.snapshot(vllm_config) == []
    assert heard.text.count("set XDG_RUNTIME_DIR or TMPDIR to a folder of this user's own") == 3
    assert not list(tmp_path.rglob("*.counters"))


def test_the_runtime_directory_comes_first_if_it_is_private(
    vllm_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert counter_file.folder() == runtime / "vllm-ext"
    runtime.chmod(0o755)
    assert counter_file.folder() == tmp_path / f"vllm-ext-{os.geteuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "run")
    assert counter_file.folder() == tmp_path / f"vllm-ext-{os.geteuid()}"


def test_what_stands_in_a_files_place_is_not_written_to(vllm_config: Any, tmp_path: Path) -> None:
    path = metrics.counter_path(vllm_config, 0)
    (tmp_path / "precious").write_text("untouched")
    path.symlink_to(tmp_path / "precious")
    metrics.worker_counts(vllm_config).add({"spec_steps": 1})
    assert not path.is_symlink()
    assert (tmp_path / "precious").read_text() == "untouched"
    path.unlink()
    path.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic link"):
        ServerCounts(path)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_files_of_workers_that_are_gone_are_removed_at_the_next_start(
    vllm_config: Any, ending: signal.Signals
) -> None:
    path = metrics.counter_path(vllm_config, 0)
    others = path.with_name("other-0.counters")
    script = (
        "import pathlib, sys, time\n"
        "from vllm_ext.engine.counter_file import WorkerCounts\n"
        "counts = WorkerCounts(pathlib.Path(sys.argv[1]))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(others)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        WorkerCounts(path)
        assert others.exists()  # its worker lives
        process.send_signal(ending)
        process.wait()
        assert others.exists()
    WorkerCounts(path)
    assert not others.exists()


def test_a_worker_that_ends_removes_its_file_and_who_reads_it_reads_on(vllm_config: Any) -> None:
    worker = metrics.worker_counts(vllm_config)
    server = ServerCounts(metrics.counter_path(vllm_config, 0))
    worker.add({"state_saves": 1})
    worker.remove()
    worker.remove()
    assert not metrics.counter_path(vllm_config, 0).exists()
    assert server.take() == {"state_saves": 1}


def test_rules_that_learn_count_what_they_keep_without_a_method(vllm_config: Any) -> None:
    vllm_config.additional_config = {"vllm_ext": {"rules": {"asap": {}}}}
    worker = metrics.worker_counts(vllm_config)
    worker.add({"state_set_aside": 1})
    server = metrics.StatLogger(vllm_config, 0)
    server.log_engine_initialized()
    assert exported(vllm_config, "state_set_aside_total", method="none") == 1
    assert exported(vllm_config, "state_saves_total", method="none") == 0
    assert exported(vllm_config, "spec_steps_total", method="none") is None
    assert exported(vllm_config, "spec_budget_gain", method="none") is None
    names = {metric.name for metric in metrics.snapshot(vllm_config)}
    assert names == {f"vllm_ext:{name}" for name in counter_file.DOCUMENTATION if name.startswith("state_")}
    vllm_config.additional_config = {"vllm_ext": {"rules": {"rpg": {}}}}
    assert metrics.snapshot(vllm_config) == []


def test_not_asked_for_is_no_work() -> None:
    server = metrics.StatLogger(SimpleNamespace(additional_config={}), 0)
    server.log_engine_initialized()
    server.record(None, None)


def test_data_parallel_engines_have_a_file_each(vllm_config: Any) -> None:
    paths = {metrics.counter_path(vllm_config, index) for index in range(3)}
    assert len(paths) == 3
    worker_side = SimpleNamespace(instance_id=vllm_config.instance_id + "_dp2")
    assert metrics.counter_path(worker_side, 2) in paths
