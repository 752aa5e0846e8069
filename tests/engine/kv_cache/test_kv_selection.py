# SPDX-License-Identifier: Apache-2.0
"""What the worker tells choices of a step: which rows read what, and which of them stand."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import numpy as np

from vllm_ext.codecs.selection import ALL
from vllm_ext.codecs.snapkv import SnapKV, SnapKVOptions
from vllm_ext.engine.kv_cache.selection import Part, reading_of, settle

CODEC = SnapKV(SnapKVOptions(budget=32, window=16, watched=4), 16, 32)


def part(prompt: int, context: int, num: int, start: int, drafts: int = 0, index: int = 0) -> Part:
    return Part(CODEC.choice(prompt), f"{index}", index, start, num, num - drafts, context)


def test_a_prompts_last_rows_are_watched_and_others_are_not() -> None:
    parts = [part(100, 90, 10, 0), part(100, 0, 50, 10, index=1), part(40, 30, 10, 60, index=2)]
    reading = reading_of(parts, 9)
    asked = (reading.watched >= 0).nonzero().flatten().tolist()
    assert asked == [6, 7, 8, 9, 66, 67, 68, 69]
    assert reading.watched[asked].tolist() == list(range(8))
    assert reading.mass.shape == (8, 9)
    assert reading.list_of_row.tolist() == [ALL] * 70


def test_a_choice_is_of_the_rows_that_stand() -> None:
    parts = [part(100, 90, 10, 0)]
    reading = reading_of(parts, 9)
    mass = np.zeros((4, 9), np.float32)
    mass[:, 3], mass[:, 4] = 0.5, 0.4
    found = settle(parts, reading.watched.numpy(), mass, {})
    assert found == {"0": [(100, [1, 2, 3, 4])]}  # the first and the last: there is no room for more
    assert parts[0].choice.read_at(100) == [0, 5]
    after = [Part(parts[0].choice, "0", 0, 0, 3, 1, 110)]
    reading = reading_of(after, 9)
    assert reading.list_of_row.tolist() == [0, 0, 0]
    assert reading.lists[0, : reading.lengths[0]].tolist() == [0, 5]
    assert settle(after, reading.watched.numpy(), reading.mass.numpy(), {0: [2]}) == {}


def test_of_drafts_those_that_are_accepted_count_where_they_stand() -> None:
    """A path through a tree: its rows are the tokens that follow; the others were never there."""
    from vllm_ext.codecs.critic import Critic, CriticOptions

    codec = Critic(CriticOptions(budget=48, window=16, watched=4, decay=0.0), 16, 32)
    taken = []
    for rows in ([0, 2, 5], [0]):
        choice = codec.choice(60)
        for position in choice.watched(0, 60):
            choice.take(position, np.full(3, 0.1, np.float32))
        choice.settle(60)
        step = [Part(choice, "a", 1, 4, 6, 1, 60)]
        reading = reading_of(step, 9)
        assert (reading.watched >= 0).tolist() == [False] * 4 + [True] * 6  # any of them may be the next
        mass = np.arange(6, dtype=np.float32)[:, None] + np.zeros((1, 9), np.float32)
        settle(step, reading.watched.numpy(), mass, {1: rows[1:]})
        taken.append({position: float(of_row[0]) for position, of_row in choice._masses.items()})
    assert taken == [{60: 0.0, 61: 2.0, 62: 5.0}, {60: 0.0}]
