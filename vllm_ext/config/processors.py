# SPDX-License-Identifier: Apache-2.0
"""Logits processors of the user's own, of which vLLM has an interface for each model runner: which V2 can have.

V2 refuses classes of V1's interface. Those of ``logits_processors`` can run behind an adapter (`engine.processors`);
what another package has registered vLLM loads by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Processors:
    """Those of one engine."""

    v1_names: tuple[str | None, ...] = ()  # by entry of the user's list, ``module:name``; None: V2 takes it
    problem: str | None = None  # why V2 cannot have them all

    @property
    def adapted(self) -> list[str]:
        """Names of those that run behind an adapter."""
        return [name for name in self.v1_names if name is not None]

    def entries(self, given: Any, adapter: str) -> list[Any]:
        """The user's list for V2.

        Args:
            given: the list.
            adapter: what stands for all that are adapted, at the place of the first.
        """
        first = next(place for place, name in enumerate(self.v1_names) if name is not None)
        kept = [(place, each) for place, each in enumerate(given) if self.v1_names[place] is None]
        return [each for _, each in sorted([*kept, (first, adapter)], key=lambda entry: entry[0])]


def of(args: Any) -> Processors:
    """What an engine's ``EngineArgs`` name, and what is registered."""
    if _takes(args.logits_processors):
        return Processors()
    if not _takes(None):
        return Processors(
            problem="a logits processor that another package has registered has the V1 runner's interface"
        )
    names: list[str | None] = []
    for given in args.logits_processors:
        if _takes([given]):
            names.append(None)
            continue
        kind = _v1_class(given)
        if kind is None:
            return Processors(problem=f"logits processor {_shown(given)} has neither runner's interface")
        name = given if isinstance(given, str) else f"{kind.__module__}:{kind.__qualname__}"
        if not _names(name, kind):
            return Processors(
                problem=f"logits processor {name!r} has the V1 runner's interface and no such name in its module"
            )
        names.append(name)
    return Processors(tuple(names))


def _takes(entries: Any) -> bool:
    """Whether V2 would start with some entries, and with what is registered."""
    from vllm.v1.worker.gpu.sample.logits_processor import loader

    try:
        loader._load_v2_logitsprocs(entries)
    except ValueError:
        return False
    return True


def _v1_class(entry: Any) -> Any:
    from vllm.v1.sample.logits_processor import cached_load_custom_logitsprocs

    try:
        return cached_load_custom_logitsprocs((entry,))[-1]
    except ValueError:
        return None


def _names(name: str, kind: Any) -> bool:
    """Whether another process finds a class by its name."""
    module, _, path = name.partition(":")
    found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found is kind


def _shown(entry: Any) -> str:
    return repr(entry if isinstance(entry, str) else entry.__qualname__)
