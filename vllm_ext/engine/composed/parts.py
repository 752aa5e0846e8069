# SPDX-License-Identifier: Apache-2.0
"""Classes of vLLM's with some of our mixins in front, by a name that lists them.

vLLM takes classes by name, and loads them in processes of its own. So the name says all: ``A_B`` is the mixin A before
the mixin B before vLLM's class.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any


def name_of(parts: Mapping[str, str], asked: Collection[str]) -> str:
    """The last part of a class's name.

    Args:
        parts: by name the path of each mixin there is, the outermost first.
        asked: names of some.

    Raises:
        KeyError: there is no such part.
    """
    if unknown := set(asked) - parts.keys():
        raise KeyError(f"no part {sorted(unknown)[0]!r}; there are {', '.join(parts)}")
    return "_".join(name for name in parts if name in asked)


def compose(parts: Mapping[str, str], path: str, base: str, prefix: str = "") -> type[Any]:
    """The class that a path names; only the modules of its own parts are loaded.

    Args:
        parts: as in `name_of`.
        path: with the module that makes it known.
        base: path of vLLM's class.
        prefix: of the name, before the parts.

    Raises:
        AttributeError: no such name.
    """
    module, _, name = path.rpartition(".")
    asked = name.removeprefix(prefix).split("_")
    if not set(asked) <= parts.keys() or name != prefix + name_of(parts, asked):
        raise AttributeError(name)
    mixins = [load(parts[each]) for each in asked]
    return type(name, (*mixins, load(base)), {"__module__": module})


def load(path: str) -> Any:
    """What a module has: ``package.module.name``."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
