# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.kernels import suffix_array_ref as ref
from vllm_ext.kernels.suffix_array import (
    EMPTY,
    SORTED_TOKENS,
    Int32,
    continuations,
    find,
    grow_tree,
    merge_sorted,
)

VOCAB = 3  # and the separator: matches are long and many
documents = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), min_size=1, max_size=5)
contexts = st.lists(st.integers(-1, VOCAB + 1), min_size=1, max_size=8)
SHARES = np.array([0.3, 0.6], np.float32)
EVIDENCE = np.array([1, 3], np.int32)
NUM_GROUPS = 2 * 3 * 3  # levels, evidence, shares


def text_of(texts: list[list[int]], separator: int = VOCAB) -> list[int]:
    return [separator, *(token for text in texts for token in (*text, separator))]


def sorted_positions(tokens: list[int], separator: int = VOCAB) -> Int32:
    order = sorted(range(len(tokens)), key=lambda at: ref.sort_key_ref(tokens, separator, at))
    return np.array(order, np.int32)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@given(documents, contexts)
@settings(deadline=None)
def test_the_longest_end_is_found_as_by_looking_everywhere(
    dtype: Any, texts: list[list[int]], context: list[int]
) -> None:
    tokens = text_of(texts)
    suffixes = sorted_positions(tokens)
    length, first, last = find(np.array(tokens, dtype), suffixes, VOCAB, np.array(context, np.int32))
    assert (length, set(suffixes[first:last].tolist())) == ref.find_ref(tokens, VOCAB, context)
    assert last - first == len(set(suffixes[first:last].tolist()))


def test_arrays_mapped_read_only_are_searched() -> None:
    tokens = np.frombuffer(np.array(text_of([[0, 1, 2, 0, 1]]), np.uint16).tobytes(), np.uint16)
    suffixes = np.frombuffer(sorted_positions(tokens.tolist()).tobytes(), np.int32)
    assert not tokens.flags.writeable
    length, first, last = find(tokens, suffixes, VOCAB, np.array([0, 1], np.int32))
    assert (length, sorted(suffixes[first:last].tolist())) == (2, [2, 5])


def test_positions_out_of_range_do_not_crash() -> None:
    """Of a file that was damaged after it had been verified."""
    tokens = np.array(text_of([[0, 1, 2]]), np.uint16)
    for bad in (99, 5, 2**31 - 1):
        suffixes = np.full(5, bad, np.int32)
        assert find(tokens, suffixes, VOCAB, np.array([0, 1], np.int32)) == (0, 0, 0)


