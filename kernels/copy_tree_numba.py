# SPDX-License-Identifier: Apache-2.0
"""The loop of `copy_tree.py`, which documents it, for numba."""

import functools
from typing import Any

import numba
import numpy as np

from vllm_ext.kernels import backends


@functools.cache
def compiled() -> Any:
    """`copy_tree`, compiled at its first call."""
    return backends.compile_cached(numba.njit, nogil=True)(copy_tree)


def copy_tree(
    text: Any,
    copies: Any,
    chances: Any,
    lengths: Any,
    vocab_size: int,
    max_depth: int,
    chain: bool,
    tree: Any,
) -> int:
    """See `copy_tree.py`."""
    num_lengths, num_depths = chances.shape[1:]
    budget = len(tree.tokens)
    depths = np.zeros(len(copies), np.int64)  # nodes each copy has come down
    nodes = np.full(len(copies), -1, np.int64)  # the deepest of them
    count = 0
    while count < budget:
        best = -1
        token = np.int32(0)
        group = 0
        most_probable = np.float32(0.0)
        for i in range(len(copies)):
            at = copies[i, 0] + depths[i]
            if (
                at >= len(text)
                or depths[i] >= max_depth
                or (chain and nodes[i] != count - 1)
                or not 0 <= text[at] < vocab_size
            ):
                continue
            length_class = 0
            for bound in lengths:
                length_class += copies[i, 1] + depths[i] > bound
            own = chances[copies[i, 2], length_class, min(depths[i], num_depths - 1)]
            probability = own if nodes[i] < 0 else tree.probabilities[nodes[i]] * own
            if probability > most_probable:  # of equals the first
                best = i
                most_probable = probability
                token = text[at]
                group = copies[i, 2] * num_lengths + length_class
        if best < 0:
            break
        above = nodes[best]
        for i in range(len(copies)):
            at = copies[i, 0] + depths[i]
            if nodes[i] == above and at < len(text) and text[at] == token:
                nodes[i] = count
                depths[i] += 1
        tree.tokens[count] = token
        tree.parents[count] = above
        tree.probabilities[count] = most_probable
        tree.groups[count] = group
        count += 1
    return count
