# SPDX-License-Identifier: Apache-2.0
"""How vLLM's processes end: at once when they have shut down, and otherwise as ever."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from vllm_ext.engine import process_exit


def process(file: str, shut_down: bool, error: str) -> None:
    """One of vLLM's: what was registered before is skipped where it may leave."""
    import atexit

    atexit.register(lambda: Path(file).with_suffix(".before").touch())
    process_exit.watch()
    process_exit.watch()
    atexit.register(lambda: Path(file).with_suffix(".after").touch())
    kinds: dict[str, BaseException] = {"asked": SystemExit(), "failed": ValueError(), "status": SystemExit(3)}
    try:
        if error:
            raise kinds[error]
    finally:
        if shut_down:
            process_exit.may_leave()


@pytest.mark.parametrize(
    ("name", "shut_down", "error", "leaves", "status"),
    [
        ("VllmWorker-0", True, "", True, 0),
        ("VllmWorker-1", True, "asked", True, 0),
        ("VllmWorker-0", False, "", False, 0),  # killed before it has saved
        ("EngineCore", True, "asked", True, 0),
        ("EngineCore_DP1", True, "asked", True, 0),
        ("EngineCore", True, "", False, 0),  # shut down by who watches workers
        ("EngineCore", True, "failed", False, 1),
        ("EngineCore", True, "status", False, 3),
        ("a user's", True, "asked", False, 0),
    ],
)
def test_a_process_leaves_when_it_was_asked_to_and_has_shut_down(
    tmp_path: Path, name: str, shut_down: bool, error: str, leaves: bool, status: int
) -> None:
    file = tmp_path / "ran"
    context = multiprocessing.get_context("spawn")
    running = context.Process(target=process, args=(str(file), shut_down, error), name=name)
    running.start()
    running.join()
    assert running.exitcode == status
    assert file.with_suffix(".after").exists()
    assert file.with_suffix(".before").exists() != leaves


def orphan(folder: str, name: str) -> None:
    """One whose parent dies: notes that it was asked to end, and does not."""
    signal.signal(signal.SIGTERM, lambda *_: Path(folder, "asked").touch())
    process_exit.end_with_parent(0.05, grace=0.5)
    Path(folder, "pid").write_text(str(os.getpid()))
    for _ in range(600):
        time.sleep(0.05)


def parent(folder: str, name: str) -> None:
    """Starts one, and is gone."""
    multiprocessing.get_context("spawn").Process(target=orphan, args=(folder, name), name=name).start()
    while not Path(folder, "pid").exists():
        time.sleep(0.05)
    os._exit(0)


@pytest.mark.parametrize(("name", "ends"), [("EngineCore", True), ("a user's", False)])
def test_an_engine_whose_server_was_killed_is_asked_to_end_and_ends(
    tmp_path: Path, name: str, ends: bool
) -> None:
    running = multiprocessing.get_context("spawn").Process(target=parent, args=(str(tmp_path), name))
    running.start()
    running.join()
    pid = int((tmp_path / "pid").read_text())
    try:
        deadline = time.monotonic() + (30 if ends else 2)
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert Path(f"/proc/{pid}").exists() != ends
        assert (tmp_path / "asked").exists() == ends
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
