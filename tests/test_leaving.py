# SPDX-License-Identifier: Apache-2.0
"""How vLLM's processes end: at once when they have shut down, and otherwise as ever."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from vllm_ext import leaving


def process(file: str, shut_down: bool, error: str) -> None:
    """One of vLLM's: what was registered before is skipped where it may leave."""
    import atexit

    atexit.register(lambda: Path(file).with_suffix(".before").touch())
    leaving.watch()
    leaving.watch()
    atexit.register(lambda: Path(file).with_suffix(".after").touch())
    kinds: dict[str, BaseException] = {"asked": SystemExit(), "failed": ValueError(), "status": SystemExit(3)}
    try:
        if error:
            raise kinds[error]
    finally:
        if shut_down:
            leaving.may_leave()


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
