# SPDX-License-Identifier: Apache-2.0
"""The functions of a codec, for kernels of numba that are compiled once for each.

They are in ``kernels/<name>_numba.py``: `encode_block`, `decode_keys` and `decode_values`, with the arguments of
`kivi_numba`; `add_counts`, as below, where scores change; `merge_span`, as in `chelsea_numba`, where blocks merge. A
kernel is handed the module: that is part of its type, so that the functions are constants.

A kernel's code on disk is told apart by its own file and by what is in its closure. So a closure has the module, and
`sources` of what is called.
"""

import functools
import hashlib
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from numba.extending import overload

FOLDER = Path(__file__).parent
IMPORT = re.compile(r"(?m)^from vllm_ext\.kernels(?:\.\w+)? import (?:\([^)]*\)|.*)$")

Form = ModuleType


@functools.cache
def form_of(codec: str) -> Form:
    """The module of a codec.

    Raises:
        ValueError: it has none.
    """
    name = f"vllm_ext.kernels.{codec}_numba"
    if find_spec(name) is None:
        raise ValueError(f"codec {codec!r} has no numba kernels; use backend='torch'")
    return import_module(name)


def sources(*names: str) -> str:
    """A hash of some files of this folder, and of those that they import.

    Args:
        names: of modules, with or without their package.
    """
    texts: dict[str, str] = {}
    left = [name.rpartition(".")[2] for name in names]
    while left:
        name = left.pop()
        file = FOLDER / f"{name}.py"
        if name not in texts and file.exists():
            texts[name] = file.read_text(encoding="utf-8")
            # A name that is no file's is a function's.
            left += re.findall(r"\w+", " ".join(IMPORT.findall(texts[name])))
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()


def add_counts(
    form: Form,
    pages: Any,
    floats: Any,
    at: int,
    scores: Any,
    start: int,
    stride: int,
    rows: int,
    head_size: int,
    block_size: int,
    numbers: Any,
) -> None:
    """Add to ``rows`` rows of scores (base 2), ``stride`` apart, what a block's tokens stand for: `add_counts` of the
    module, and where there is none, nothing.
    """
    raise NotImplementedError


@overload(add_counts, strict=False)  # type: ignore[untyped-decorator]
def _add_counts(
    form: Any,
    pages: Any,
    floats: Any,
    at: Any,
    scores: Any,
    start: Any,
    stride: Any,
    rows: Any,
    head_size: Any,
    block_size: Any,
    numbers: Any,
) -> Any:
    if hasattr(form.pymod, "add_counts"):

        def call(  # type: ignore[no-untyped-def]
            form, pages, floats, at, scores, start, stride, rows, head_size, block_size, numbers
        ):
            form.add_counts(pages, floats, at, scores, start, stride, rows, head_size, block_size, numbers)

    else:

        def call(  # type: ignore[no-untyped-def]
            form, pages, floats, at, scores, start, stride, rows, head_size, block_size, numbers
        ):
            pass

    return call
