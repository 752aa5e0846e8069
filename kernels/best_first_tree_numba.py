# SPDX-License-Identifier: Apache-2.0
"""The loops of `best_first_tree.py`, which documents them, for numba."""

import functools
from typing import Any

import numba
import numpy as np

from vllm_ext.kernels import backends

# A context is known by one 64-bit number, mixed from its tokens, the newest first; 0 marks a free slot. Two
# contexts of one number would share an entry; that is rare and costs no more than a draft.
_MULTIPLIER = -7046029254386353131  # odd and well mixed: 2 ** 64 over the golden ratio, as an int64
SHIFT = 36  # the higher bits are the better mixed ones


@functools.cache
def compiled(name: str) -> Any:
    """The function of that name in this file, compiled at its first call."""
    return backends.compile_cached(numba.njit, nogil=True)(globals()[name])


@numba.njit  # type: ignore[untyped-decorator]
def mix(key: int, token: int) -> int:
    """The key of a context that reaches one token further back."""
    return (key ^ (token + 1)) * _MULTIPLIER


@numba.njit  # type: ignore[untyped-decorator]
def _slot(key: int, slots: int) -> int:
    return (key >> SHIFT) & (slots - 1)


def record_rows(
    tables: Any,
    row_start: Any,
    tokens: Any,
    parents: Any,
    accepted: Any,
    root_previous: Any,
    top_ids: Any,
    top_logits: Any,
    shares: Any,
) -> None:
    pair_slots = len(tables.pair_keys)
    vocab = len(tables.successors) - pair_slots
    width = tables.successors.shape[1]
    bases = np.empty(width, np.uint8)
    for kept in (False, True):
        for request in range(len(row_start) - 1):
            start = row_start[request]
            for row in range(start, row_start[request + 1]):
                token = tokens[row]
                if accepted[row] != kept or not 0 <= token < vocab:
                    continue
                total = np.float32(0.0)
                for rank in range(width):
                    total += np.exp(top_logits[row, rank] - top_logits[row, 0])
                for rank in range(width):
                    share = np.exp(top_logits[row, rank] - top_logits[row, 0]) / total
                    base = 1
                    for bound in shares:  # NaN is above none
                        base += share > bound
                    bases[rank] = base
                    tables.successors[token, rank] = top_ids[row, rank]
                    tables.bases[token, rank] = base
                previous = root_previous[request] if parents[row] < 0 else tokens[start + parents[row]]
                if pair_slots and 0 <= previous < vocab:
                    key = mix(mix(0, token), previous)
                    slot = _slot(key, pair_slots)
                    tables.pair_keys[slot] = key
                    for rank in range(width):
                        tables.successors[vocab + slot, rank] = top_ids[row, rank]
                        tables.bases[vocab + slot, rank] = bases[rank] + len(shares) + 1


def record_text(tables: Any, tokens: Any, start: int, longest: int) -> None:
    vocab = len(tables.successors) - len(tables.pair_keys)
    slots = len(tables.text_keys)
    for i in range(start, len(tokens)):
        if not 0 <= tokens[i] < vocab:
            continue
        key = 0
        for length in range(1, min(longest, i) + 1):
            token = tokens[i - length]
            if not 0 <= token < vocab:
                break
            key = mix(key, token)
            if length > 1:
                slot = _slot(key, slots)
                tables.text_keys[slot] = key
                tables.text_successors[slot] = tokens[i]


