# SPDX-License-Identifier: Apache-2.0
"""Tables of token successors, and draft trees grown from them; loops for numba.

`grow_trees` reads the tables, the ``record_*`` functions write them, `judge_tree` counts how good the trees
were. `best_first_tree_ref.py` is the readable form of them all.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
UInt8 = npt.NDArray[np.uint8]

EMPTY = -1

# A context is known by one 64-bit number, mixed from its tokens, the newest first; 0 marks a free slot. Two
# contexts of one number would share an entry; that is rare and costs no more than a draft.
_MULTIPLIER = -7046029254386353131  # odd and well mixed: 2 ** 64 over the golden ratio, as an int64
_SHIFT = 36  # the higher bits are the better mixed ones


class SuccessorTables(NamedTuple):
    """What followed which token, by three keys: one token, a pair of tokens, a longer context of seen text.

    Rows ``0 .. vocab - 1`` belong to tokens, the others to pairs. A newer key displaces an older in its slot.
    """

    successors: Int32  # [vocab + pair_slots, width] best first, EMPTY behind the last one
    bases: UInt8  # [vocab + pair_slots, width] the class of each entry, see `record_rows`
    pair_keys: Int64  # [pair_slots], a power of two or none
    text_keys: Int64  # [text_slots], a power of two or none
    text_successors: Int32  # [text_slots] what followed that context last

    @classmethod
    def empty(cls, vocab_size: int, width: int, pair_slots: int, text_slots: int) -> "SuccessorTables":
        """Tables that know nothing."""
        return cls(
            np.full((vocab_size + pair_slots, width), EMPTY, np.int32),
            np.zeros((vocab_size + pair_slots, width), np.uint8),
            np.zeros(pair_slots, np.int64),
            np.zeros(text_slots, np.int64),
            np.full(text_slots, EMPTY, np.int32),
        )


class GrownTrees(NamedTuple):
    """Trees of a batch; of request ``i`` the first ``counts[i]`` columns are nodes."""

    counts: Int32  # [num_requests]
    tokens: Int32  # [num_requests, most]
    parents: Int32  # [num_requests, most] -1 is the root
    probabilities: Float32  # [num_requests, most] path probabilities, descending
    groups: UInt8  # [num_requests, most] which estimate the node's own probability came from


def record_rows(
    tables: SuccessorTables,
    row_start: Int32,
    tokens: Int32,
    parents: Int32,
    accepted: npt.NDArray[np.bool_],
    root_previous: Int32,
    top_ids: Int32,
    top_logits: Float32,
    shares: Float32,
) -> None:
    """Overwrite the rows of verified tokens, and of their pairs with the token before.

    Rejected rows first, then accepted ones, each in order: of rows with one key the last accepted one stays.
    An entry's class is 1 + the number of ``shares`` below its part of the softmax over the row's logits; in a
    pair's row ``len(shares) + 1`` more. Class 0 is left to entries that come from no logits.

    Args:
        tables: written to.
        row_start: int32 ``[num_requests + 1]``; request i has the rows ``row_start[i]:row_start[i + 1]``, the
            root first.
        tokens: int32 ``[num_rows]``; a row whose token is not in the vocabulary is skipped.
        parents: int32 ``[num_rows]`` offset inside the request of the token before; -1 for roots.
        accepted: bool ``[num_rows]``.
        root_previous: int32 ``[num_requests]`` the token before each root; -1 if unknown.
        top_ids: int32 ``[num_rows, width]``, best first.
        top_logits: float32 ``[num_rows, width]``.
        shares: float32 ``[num_bounds]``, ascending.
    """
    _compiled(_record_rows)(
        tables, row_start, tokens, parents, accepted, root_previous, top_ids, top_logits, shares
    )


def record_text(tables: SuccessorTables, tokens: Int32, start: int, longest: int) -> None:
    """Note ``tokens[start:]`` as the successors of the 2 to ``longest`` tokens before each of them.

    Args:
        tables: written to.
        tokens: int32 ``[num_tokens]``. Contexts and successors outside the vocabulary are skipped.
        start: index of the first successor.
        longest: most tokens of a context.
    """
    _compiled(_record_text)(tables, tokens, start, longest)


def grow_trees(
    tables: SuccessorTables,
    estimates: Float32,
    contexts: Int32,
    budgets: Int64,
    max_depths: Int64,
    template: Int32,
) -> GrownTrees:
    """From each root on, open the newest node and take the most probable of all unopened children.

    The children of a node are its pair's row, or its token's where the pair is unknown, and what followed
    the longest known context of text. A child's own probability is ``estimates[level, base, depth - 1]``, at
    greater depths the last one. ``level`` is 0, or for the text's successor the length of that context minus
    1. ``base`` is the class of its entry in the row. A text's successor that the row lacks has the last class
    if that is a pair's row, the last but one if it is a token's, and 0 if the row holds nothing from logits.
    Of equally probable children the one found first is taken.

    Args:
        tables: as recorded.
        estimates: float32 ``[longest, num_bases, num_depths]``, at most 1; ``longest * num_bases <= 256``.
        contexts: int32 ``[num_requests, longest]`` the last tokens, newest last, -1 before the first.
        budgets: int64 ``[num_requests]`` most nodes.
        max_depths: int64 ``[num_requests]`` deepest nodes; the root's children have depth 1.
        template: int32 ``[num_positions, width]`` the shape: position 0 is the root, an entry the position of
            the child of that rank, -1 where there is none; a successor that the row lacks has none. No
            positions: any shape.
    """
    num_requests, most = len(budgets), max(int(budgets.max(initial=0)), 0)
    trees = GrownTrees(
        np.zeros(num_requests, np.int32),
        np.empty((num_requests, most), np.int32),
        np.empty((num_requests, most), np.int32),
        np.empty((num_requests, most), np.float32),
        np.empty((num_requests, most), np.uint8),
    )
    _compiled(_grow_trees)(tables, estimates, contexts, budgets, max_depths, template, trees)
    return trees


def judge_tree(
    tokens: Int32,
    parents: Int32,
    groups: UInt8,
    emitted: Int32,
    hits: Float64,
    trials: Float64,
    fade: float,
) -> None:
    """Count for each group how often its nodes were right, older counts fading by ``fade`` with each new one.

    A node is tried if its ancestors are what the request put out; it is hit if it is too.

    Args:
        tokens: int32 ``[num_nodes]`` of a tree that was proposed.
        parents: int32 ``[num_nodes]``.
        groups: uint8 ``[num_nodes]``, as `grow_trees` gave them.
        emitted: int32 ``[num_emitted]`` what the request put out behind the tree's root.
        hits: float64 ``[num_groups, num_depths]``, written to.
        trials: float64 ``[num_groups, num_depths]``, written to.
        fade: below 1.
    """
    _compiled(_judge_tree)(tokens, parents, groups, emitted, hits, trials, fade)


@functools.cache
def _compiled(function: Callable[..., None]) -> Any:
    # numba compiles at the first call, not here and not at import.
    try:
        return numba.njit(function, cache=True, nogil=True)
    except RuntimeError:  # neither the package's folder nor the user's cache folder is writable
        return numba.njit(function, nogil=True)


@numba.njit  # type: ignore[untyped-decorator]
def _mix(key: int, token: int) -> int:
    """The key of a context that reaches one token further back."""
    return (key ^ (token + 1)) * _MULTIPLIER


@numba.njit  # type: ignore[untyped-decorator]
def _slot(key: int, slots: int) -> int:
    return (key >> _SHIFT) & (slots - 1)


def _record_rows(
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
                    key = _mix(_mix(0, token), previous)
                    slot = _slot(key, pair_slots)
                    tables.pair_keys[slot] = key
                    for rank in range(width):
                        tables.successors[vocab + slot, rank] = top_ids[row, rank]
                        tables.bases[vocab + slot, rank] = bases[rank] + len(shares) + 1


def _record_text(tables: Any, tokens: Any, start: int, longest: int) -> None:
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
            key = _mix(key, token)
            if length > 1:
                slot = _slot(key, slots)
                tables.text_keys[slot] = key
                tables.text_successors[slot] = tokens[i]


def _grow_trees(
    tables: Any, estimates: Any, contexts: Any, budgets: Any, max_depths: Any, template: Any, trees: Any
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
                    key = _mix(key, context[i])
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


def _judge_tree(
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
