# SPDX-License-Identifier: Apache-2.0
"""Greedy growth of draft trees over a table of successors: always the most probable node next."""

import functools
from typing import Any

import numba
import numpy as np


def best_first_trees(
    successors: Any,
    classes: Any,
    estimates: Any,
    keys: Any,
    contexts: Any,
    budgets: Any,
    max_depths: Any,
) -> tuple[Any, Any, Any, Any, Any]:
    num_requests, most = len(budgets), max(int(budgets.max(initial=0)), 0)
    counts = np.zeros(num_requests, np.int32)
    tokens = np.empty((num_requests, most), np.int32)
    parents = np.empty((num_requests, most), np.int32)
    probabilities = np.empty((num_requests, most), np.float32)
    node_classes = np.empty((num_requests, most), np.uint8)
    if most:
        _compiled()(
            successors, classes, estimates, keys, contexts, budgets, max_depths,
            counts, tokens, parents, probabilities, node_classes,
        )
    return counts, tokens, parents, probabilities, node_classes


@functools.cache
def _compiled() -> Any:
    # numba compiles at the first call, not here and not at import.
    try:
        return numba.njit(_grow, cache=True, nogil=True)
    except RuntimeError:  # neither the package's folder nor the user's cache folder is writable
        return numba.njit(_grow, nogil=True)


@numba.njit  # type: ignore[untyped-decorator]
def _row(keys: Any, vocab: int, previous: int, token: int) -> int:
    if previous >= 0:
        key = previous * vocab + token
        slot = key % len(keys)
        if keys[slot] == key:
            return vocab + slot
    return token


def _grow(
    successors: Any, classes: Any, estimates: Any, keys: Any, contexts: Any, budgets: Any, max_depths: Any,
    counts: Any, tokens: Any, parents: Any, probabilities: Any, node_classes: Any,
) -> None:
    width = successors.shape[1]
    vocab = successors.shape[0] - len(keys)
    deepest = estimates.shape[1] - 1
    most = tokens.shape[1]
    depth = np.empty(most, np.int32)
    # The frontier.
    room = (most + 1) * width
    c_token = np.empty(room, np.int32)
    c_parent = np.empty(room, np.int32)
    c_class = np.empty(room, np.uint8)
    c_probability = np.empty(room, np.float32)
    for request in range(len(budgets)):
        size = 0
        node = -1
        count = 0
        while True:
            # Open `node`.
            if node < 0:
                d = 0
                token = contexts[request, 1]
                previous = contexts[request, 0]
                above = np.float32(1.0)
            else:
                d = depth[node]
                token = tokens[request, node]
                parent = parents[request, node]
                previous = tokens[request, parent] if parent >= 0 else contexts[request, 1]
                above = probabilities[request, node]
            if d < max_depths[request] and 0 <= token < vocab:
                row = _row(keys, vocab, previous, token)
                for rank in range(width):
                    child = successors[row, rank]
                    if child < 0 or child >= vocab:
                        break
                    group = classes[row, rank]
                    c_token[size] = child
                    c_parent[size] = node
                    c_class[size] = group
                    c_probability[size] = above * estimates[group, min(d, deepest)]
                    size += 1
            if count >= budgets[request]:
                break
            best = -1
            best_probability = np.float32(0.0)
            for i in range(size):
                if c_probability[i] > best_probability:
                    best = i
                    best_probability = c_probability[i]
            if best < 0:
                break
            node = count
            count += 1
            tokens[request, node] = c_token[best]
            parents[request, node] = c_parent[best]
            node_classes[request, node] = c_class[best]
            probabilities[request, node] = best_probability
            depth[node] = 1 if c_parent[best] < 0 else depth[c_parent[best]] + 1
            c_probability[best] = 0.0
        counts[request] = count