def grow_trees(
    tables: Any,
    estimates: Any,
    contexts: Any,
    budgets: Any,
    max_depths: Any,
    chains: Any,
    template: Any,
    trees: Any,
) -> None:
    successors = tables.successors
    width = successors.shape[1]
    pair_slots, text_slots = len(tables.pair_keys), len(tables.text_keys)
    vocab = len(successors) - pair_slots
    num_bases, num_depths = estimates.shape[1:]
    most = trees.tokens.shape[1]
    depths = np.empty(most, np.int64)
    positions = np.empty(most, np.int64)
    context = np.empty(contexts.shape[1], np.int64)  # newest first
    # The frontier. A taken child stays, with probability 0: looking past it is cheaper than a heap.
    room = most * (width + 1)
    child_token = np.empty(room, np.int32)
    child_parent = np.empty(room, np.int32)
    child_group = np.empty(room, np.uint8)
    child_position = np.empty(room, np.int64)
    child_probability = np.empty(room, np.float32)
    for request in range(len(budgets)):
        tokens, parents = trees.tokens[request], trees.parents[request]
        size = 0
        count = 0
        node = -1
        while count < budgets[request]:
            if chains[request]:
                size = 0
            depth, position, probability = 0, 0, np.float32(1.0)
            if node >= 0:
                depth, position = depths[node], positions[node]
                probability = trees.probabilities[request, node]
            if depth < max_depths[request]:
                at = node
                back = len(context) - 1
                for i in range(len(context)):
                    if at >= 0:
                        context[i] = tokens[at]
                        at = parents[at]
                    else:
                        context[i] = contexts[request, back]
                        back -= 1
                row = -1
                text = -1
                level = 0
                key = 0
                for i in range(len(context)):
                    if not 0 <= context[i] < vocab:
                        break
                    key = mix(key, context[i])
                    if i == 0:
                        row = context[0]
                        continue
                    if i == 1 and pair_slots:
                        slot = _slot(key, pair_slots)
                        if tables.pair_keys[slot] == key:
                            row = vocab + slot
                    if text_slots:
                        slot = _slot(key, text_slots)
                        if tables.text_keys[slot] == key:
                            text = tables.text_successors[slot]
                            level = i
                for rank in range(width + 1):
                    if rank < width:
                        if row < 0:
                            continue
                        token = successors[row, rank]
                        if not 0 <= token < vocab:
                            continue
                        group = tables.bases[row, rank]
                        if token == text:
                            group += level * num_bases
                            text = -1
                    else:  # the text's successor, if the row does not hold it
                        if text < 0:
                            break
                        token = text
                        group = level * num_bases
                        if row >= 0 and tables.bases[row, 0] > 0:
                            group += num_bases - (1 if row >= vocab else 2)
                    child = 0
                    if len(template):
                        child = template[position, rank] if rank < width else -1
                        if child < 0:
                            continue
                    child_token[size] = token
                    child_parent[size] = node
                    child_group[size] = group
                    child_position[size] = child
                    child_probability[size] = (
                        probability
                        * estimates[group // num_bases, group % num_bases, min(depth, num_depths - 1)]
                    )
                    size += 1
            best = -1
            most_probable = np.float32(0.0)
            for i in range(size):
                if child_probability[i] > most_probable:  # of equals the first
                    best = i
                    most_probable = child_probability[i]
            if best < 0:
                break
            node = count
            count += 1
            tokens[node] = child_token[best]
            parents[node] = child_parent[best]
            trees.probabilities[request, node] = most_probable
            trees.groups[request, node] = child_group[best]
            depths[node] = 1 if parents[node] < 0 else depths[parents[node]] + 1
            positions[node] = child_position[best]
            child_probability[best] = 0.0
        trees.counts[request] = count


def judge_tree(
    tokens: Any, parents: Any, groups: Any, emitted: Any, hits: Any, trials: Any, fade: float
) -> None:
    depths = np.zeros(len(tokens), np.int64)  # of the nodes on the output's path; 0 off it
    for node in range(len(tokens)):
        above = 0
        if parents[node] >= 0:
            above = depths[parents[node]]
            if above == 0:
                continue
        if above >= len(emitted):
            continue
        hit = tokens[node] == emitted[above]
        group, column = groups[node], min(above, hits.shape[1] - 1)
        trials[group, column] = trials[group, column] * fade + 1.0
        hits[group, column] = hits[group, column] * fade + hit
        if hit:
            depths[node] = above + 1
