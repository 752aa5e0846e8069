# SPDX-License-Identifier: Apache-2.0
"""The loops of `suffix_array.py`, which documents them, for numba."""

import functools
from typing import Any

import numba
import numpy as np

from vllm_ext.kernels import backends
from vllm_ext.kernels.suffix_array import EMPTY, SORTED_TOKENS


@functools.cache
def compiled(name: str) -> Any:
    """The function of that name in this file, compiled at its first call."""
    return backends.compile_cached(numba.njit, nogil=True)(globals()[name])


@numba.njit  # type: ignore[untyped-decorator]
def _compare(tokens: Any, position: int, context: Any, length: int) -> tuple[int, bool]:
    """How many tokens equal the context's last ``length``, going back; whether the text's next is smaller."""
    newest = len(context) - 1
    # A valid text's comparison ends at its first separator. A torn file costs drafts, but must not crash.
    if position >= len(tokens):
        return 0, True
    for back in range(length):
        if position < back:
            return back, True
        token, wanted = tokens[position - back], context[newest - back]
        if token != wanted:
            return back, token < wanted
    return length, False


def find(tokens: Any, suffixes: Any, separator: int, context: Any) -> tuple[int, int, int]:
    usable = 0
    while usable < len(context) and 0 <= context[len(context) - 1 - usable] < separator:
        usable += 1
    # Where the whole context would stand. Its neighbours there, both compared, share most with it.
    longest = 0
    low, high = 0, len(suffixes)
    while low < high:
        middle = (low + high) // 2
        common, smaller = _compare(tokens, suffixes[middle], context, usable)
        longest = max(longest, common)
        if smaller:
            low = middle + 1
        else:
            high = middle
    if longest == 0:
        return 0, 0, 0
    # Where that much of it stands: around there, mostly not far. Steps that double, then halving.
    first, step = low, 1
    while first >= step and not _compare(tokens, suffixes[first - step], context, longest)[1]:
        first -= step
        step *= 2
    bottom = max(first - step + 1, 0)
    while bottom < first:
        middle = (bottom + first) // 2
        if _compare(tokens, suffixes[middle], context, longest)[1]:
            bottom = middle + 1
        else:
            first = middle
    last, step = low, 1
    while (
        last + step <= len(suffixes)
        and _compare(tokens, suffixes[last + step - 1], context, longest)[0] == longest
    ):
        last += step
        step *= 2
    top = min(last + step - 1, len(suffixes))
    while last < top:
        middle = (last + top) // 2
        if _compare(tokens, suffixes[middle], context, longest)[0] == longest:
            last = middle + 1
        else:
            top = middle
    return longest, first, last


def continuations(
    tokens: Any,
    suffixes: Any,
    separator: int,
    first: int,
    last: int,
    before: int,
    total: int,
    rows: Any,
    start: int,
) -> int:
    num_rows, width = rows.shape
    row = start
    while row < num_rows:
        number = (2 * row + 1) * total // (2 * num_rows) - before
        if number >= last - first:
            break
        at = suffixes[first + number] + 1
        column = 0
        while column < width and at + column < len(tokens) and tokens[at + column] < separator:
            rows[row, column] = tokens[at + column]
            column += 1
        rows[row, column:] = EMPTY
        row += 1
    return row


def grow_tree(
    rows: Any,
    level: int,
    estimates: Any,
    shares: Any,
    evidence: Any,
    max_depth: int,
    chain: bool,
    tree: Any,
) -> int:
    num_rows, width = rows.shape
    num_depths = estimates.shape[1]
    most = len(tree.tokens)
    order = np.arange(num_rows)  # rows; those of a node stand together
    firsts = np.empty(most, np.int64)
    lasts = np.empty(most, np.int64)
    depths = np.empty(most, np.int64)
    # The frontier. A taken child stays, with probability 0: looking past it is cheaper than a heap.
    room = num_rows * min(width, most)  # siblings share no row, so each depth has at most num_rows children
    child_first = np.empty(room, np.int64)
    child_last = np.empty(room, np.int64)
    child_parent = np.empty(room, np.int32)
    child_group = np.empty(room, np.uint8)
    child_probability = np.empty(room, np.float32)
    size = 0
    count = 0
    node = -1
    while count < most:
        if chain:
            size = 0
        first, last, depth, probability = 0, num_rows, 0, np.float32(1.0)
        if node >= 0:
            first, last, depth = firsts[node], lasts[node], depths[node]
            probability = tree.probabilities[node]
        if depth < min(max_depth, width):
            here = order[first:last].copy()
            keys = np.empty(len(here), np.int32)
            for i in range(len(here)):
                keys[i] = rows[here[i], depth]
            sorting = np.argsort(keys)
            for i in range(len(here)):
                order[first + i] = here[sorting[i]]
            e = 0
            for bound in evidence:
                e += len(here) > bound
            start = 0
            while start < len(here):
                token = keys[sorting[start]]
                end = start + 1
                while end < len(here) and keys[sorting[end]] == token:
                    end += 1
                if token != EMPTY:
                    share = np.float32(end - start) / np.float32(len(here))
                    s = 0
                    for bound in shares:
                        s += share > bound
                    group = (level * (len(evidence) + 1) + e) * (len(shares) + 1) + s
                    child_first[size] = first + start
                    child_last[size] = first + end
                    child_parent[size] = node
                    child_group[size] = group
                    child_probability[size] = probability * estimates[group, min(depth, num_depths - 1)]
                    size += 1
                start = end
        best = -1
        most_probable = np.float32(0.0)
        weight, shallowest, smallest = 0, 0, 0
        for i in range(size):
            if child_probability[i] < most_probable or child_probability[i] == 0.0:
                continue
            its_weight = child_last[i] - child_first[i]
            its_depth = 0 if child_parent[i] < 0 else depths[child_parent[i]]
            its_token = rows[order[child_first[i]], its_depth]
            if (
                child_probability[i] > most_probable
                or its_weight > weight
                or (its_weight == weight and its_depth < shallowest)
                or (its_weight == weight and its_depth == shallowest and its_token < smallest)
            ):
                best = i
                most_probable = child_probability[i]
                weight, shallowest, smallest = its_weight, its_depth, its_token
        if best < 0:
            break
        node = count
        count += 1
        firsts[node], lasts[node] = child_first[best], child_last[best]
        depths[node] = shallowest + 1
        tree.tokens[node] = smallest
        tree.parents[node] = child_parent[best]
        tree.probabilities[node] = most_probable
        tree.groups[node] = child_group[best]
        child_probability[best] = 0.0
    return count


def merge_sorted(tokens: Any, separator: int, left: Any, right: Any, out: Any) -> tuple[int, int]:
    i, j = 0, 0
    while i < len(left) and j < len(right):
        a, b = left[i], right[j]
        right_is_smaller = False
        for back in range(min(SORTED_TOKENS, a + 1, b + 1)):
            x, y = tokens[a - back], tokens[b - back]
            if x != y:
                right_is_smaller = y < x
                break
            if x == separator:
                break
        if right_is_smaller:
            out[i + j] = b
            j += 1
        else:
            out[i + j] = a
            i += 1
    return i, j
