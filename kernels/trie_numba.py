# SPDX-License-Identifier: Apache-2.0
"""The loops of `trie.py`, which documents them, for numba."""

import functools
from typing import Any

import numba
import numpy as np

from vllm_ext.kernels import backends
from vllm_ext.kernels.trie import DEAD, ROOT


@functools.cache
def compiled(name: str) -> Any:
    """The function of that name in this file, compiled at its first call."""
    return backends.compile_cached(numba.njit, nogil=True)(globals()[name])


def advance(trie: Any, states: Any, tokens: Any, result: Any) -> None:
    for row in range(len(states)):
        result[row] = behind(trie, states[row], tokens[row])


def follow(trie: Any, tokens: Any) -> int:
    state = ROOT
    for token in tokens:
        state = behind(trie, state, token)
    return state


@numba.njit  # type: ignore[untyped-decorator]
def behind(trie: Any, state: int, token: int) -> int:
    """The number after that of the edge with this token, which is the state behind it; `DEAD`: there is none."""
    if state == DEAD:
        return DEAD
    low, high = trie.first_edge[state], trie.first_edge[state + 1]
    end = high
    while low < high:
        middle = (low + high) // 2
        if trie.tokens[middle] < token:
            low = middle + 1
        else:
            high = middle
    if low < end and trie.tokens[low] == token:
        return int(low) + 1
    return DEAD


def fill_masks(trie: Any, states: Any, end: int, masks: Any) -> None:
    for row in range(len(states)):
        mask = masks[row]
        mask[:] = 0
        state = states[row]
        if state == DEAD:
            continue
        for edge in range(trie.first_edge[state], trie.first_edge[state + 1]):
            token = trie.tokens[edge]
            mask[token >> 5] |= np.int32(1) << np.int32(token & 31)
        if trie.final[state]:
            mask[end >> 5] |= np.int32(1) << np.int32(end & 31)
