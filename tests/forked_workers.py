# SPDX-License-Identifier: Apache-2.0
"""Workers that are forked from the tests' process, which has imported all: they start ten seconds sooner.

vLLM spawns those of CPUs, for the threads that a process may have by then. The tests' process has none that compute,
and no model, no cache and no process group. Servers in tests, and engines with a core of their own, spawn theirs.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any

import pytest


def use(patch: pytest.MonkeyPatch) -> None:
    """Engines that are made have them, until the patch is undone."""
    from llvmlite.binding import ffi
    from vllm.v1.executor import multiproc_executor
    from vllm.v1.worker import cpu_worker  # noqa: F401 imported here once, and by no worker again

    def get_context() -> BaseContext:
        return multiprocessing.get_context("fork")

    patch.setattr(multiproc_executor, "get_mp_context", get_context)
    patch.setattr(ffi._lib_wrapper, "__getattr__", _functions_alone(ffi._lib_wrapper.__getattr__))


def _functions_alone(found: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Numba's library says that it has whatever it is asked for; vLLM asks what is imported for its ``__dict__``."""

    def get(library: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return found(library, name)

    return get
