# SPDX-License-Identifier: Apache-2.0
"""The block that a sequence of symbols ends with several times in a row, in time linear in its length.

`longest` finds it; `repeats_numba.py` has the loops. numba is imported at the first call: vLLM's worker cannot start in
a process that holds it.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ext.kernels.sparse import Int32

Symbols = npt.NDArray[np.uint16]

NO_LINE = -1  # instead of an indentation, where no line starts


class Repeat(NamedTuple):
    """The last ``period * copies`` symbols are ``copies`` times the same block; no copies: there is none."""

    period: int
    copies: int


def longest(symbols: Symbols, indents: Int32, newline: int, shortest: int, copies: int) -> Repeat:
    """The repetition at the end of a sequence that covers the most symbols, and of those that of the shortest block.

    Of each period the copies fill the run, which is the longest end of the sequence with that period. A block in one
    line is counted from where the run begins. One with a line's end in it is counted from the first line of those in
    the run that are indented least, for that is where it opens: what it begins with elsewhere is its inside. Either way
    the last copy has to end where the sequence does.

    Args:
        symbols: uint16 ``[num_symbols]``.
        indents: int32 ``[num_symbols]``, how far the line is indented that starts there, or `NO_LINE`.
        newline: the symbol of a line's end.
        shortest: least period.
        copies: least number of them, at least 2.
    """
    return Repeat(*_compiled()(symbols, indents, newline, shortest, copies))


@functools.cache
def _compiled() -> Any:
    from vllm_ext.kernels import repeats_numba

    return repeats_numba.compiled()
