# SPDX-License-Identifier: Apache-2.0
"""Tries beside dictionaries, on every prefix of random sets and on what is not a prefix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.kernels import trie, trie_ref
from vllm_ext.kernels.trie import DEAD, NO_TOKEN, ROOT, Trie

VOCAB, END = 70, 69
SEQUENCES = st.lists(st.lists(st.sampled_from([0, 1, 2, 31, 32, 68]), min_size=1, max_size=5), min_size=1)


def matrix(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    longest = max(map(len, sequences))
    rows = [[*sequence, *[NO_TOKEN] * (longest - len(sequence))] for sequence in sequences]
    return np.array(rows, dtype=np.int32)


def state_of(made: Trie, prefix: Sequence[int]) -> int:
    state = np.array([ROOT], dtype=np.int32)
    for token in prefix:
        state = trie.advance(made, state, np.array([token], dtype=np.int32))
    return int(state[0])


def bits(masks: np.ndarray) -> list[set[int]]:
    unpacked = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in unpacked]


@given(SEQUENCES)
@settings(deadline=None)  # the first call compiles
def test_masks_are_those_of_a_dictionary(sequences: list[list[int]]) -> None:
    made, reference = trie.build(matrix(sequences)), trie_ref.build(sequences)
    prefixes = sorted({tuple(sequence[:n]) for sequence in sequences for n in range(len(sequence) + 1)})
    assert made.num_states == len(prefixes)
    others = [(*prefix, 50) for prefix in prefixes[:3]] + [(50, 1)]
    states = np.array([state_of(made, prefix) for prefix in [*prefixes, *others]], dtype=np.int32)
    assert sorted(states[: len(prefixes)].tolist()) == list(range(len(prefixes)))
    assert (states[len(prefixes) :] == DEAD).all()
    for prefix, state in zip([*prefixes, *others], states.tolist(), strict=True):
        assert trie.follow(made, np.array(prefix, dtype=np.int32)) == state
    masks = np.full((len(states), -(-VOCAB // 32)), -1, dtype=np.int32)
    trie.fill_masks(made, states, END, masks)
    assert bits(masks) == [trie_ref.allowed(reference, prefix, END) for prefix in [*prefixes, *others]]


@given(SEQUENCES)
@settings(deadline=None)
def test_order_and_repetition_do_not_matter(sequences: list[list[int]]) -> None:
    one, two = trie.build(matrix(sequences)), trie.build(matrix([*sequences[::-1], *sequences]))
    for left, right in zip(one, two, strict=True):
        assert left.tolist() == right.tolist()


def test_many_rows_advance_at_once() -> None:
    rng = np.random.default_rng(0)
    sequences = rng.integers(0, 40, (2000, 4)).astype(np.int32)
    made = trie.build(sequences)
    states = np.zeros(300, dtype=np.int32)
    rows = sequences[rng.integers(0, 2000, 300)]
    for depth in range(4):
        states = trie.advance(made, states, rows[:, depth].copy())
        assert (states > 0).all()
    assert made.final[states].all()
    assert (trie.advance(made, states, np.zeros(300, np.int32)) == DEAD).all()
    assert made.num_bytes == 4 * (made.num_states + 1) + 4 * (made.num_states - 1) + made.num_states


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        (np.empty((0, 3), np.int32), r"sequences has shape \[0, 3\]; at least one"),
        (np.array([[1, 2], [-1, -1]], np.int32), r"sequences\[1\]=\[-1, -1\] is empty"),
        (
            np.array([[1, -1, 2]], np.int32),
            r"sequences\[0\]=\[1, -1, 2\] is empty, or goes on behind its end",
        ),
    ],
)
def test_what_is_no_sequence_is_named(sequences: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trie.build(sequences)
