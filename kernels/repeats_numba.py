# SPDX-License-Identifier: Apache-2.0
"""The loops of `repeats.py`, which documents them, for numba."""

import functools
from typing import Any

import numba
import numpy as np

from vllm_ext.kernels import backends
from vllm_ext.kernels.repeats import NO_LINE


@functools.cache
def compiled() -> Any:
    """`longest`, compiled at its first call."""
    return backends.compile_cached(numba.njit, nogil=True)(longest)


def longest(symbols: Any, indents: Any, newline: int, shortest: int, copies: int) -> tuple[int, int]:
    """See `repeats.longest`."""
    num = len(symbols)
    # By place, the first of the lines at and behind it that are indented least; and how many line's ends there are.
    opening = np.full(num + 1, NO_LINE, dtype=np.int64)
    breaks = np.zeros(num + 1, dtype=np.int64)
    for place in range(num - 1, -1, -1):
        opening[place] = opening[place + 1]
        breaks[place] = breaks[place + 1] + (symbols[place] == newline)
        if indents[place] != NO_LINE and (
            opening[place] == NO_LINE or indents[place] <= indents[opening[place]]
        ):
            opening[place] = place
    # Z-function of the sequence read backwards: same[d] symbols at its end are those d before them.
    same = np.zeros(num, dtype=np.int64)
    left, right = 0, 0
    found, most = (0, 0), 0
    for period in range(1, num):
        if period < right:
            same[period] = min(right - period, same[period - left])
        while (
            period + same[period] < num
            and symbols[num - 1 - same[period]] == symbols[num - 1 - period - same[period]]
        ):
            same[period] += 1
        if period + same[period] > right:
            left, right = period, period + same[period]
        if period < shortest or period + same[period] < copies * period:
            continue
        start = num - period - same[period]
        if breaks[num - period]:
            start = opening[start]
            if start == NO_LINE:
                continue
        covered = num - start
        if covered > most and covered % period == 0 and covered >= copies * period:
            found, most = (period, covered // period), covered
    return found
