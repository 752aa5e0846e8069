# SPDX-License-Identifier: Apache-2.0
"""The loops of `ngram_table.py`, which documents them, for numba."""

import functools
import math
from typing import Any

import numba
import numpy as np

from vllm_ext.kernels import backends
from vllm_ext.kernels.best_first_tree_numba import SHIFT, mix
from vllm_ext.kernels.ngram_table import EMPTY, MOST_COUNT, WAYS


@functools.cache
def compiled(name: str) -> Any:
    """The function of that name in this file, compiled at its first call."""
    return backends.compile_cached(numba.njit, nogil=True)(globals()[name])


@numba.njit  # type: ignore[untyped-decorator]
def _first_way(keys: Any, key: int) -> Any:
    return ((key >> SHIFT) & (len(keys) // WAYS - 1)) * WAYS


@numba.njit  # type: ignore[untyped-decorator]
def _find(keys: Any, key: int) -> Any:
    first = _first_way(keys, key)
    for slot in range(first, first + WAYS):
        if keys[slot] == key:
            return slot
    return -1


@numba.njit  # type: ignore[untyped-decorator]
def _claim(table: Any, key: int) -> Any:
    """The slot of a context that is being recorded."""
    slot = _find(table.keys, key)
    if slot < 0:
        slot = _first_way(table.keys, key)
        for other in range(slot + 1, slot + WAYS):
            if table.used[other] < table.used[slot]:
                slot = other
        table.keys[slot] = key
        table.counts[slot] = 0
        table.successors[slot] = EMPTY
        table.weights[slot] = 0.0
    table.clock[0] += 1
    table.used[slot] = table.clock[0]
    return slot


@numba.njit  # type: ignore[untyped-decorator]
def gumbel(key: int) -> Any:
    """Standard Gumbel noise of a key: murmur3's finaliser makes a uniform number of it."""
    bits = np.uint64(key)
    bits = (bits ^ (bits >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    bits = (bits ^ (bits >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    bits = bits ^ (bits >> np.uint64(33))
    uniform = (np.float64(bits >> np.uint64(12)) + 0.5) * 2.0**-52  # neither 0 nor 1
    return -math.log(-math.log(uniform))


@numba.njit  # type: ignore[untyped-decorator]
def _longest(table: Any, context: Any, shortest: int, tokens: Any, parents: Any, node: int) -> Any:
    """The slot of the longest known context that ends with a node, or -1, and how many tokens it has."""
    key = 0
    slot = -1
    order = 0
    back = len(context)
    for length in range(1, len(context) + 1):
        if node >= 0:
            token = tokens[node]
            node = parents[node]
        else:
            back -= 1
            token = context[back]
        if token < 0:
            break
        key = mix(key, token)
        if length >= shortest:
            found = _find(table.keys, key)
            if found >= 0:
                slot, order = found, length
    return slot, order


@numba.njit  # type: ignore[untyped-decorator]
def _class_of(share: float, bounds: Any) -> Any:
    s = 0
    for bound in bounds:
        s += share > bound
    return s


def insert(table: Any, keys: Any, used: Any, counts: Any, successors: Any, weights: Any) -> int:
    for entry in range(len(keys)):
        slot = _first_way(table.keys, keys[entry])
        end = slot + WAYS
        while slot < end and table.used[slot] != 0 and table.keys[slot] != keys[entry]:
            slot += 1
        if slot == end or table.used[slot] != 0:
            return entry
        table.keys[slot] = keys[entry]
        table.used[slot] = used[entry]
        table.counts[slot] = counts[entry]
        table.successors[slot] = successors[entry]
        table.weights[slot] = weights[entry]
    return -1


def record_rows(
    table: Any,
    row_start: Any,
    tokens: Any,
    parents: Any,
    accepted: Any,
    before: Any,
    top_ids: Any,
    top_logits: Any,
    vocab_size: int,
) -> None:
    width = table.successors.shape[1]
    shares = np.empty(top_ids.shape[1], np.float32)
    ids = np.empty(width + top_ids.shape[1], np.int32)
    weights = np.empty(width + top_ids.shape[1], np.float32)
    for request in range(len(row_start) - 1):
        start = row_start[request]
        for row in range(start, row_start[request + 1]):
            if not accepted[row]:
                continue
            total = np.float32(0.0)
            for rank in range(len(shares)):
                shares[rank] = np.exp(top_logits[row, rank] - top_logits[row, 0])
                total += shares[rank]
            if not total > 0.0:  # NaN, or no logits at all
                continue
            key = 0
            at = row
            back = before.shape[1]
            for _ in range(before.shape[1] + 1):
                if at >= start:
                    token = tokens[at]
                    at = start + parents[at] if parents[at] >= 0 else -1
                else:
                    back -= 1
                    token = before[request, back]
                if not 0 <= token < vocab_size:
                    break
                key = mix(key, token)
                slot = _claim(table, key)
                count = table.counts[slot]
                size = 0
                while size < width and table.successors[slot, size] != EMPTY:
                    ids[size] = table.successors[slot, size]
                    weights[size] = table.weights[slot, size] * count / (count + 1)
                    size += 1
                for rank in range(len(shares)):
                    if not 0 <= top_ids[row, rank] < vocab_size:
                        continue
                    i = 0
                    while i < size and ids[i] != top_ids[row, rank]:
                        i += 1
                    if i == size:
                        ids[i] = top_ids[row, rank]
                        weights[i] = 0.0
                        size += 1
                    weights[i] += shares[rank] / total / (count + 1)
                for i in range(1, size):  # the heaviest first, of equals the earlier one
                    successor, weight = ids[i], weights[i]
                    j = i
                    while j > 0 and weights[j - 1] < weight:
                        ids[j], weights[j] = ids[j - 1], weights[j - 1]
                        j -= 1
                    ids[j], weights[j] = successor, weight
                for i in range(min(size, width)):
                    table.successors[slot, i] = ids[i]
                    table.weights[slot, i] = weights[i]
                table.counts[slot] = min(count + 1, MOST_COUNT)


def record_text(table: Any, tokens: Any, order: int, step: float, cap: float, vocab_size: int) -> None:
    width = table.successors.shape[1]
    for i in range(order, len(tokens)):
        known = True
        key = 0
        for back in range(order + 1):
            token = tokens[i - back]
            known = known and 0 <= token < vocab_size
            if back > 0:
                key = mix(key, token)
        if not known:
            continue
        slot = _claim(table, key)
        successors, weights = table.successors[slot], table.weights[slot]
        at = 0
        while at < width - 1 and successors[at] != tokens[i] and successors[at] != EMPTY:
            at += 1
        weight = np.float32(step)
        if successors[at] == tokens[i]:
            weight = np.float32(min(weights[at] + weight, cap))
        while at > 0 and weights[at - 1] <= weight:
            successors[at], weights[at] = successors[at - 1], weights[at - 1]
            at -= 1
        successors[at], weights[at] = tokens[i], weight


def grow_tree(
    table: Any,
    context: Any,
    shortest: int,
    classes: Any,
    growing: Any,
    max_depth: int,
    chain: bool,
    tree: Any,
) -> int:
    tokens, parents, probabilities = tree.tokens, tree.parents, tree.probabilities
    num_levels, num_shares, num_depths = classes.chances.shape
    width = table.successors.shape[1]
    branches = min(growing.branches, width)
    budget = len(tokens)
    depths = np.empty(budget, np.int64)
    below = np.zeros(budget + 1, np.int64)  # nodes taken below each node, the root's the last
    shares = np.empty(width, np.float32)
    # The frontier. A taken child stays, with probability 0: looking past it is cheaper than a heap.
    room = budget * branches
    child_token = np.empty(room, np.int32)
    child_parent = np.empty(room, np.int32)
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
            slot, order = _longest(table, context, shortest, tokens, parents, node)
            num_successors = 0
            if slot >= 0:
                total = np.float32(0.0)
                while num_successors < width and table.weights[slot, num_successors] > 0.0:
                    share = table.weights[slot, num_successors] / table.weights[slot, 0]
                    if growing.temperature != 1.0:
                        share = np.float32(share ** (1.0 / growing.temperature))
                    shares[num_successors] = share
                    total += share
                    num_successors += 1
                level = min(order - shortest, num_levels - 1)
            for i in range(min(branches, num_successors)):  # the heaviest first
                share = shares[i] / total
                if share <= 0.0:
                    break
                s = _class_of(share, classes.shares)
                child_token[size] = table.successors[slot, i]
                child_parent[size] = node
                child_group[size] = level * num_shares + s
                child_probability[size] = probability * classes.chances[level, s, min(depth, num_depths - 1)]
                size += 1
        best = -1
        highest = 0.0
        for i in range(size):
            score = np.float64(child_probability[i])
            if growing.exploration > 0.0:
                score *= 1.0 + growing.exploration * math.sqrt(below[child_parent[i]])
            if score > highest:  # of equals the first
                best = i
                highest = score
        if best < 0:
            break
        node = count
        count += 1
        tokens[node] = child_token[best]
        parents[node] = child_parent[best]
        probabilities[node] = child_probability[best]
        tree.groups[node] = child_group[best]
        depths[node] = 1
        if parents[node] >= 0:
            depths[node] = depths[parents[node]] + 1
        at = parents[node]
        while at >= 0:
            below[at] += 1
            at = parents[at]
        below[-1] += 1
        child_probability[best] = 0.0
    return count


@numba.njit  # type: ignore[untyped-decorator]
def _share_out(weights: Any, shape: Any, q: Any) -> None:
    """A context's weights as the distribution that a request draws from."""
    total = 0.0
    for i in range(len(weights)):
        q[i] = 0.0
        if weights[i] > 0.0 and (i < shape.top_k or shape.top_k <= 0):
            q[i] = (weights[i] / weights[0]) ** (1.0 / shape.temperature)
        if q[i] < shape.min_p:
            q[i] = 0.0
        total += q[i]
    before = 0.0
    kept = 0.0
    for i in range(len(weights)):
        if shape.top_p < 1.0 and before >= shape.top_p * total:
            q[i] = 0.0
        before += q[i]
        kept += q[i]
    for i in range(len(weights)):
        q[i] /= kept


@numba.njit  # type: ignore[untyped-decorator]
def _expected(left: Any, chances: Any, bounds: Any, depth: int) -> Any:
    """The mean of the estimates of what may be drawn."""
    total = 0.0
    mean = 0.0
    for i in range(len(left)):
        total += left[i]
    if total <= 0.0:
        return 0.0
    for i in range(len(left)):
        if left[i] > 0.0:
            share = left[i] / total
            mean += share * chances[_class_of(share, bounds), depth]
    return mean


def draw_tree(
    table: Any,
    context: Any,
    classes: Any,
    shape: Any,
    noise: int,
    max_depth: int,
    tree: Any,
    ids: Any,
    q: Any,
) -> int:
    tokens, parents = tree.tokens, tree.parents
    num_levels, num_ranks, num_shares, num_depths = classes.chances.shape
    budget, width = len(tokens), q.shape[1]
    # The root's place is 0, node i's i + 1.
    depths = np.zeros(budget + 1, np.int64)
    levels = np.zeros(budget + 1, np.int64)
    noises = np.zeros(budget + 1, np.int64)
    ranks = np.zeros(budget + 1, np.int64)  # children so far
    reached = np.zeros(budget + 1, np.float64)  # the chance that verification comes here
    values = np.zeros(budget + 1, np.float64)  # the chance that it comes to the next child; 0: there is none
    left = np.zeros((budget + 1, width), np.float64)  # of q, what was not drawn
    noises[0], reached[0] = mix(0, noise), 1.0
    least = 1.0
    count = 0
    while count < budget:
        if depths[count] < max_depth:
            slot, order = _longest(table, context, 1, tokens, parents, count - 1)
            if slot >= 0:
                _share_out(table.weights[slot], shape, q[count])
                left[count] = q[count]
                ids[count] = table.successors[slot]
                levels[count] = min(order - 1, num_levels - 1)
                chances = classes.chances[levels[count], 0]
                depth = min(depths[count], num_depths - 1)
                values[count] = reached[count] * _expected(left[count], chances, classes.shares, depth)
        above = 0
        for place in range(1, count + 1):
            if values[place] > values[above]:  # of equals the first
                above = place
        if values[above] <= 0.0:
            break
        # Which child comes next was decided by what is known before it is drawn: `recursive_rejection`.
        drawn = -1
        highest = -np.inf
        total = 0.0
        for i in range(width):
            if left[above, i] > 0.0:
                total += left[above, i]
                score = math.log(left[above, i]) + gumbel(mix(noises[above], ids[above, i]))
                if score > highest:
                    drawn, highest = i, score
        share = left[above, drawn] / total
        level, rank, s = levels[above], ranks[above], _class_of(share, classes.shares)
        depth = min(depths[above], num_depths - 1)
        least = min(least, values[above])
        tokens[count], parents[count], tree.probabilities[count] = ids[above, drawn], above - 1, least
        tree.groups[count] = (level * num_ranks + rank) * num_shares + s
        count += 1
        depths[count] = depths[above] + 1
        noises[count] = mix(noises[above], tokens[count - 1])
        reached[count] = reached[above] * classes.chances[level, rank, s, depth]
        left[above, drawn] = 0.0
        ranks[above] += 1
        values[above] = 0.0
        if ranks[above] < num_ranks:  # of nothing left `_expected` is 0
            chances = classes.chances[level, rank + 1]
            values[above] = reached[above] * _expected(left[above], chances, classes.shares, depth)
    return count
