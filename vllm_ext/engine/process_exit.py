# SPDX-License-Identifier: Apache-2.0
"""The end of vLLM's engine and worker processes: at once, when what is worth keeping has been kept.

Python frees each object, and torch each operator, before a process ends. That takes seconds where cores are shared;
vLLM waits for it, then sends SIGTERM, then SIGKILL. The operating system frees all of it at once.
"""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time

# How vLLM's processes are called that are no user's. Engines in a script's own process end as the script does.
WORKER, ENGINE = "VllmWorker", "EngineCore"

_shut_down = False


@functools.cache
def watch() -> None:
    """Early in a process: when `may_leave` has been called, it ends after the exit functions that are registered later;
    an engine's also when its server is gone (`end_with_parent`).

    Those that were registered before, of Python itself and of torch, free memory and flush streams.
    """
    if multiprocessing.current_process().name.startswith((WORKER, ENGINE)):
        atexit.register(_leave)
        end_with_parent()


@functools.cache
def end_with_parent(seconds: float = 1.0, grace: float = 30.0) -> None:
    """In an engine's process: end when the server that started it is gone without a word, as after kill -9.

    Workers see that of their engine; nobody looks after the engine, which would hold its memory for ever. It is asked
    to end first, so that what was learnt is saved.

    Args:
        seconds: between two looks.
        grace: seconds from then on until it ends whatever it does.
    """
    if not multiprocessing.current_process().name.startswith(ENGINE):
        return
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        os._exit(1)

    threading.Thread(target=look, name="vllm-ext-parent", daemon=True).start()


def may_leave() -> None:
    """A part of ours has been shut down: the process may end at once, if it does so because it was asked to.

    An engine that fails ends as ever, with its exit status: vLLM reads it.
    """
    global _shut_down
    asked = sys.exc_info()[1]
    if multiprocessing.current_process().name.startswith(WORKER) or (
        isinstance(asked, SystemExit) and not asked.code
    ):
        _shut_down = True


def _leave() -> None:
    if _shut_down:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
