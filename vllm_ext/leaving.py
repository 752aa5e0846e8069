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
import sys

# How vLLM's processes are called that are no user's. Engines in a script's own process end as the script does.
WORKER, ENGINE = "VllmWorker", "EngineCore"

_shut_down = False


@functools.cache
def watch() -> None:
    """Early in a process: when `may_leave` has been called, it ends after the exit functions that are registered later.

    Those that were registered before, of Python itself and of torch, free memory and flush streams.
    """
    if multiprocessing.current_process().name.startswith((WORKER, ENGINE)):
        atexit.register(_leave)


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
