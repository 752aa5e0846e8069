# SPDX-License-Identifier: Apache-2.0
"""What of vLLM's is replaced in a process, found by looking at all of it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import vllm_ext

FOLDER = str(Path(vllm_ext.__file__).parent)


def is_ours(thing: Any) -> bool:
    """Whether a function's own code, whatever it calls itself, is of ours."""
    if isinstance(thing, classmethod | staticmethod):
        thing = thing.__func__
    return isinstance(thing, FunctionType) and thing.__code__.co_filename.startswith(FOLDER)


def replaced() -> set[str]:
    """Functions of loaded modules of vLLM's, and of their classes, whose code is ours."""
    found = set()
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "vllm" or module is None:
            continue
        for name, thing in list(vars(module).items()):
            if is_ours(thing):
                found.add(f"{thing.__module__}.{name}")
            if isinstance(thing, type) and thing.__module__.partition(".")[0] == "vllm":
                found |= {
                    f"{thing.__module__}.{thing.__qualname__}.{own}"
                    for own, method in vars(thing).items()
                    if is_ours(method)
                }
    return found


def mixins(thing: Any) -> set[str]:
    """Of ours, that were put before the class of an object of vLLM's."""
    return {
        f"{base.__module__}.{base.__qualname__}"
        for kind in type(thing).__mro__
        if kind.__module__ == "vllm_ext.patches"
        for base in kind.__bases__
        if base.__module__.partition(".")[0] == "vllm_ext" and base.__module__ != "vllm_ext.patches"
    }


def of_worker(worker: Any) -> tuple[set[str], set[str]]:
    """Of the process of a worker, and of its runner and the runner's parts."""
    runner = worker.model_runner
    parts = [runner, *vars(runner).values()]
    return replaced(), {name for part in parts for name in mixins(part)}