@given(documents, contexts, st.integers(1, 6), st.integers(1, 12))
@settings(deadline=None)
def test_continuations_end_with_their_document(
    texts: list[list[int]], context: list[int], width: int, most: int
) -> None:
    tokens = text_of(texts)
    suffixes = sorted_positions(tokens)
    array = np.array(tokens, np.int32)
    length, first, last = find(array, suffixes, VOCAB, np.array(context, np.int32))
    total = last - first
    if length == 0:
        return
    rows = np.empty((min(total, most), width), np.int32)
    assert continuations(array, suffixes, VOCAB, first, last, 0, total, rows, 0) == len(rows)
    numbers = [(2 * row + 1) * total // (2 * len(rows)) for row in range(len(rows))]
    assert len(set(numbers)) == len(numbers)
    for row, number in zip(rows.tolist(), numbers, strict=True):
        expected = ref.continuation_ref(tokens, VOCAB, int(suffixes[first + number]), width)
        assert row == expected + [EMPTY] * (width - len(expected))


@given(st.data(), st.integers(1, 30), st.integers(1, 8), st.integers(1, 4))
@settings(deadline=None)
def test_occurrences_of_several_texts_are_numbered_through(
    data: st.DataObject, total: int, num_rows: int, num_texts: int
) -> None:
    """As if all stood in one: texts of one token each after its context, whose ids tell the occurrence."""
    separator = 100
    cuts = sorted(data.draw(st.integers(0, total)) for _ in range(num_texts - 1))
    bounds = [0, *cuts, total]
    rows = np.empty((min(num_rows, total), 1), np.int32)
    written = 0
    for start, end in pairwise(bounds):
        tokens = text_of([[0, number] for number in range(start, end)], separator)
        places = np.array([at for at, token in enumerate(tokens) if at % 3 == 1], np.int32)
        assert len(places) == end - start
        written = continuations(
            np.array(tokens, np.int32), places, separator, 0, len(places), start, total, rows, written
        )
    assert written == len(rows)
    assert rows[:, 0].tolist() == [(2 * r + 1) * total // (2 * len(rows)) for r in range(len(rows))]


@given(
    st.integers(0, 10**6),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(0, 12),
    st.integers(0, 5),
    st.booleans(),
)
@settings(deadline=None, max_examples=200)
def test_trees_equal_the_reference(
    seed: int, num_rows: int, width: int, budget: int, max_depth: int, chain: bool
) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, VOCAB, (num_rows, width)).astype(np.int32)
    for row in rows:
        row[rng.integers(0, width + 1) :] = EMPTY
    # Few values, so that ties are common; 0 ends a path.
    estimates = rng.choice([0.0, 0.25, 0.5, 1.0], (NUM_GROUPS, 2)).astype(np.float32)
    level = int(rng.integers(0, 2))
    tree = grow_tree(rows, level, estimates, SHARES, EVIDENCE, budget, max_depth, chain)
    expected = ref.grow_tree_ref(
        rows.tolist(), level, estimates, SHARES, EVIDENCE.tolist(), budget, max_depth, chain
    )
    columns = (tree.tokens, tree.parents, tree.probabilities, tree.groups)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected


def test_a_tree_by_hand() -> None:
    """Four continuations: 1 2, 1 2, 1 0 and one that ends at once."""
    rows = np.array([[1, 2], [1, 0], [EMPTY, EMPTY], [1, 2]], np.int32)
    estimates = np.full((NUM_GROUPS, 1), 0.5, np.float32)
    tree = grow_tree(rows, 1, estimates, SHARES, EVIDENCE, 9, 9, False)
    assert tree.tokens.tolist() == [1, 2, 0]  # of equally probable ones the heavier first
    assert tree.parents.tolist() == [-1, 0, 0]
    assert tree.probabilities.tolist() == [0.5, 0.25, 0.25]
    # Shares 3/4, 2/3 and 1/3 have the classes 2, 2 and 1; weights 4 and 3 of the parents the classes 2 and 1.
    assert tree.groups.tolist() == [(3 + 2) * 3 + 2, (3 + 1) * 3 + 2, (3 + 1) * 3 + 1]


@given(documents, documents, st.integers(1, 5))
@settings(deadline=None)
def test_merged_runs_are_sorted(left_texts: list[list[int]], right_texts: list[list[int]], step: int) -> None:
    """In pieces of any length, as files are read."""
    left, right = text_of(left_texts), text_of(right_texts)
    tokens = left + right
    runs = [sorted_positions(left), sorted_positions(right) + np.int32(len(left))]
    merged: list[int] = []
    a, b = runs[0][:step], runs[1][:step]
    read = [len(a), len(b)]
    while len(a) and len(b):
        out = np.full(len(a) + len(b), -7, np.int32)
        taken_a, taken_b = merge_sorted(np.array(tokens, np.uint16), VOCAB, a, b, out)
        assert taken_a == len(a) or taken_b == len(b)
        assert (out[taken_a + taken_b :] == -7).all()
        merged += out[: taken_a + taken_b].tolist()
        a, b = a[taken_a:], b[taken_b:]
        if not len(a):
            a = runs[0][read[0] : read[0] + step]
            read[0] += len(a)
        if not len(b):
            b = runs[1][read[1] : read[1] + step]
            read[1] += len(b)
    merged += [*a.tolist(), *runs[0][read[0] :].tolist(), *b.tolist(), *runs[1][read[1] :].tolist()]
    assert sorted(merged) == list(range(len(tokens)))
    keys = [ref.sort_key_ref(tokens, VOCAB, at) for at in merged]
    assert keys == sorted(keys)


def test_merging_looks_no_further_than_searching() -> None:
    """Long repeats would else take the square of their length."""
    same = [0] * (3 * SORTED_TOKENS)
    tokens = np.array(text_of([[1, *same], [2, *same]]), np.int32)
    second = len(same) + 2
    # Beyond SORTED_TOKENS the two differ; as far as is looked they are equal, and the left run comes first.
    for left, right in ((second, 2 * second), (2 * second, second)):
        out = np.empty(2, np.int32)
        at = np.array([left - 1], np.int32), np.array([right - 1], np.int32)
        assert merge_sorted(tokens, VOCAB, *at, out) == (1, 0)
    # One token closer, they differ within reach.
    near = np.array([1 + SORTED_TOKENS - 1], np.int32), np.array([second + 1 + SORTED_TOKENS - 1], np.int32)
    out = np.empty(2, np.int32)
    assert merge_sorted(tokens, VOCAB, near[1], near[0], out) == (0, 1)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_every_context_of_a_text_finds_itself(dtype: Any) -> None:
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, VOCAB, size).tolist() for size in (1, 31, 33, 64, 65, 200)]
    tokens = text_of(texts)
    suffixes = sorted_positions(tokens)
    array = np.array(tokens, dtype)
    for end, length in product(range(1, len(tokens), 7), (1, 5, 16, SORTED_TOKENS)):
        context = tokens[max(end + 1 - length, 0) : end + 1]
        found, first, last = find(array, suffixes, VOCAB, np.array(context, np.int32))
        usable = context[::-1].index(VOCAB) if VOCAB in context else len(context)
        assert found == usable
        assert usable == 0 or end in suffixes[first:last]
