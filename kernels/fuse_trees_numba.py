# SPDX-License-Identifier: Apache-2.0
"""The loop of `fuse_trees.py`, which documents it, for numba."""

import functools
from typing import Any

import numba
import numpy as np

from vllm_ext.kernels import backends


@functools.cache
def compiled() -> Any:
    """The function below, compiled at its first call."""
    return backends.compile_cached(numba.njit, nogil=True)(_fuse)


def _fuse(
    tokens: Any,
    parents: Any,
    probabilities: Any,
    tree_start: Any,
    estimates: Any,
    bounds: Any,
    out_tokens: Any,
    out_parents: Any,
    out_probabilities: Any,
    out_groups: Any,
) -> int:
    num_nodes = len(tokens)
    num_bins, num_depths = estimates.shape[1:]
    union_token = np.empty(num_nodes, np.int32)
    union_parent = np.empty(num_nodes, np.int64)
    own = np.zeros(num_nodes, np.float32)
    mask = np.zeros(num_nodes, np.int64)
    depth = np.zeros(num_nodes, np.int64)
    place = np.empty(num_nodes, np.int64)  # of each node in the union
    size = 0
    for tree in range(len(tree_start) - 1):
        start = tree_start[tree]
        for node in range(start, tree_start[tree + 1]):
            above, given_parent = -1, probabilities[node]
            if parents[node] >= 0:
                above = place[start + parents[node]]
                chance_above = probabilities[start + parents[node]]
                given_parent = given_parent / chance_above if chance_above > 0 else np.float32(0.0)
            found = -1
            # A child stands behind its parent; trees are small.
            for i in range(above + 1, size):
                if union_token[i] == tokens[node] and union_parent[i] == above:
                    found = i
                    break
            if found < 0:
                found = size
                size += 1
                union_token[found] = tokens[node]
                union_parent[found] = above
                depth[found] = depth[above] + 1 if above >= 0 else 0
            mask[found] |= 1 << tree
            own[found] = max(own[found], given_parent)
            place[node] = found
    chance = np.empty(size, np.float32)
    group = np.empty(size, np.uint8)
    for node in range(size):
        column = 0
        for bound in bounds:
            column += own[node] > bound
        group[node] = (mask[node] - 1) * num_bins + column
        chance[node] = estimates[mask[node] - 1, column, min(depth[node], num_depths - 1)]
        if union_parent[node] >= 0:
            chance[node] *= chance[union_parent[node]]
    order = np.argsort(-chance, kind="mergesort")  # stable: parents stay in front of their children
    count = min(size, len(out_tokens))
    for i in range(count):
        node = order[i]
        place[node] = i
        out_tokens[i] = union_token[node]
        out_parents[i] = place[union_parent[node]] if union_parent[node] >= 0 else -1
        out_probabilities[i] = chance[node]
        out_groups[i] = group[node]
    return count
