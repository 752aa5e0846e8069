# SPDX-License-Identifier: Apache-2.0
"""The loops of `suffix_index.py`, which documents them, for numba."""

import functools
from typing import Any

import numba
import numpy as np

from vllm_ext.kernels import backends
from vllm_ext.kernels.best_first_tree_numba import SHIFT, mix
from vllm_ext.kernels.suffix_index import CONTEXT_ONLY


@functools.cache
def compiled(name: str) -> Any:
    """The function of that name in this file, compiled at its first call."""
    return backends.compile_cached(numba.njit, nogil=True)(globals()[name])


@numba.njit  # type: ignore[untyped-decorator]
def _slot(log: Any, last: int, order: int) -> Any:
    """The hash of the ``order`` tokens that end at a position; of two with one hash `_find` compares the tokens."""
    mask = len(log) - 1
    key = 0
    for i in range(order):
        key = mix(key, log[(last - i) & mask])
    return key >> SHIFT


def append(index: Any, tokens: Any, first: int, vocab_size: int) -> None:
    log, newest = index.log, index.newest
    mask = len(log) - 1
    num_orders = len(newest)
    end = index.end[0]
    run = 0  # tokens since the last separator, as far as any order looks
    while run < 1 << num_orders - 1 and run < end and log[(end - 1 - run) & mask] >= 0:
        run += 1
    for i in range(len(tokens)):
        token = tokens[i] if 0 <= tokens[i] < vocab_size else -1
        log[end & mask] = token
        run = run + 1 if token >= 0 else 0
        if i < first:
            index.previous[0, end & mask] = CONTEXT_ONLY
        else:
            for o in range(num_orders):
                if run < 1 << o:
                    break
                slot = _slot(log, end, 1 << o) & mask
                back = end - newest[o, slot]
                index.previous[o, end & mask] = back if newest[o, slot] > 0 and back <= mask else 0
                newest[o, slot] = end
        end += 1
    index.end[0] = end


@numba.njit  # type: ignore[untyped-decorator]
def _find(index: Any, text: Any, min_match: int, max_match: int, positions: Any, lengths: Any) -> int:
    log, mask = index.log, len(index.log) - 1
    context, context_mask = text.log, len(text.log) - 1
    most = len(positions)
    end = index.end[0]
    oldest = max(end - len(log), 1)
    last = text.end[0] - 1
    known = 0
    while known < max_match and context[(last - known) & context_mask] >= 0:  # position 0 is a separator
        known += 1
    if known < min_match:
        return 0
    count = 0
    longer = max_match + 1  # matches as long as this were found in the chain before
    for o in range(len(index.newest) - 1, -1, -1):
        order = 1 << o
        if order > known or longer <= min_match:
            continue
        at = index.newest[o, _slot(context, last, order) & mask]
        for _ in range(most):
            if at < oldest or count == most:
                break
            if at + 1 < end and log[(at + 1) & mask] >= 0:
                length = 0
                while (
                    length < known
                    and at - length >= oldest
                    and log[(at - length) & mask] == context[(last - length) & context_mask]
                ):
                    length += 1
                if max(order, min_match) <= length < longer:
                    positions[count] = at
                    lengths[count] = length
                    count += 1
            back = index.previous[o, at & mask]
            if back == 0:
                break
            at -= back
        longer = order
    return count


def find(index: Any, text: Any, min_match: int, max_match: int, positions: Any, lengths: Any) -> Any:
    return _find(index, text, min_match, max_match, positions, lengths)


def grow_tree(
    own: Any,
    shared: Any,
    estimates: Any,
    min_match: int,
    max_match: int,
    most: int,
    max_depth: int,
    chain: bool,
    tree: Any,
) -> int:
    tokens, parents, probabilities = tree.tokens, tree.parents, tree.probabilities
    chances = estimates.chances
    num_lengths, num_shares = chances.shape[1:]
    budget = len(tokens)
    if budget == 0 or max_depth <= 0:
        return 0
    positions = np.empty(2 * most, np.int64)
    lengths = np.empty(2 * most, np.int64)
    num_own = _find(own, own, min_match, max_match, positions[:most], lengths[:most])
    num_found = num_own + _find(
        shared,
        own,
        min_match,
        max_match,
        positions[num_own : num_own + most],
        lengths[num_own : num_own + most],
    )
    owner = np.full(num_found, -1, np.int64)  # the deepest node whose path the occurrence agrees with
    successor = np.empty(num_found, np.int32)  # what it has behind that path, once the node is open
    depths = np.empty(budget, np.int64)
    path = np.empty(budget, np.int32)
    # The frontier. A taken child stays, with probability 0: looking past it is cheaper than a heap.
    room = num_found * budget
    child_token = np.empty(room, np.int32)
    child_parent = np.empty(room, np.int32)
    child_weight = np.empty(room, np.float64)
    child_longest = np.empty(room, np.int64)
    child_source = np.empty(room, np.int64)
    child_group = np.empty(room, np.uint8)
    child_probability = np.empty(room, np.float32)
    size = 0
    count = 0
    node = -1
    while count < budget:
        if chain:
            size = 0
        depth, probability = 0, np.float32(1.0)
        if node >= 0:
            depth, probability = depths[node], probabilities[node]
        if depth < max_depth:
            at = node
            for i in range(depth - 1, -1, -1):
                path[i] = tokens[at]
                at = parents[at]
            first = size
            longest = 0
            total = 0.0
            for i in range(num_found):
                if owner[i] != node:
                    continue
                follows = positions[i] + 1 + depth
                token = np.int32(-1)
                if i >= num_own:
                    if follows < shared.end[0]:
                        token = shared.log[follows & (len(shared.log) - 1)]
                elif follows < own.end[0]:
                    token = own.log[follows]
                else:
                    token = path[follows - own.end[0]]
                successor[i] = token
                if token < 0:
                    continue
                length = lengths[i] + depth
                weight = float(length * length)
                child = first
                while child < size and child_token[child] != token:
                    child += 1
                if child == size:
                    size += 1
                    child_token[child] = token
                    child_parent[child] = node
                    child_weight[child] = 0.0
                    child_longest[child] = 0
                    child_source[child] = 0
                child_weight[child] += weight
                child_longest[child] = max(child_longest[child], length)
                child_source[child] |= 1 if i < num_own else 2
                total += weight
                longest = max(longest, length)
            for child in range(first, size):
                share = child_weight[child] / (total + float(longest * longest))
                length_class = 0
                for bound in estimates.lengths:
                    length_class += child_longest[child] > bound
                share_class = 0
                for bound in estimates.shares:
                    share_class += share > bound
                source = child_source[child] - 1
                child_group[child] = (source * num_lengths + length_class) * num_shares + share_class
                child_probability[child] = probability * chances[source, length_class, share_class]
        best = -1
        most_probable = np.float32(0.0)
        for i in range(size):
            if child_probability[i] > most_probable:  # of equals the first
                best = i
                most_probable = child_probability[i]
        if best < 0:
            break
        for i in range(num_found):
            if owner[i] == child_parent[best] and successor[i] == child_token[best]:
                owner[i] = count
        node = count
        count += 1
        tokens[node] = child_token[best]
        parents[node] = child_parent[best]
        probabilities[node] = most_probable
        tree.groups[node] = child_group[best]
        depths[node] = 1 if parents[node] < 0 else depths[parents[node]] + 1
        child_probability[best] = 0.0
    return count
