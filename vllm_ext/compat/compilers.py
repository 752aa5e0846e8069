# SPDX-License-Identifier: Apache-2.0
"""The compiler that torch.compile, or Triton, calls at start-up: a missing one is said before a model is loaded."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Mapping
from typing import Any

WAY_OUT = "Install g++ (Debian, Ubuntu: apt-get install g++)"


def problem(
    device: str,
    environment: Mapping[str, str] = os.environ,
    find: Callable[[str], str | None] = shutil.which,
    system: str = platform.system(),
) -> str | None:
    """What is missing, or None.

    Args:
        device: vLLM's device type. On "cpu" torch.compile writes C++; elsewhere Triton writes launchers in C.
        environment: CXX or CC in it names the compiler.
        find: a program's path, None where there is none.
        system: the operating system's name, as Python has it.
    """
    if device == "cpu":
        variable, names, language = "CXX", ["clang++" if system == "Darwin" else "g++"], "C++"
        who = "torch.compile"
    else:
        variable, names, language = "CC", ["gcc", "clang"], "C"
        who = "Triton"
    if given := environment.get(variable):
        names = [given]
    if any(find(name) for name in names):
        return None
    looked = f"{variable}={given[:200]!r}" if given else " or ".join(names)
    return f"no {language} compiler ({looked} is not there), which {who} needs"


def warning(vllm_config: Any, device: str) -> str | None:
    """What to log at start-up, or None: without torch.compile a CPU needs no compiler."""
    if device == "cpu" and not vllm_config.compilation_config.mode:  # NONE
        return None
    found = problem(device)
    if found is None:
        return None
    without = ", or pass --enforce-eager" if device == "cpu" else ""
    return f"{found}: the start may fail. {WAY_OUT}, name one in {_variable(device)}{without}."


def _variable(device: str) -> str:
    return "CXX" if device == "cpu" else "CC"
