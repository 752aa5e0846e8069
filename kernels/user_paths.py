# SPDX-License-Identifier: Apache-2.0
"""Paths as users write them in options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator


def expand(path: str) -> Path:
    """The absolute path; ``~`` and ``~NAME`` are home folders.

    Raises:
        ValueError: it is none; the message says why, and the way out.
    """
    if "\0" in path:
        raise ValueError("it has a NUL character, which no path can have; remove it")
    try:
        return Path(path).expanduser().absolute()
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{error}".rstrip(".") + "; write the path in full, without '~'") from None


def _check(path: str) -> str:
    expand(path)
    return path


# Of an option: what no path can be is refused with the option's name.
UserPath = Annotated[str, AfterValidator(_check)]
