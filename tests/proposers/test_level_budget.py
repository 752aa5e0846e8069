# SPDX-License-Identifier: Apache-2.0
"""The budget of a few sizes, on made-up machines: it ends where most tokens a second are, at little loss on the way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.proposers.level_budget import LevelBudget, by_batch_size, levels_of, shared_out
from vllm_ext.proposers.tree import DraftTree

LEVELS = [0, 4, 8, 16]


def run(step_seconds: dict[int, float], tokens: dict[int, float], steps: int, batch: int = 4) -> list[int]:
    """The levels chosen on a machine whose steps take that long and put out that much."""
    budget, chosen = LevelBudget(LEVELS), []
    for _ in range(steps):
        level = budget.choose(batch)
        chosen.append(level)
        budget.observe(level, batch, round(tokens[level] * batch), step_seconds[level])
    return chosen


def goodput(chosen: list[int], step_seconds: dict[int, float], tokens: dict[int, float]) -> float:
    return sum(tokens[level] for level in chosen) / sum(step_seconds[level] for level in chosen)


TOKENS = {0: 1.0, 4: 1.75, 8: 2.0, 16: 2.25}
FREE = {0: 1.0, 4: 1.02, 8: 1.05, 16: 1.1}
STEEP = {0: 1.0, 4: 1.2, 8: 1.9, 16: 3.5}
HOPELESS = {0: 1.0, 4: 3.0, 8: 5.0, 16: 9.0}


@pytest.mark.parametrize(
    ("seconds", "best"), [(FREE, 16), (STEEP, 4), (HOPELESS, 0)], ids=["free", "steep", "hopeless"]
)
def test_it_settles_where_most_tokens_a_second_are(seconds: dict[int, float], best: int) -> None:
    chosen = run(seconds, TOKENS, 2000)
    assert max(set(chosen[100:]), key=chosen[100:].count) == best
    assert chosen[100:].count(best) > 0.98 * len(chosen[100:])
    ideal = TOKENS[best] / seconds[best]
    assert goodput(chosen, seconds, TOKENS) > 0.97 * ideal
    # Never a loss, the beginning included.
    assert goodput(chosen, seconds, TOKENS) > 0.97


def test_sizes_beyond_a_hopeless_one_are_not_tried() -> None:
    assert set(run(HOPELESS, TOKENS, 2000)) == {0, 4}


def test_it_finds_out_when_the_text_has_changed() -> None:
    budget = LevelBudget(LEVELS)
    last = []
    for step in range(4000):
        level = budget.choose(4)
        last.append(level)
        tokens = 1.0 if step < 1000 else TOKENS[level]
        budget.observe(level, 4, round(tokens * 4), STEEP[level])
    assert last[900:1000].count(0) > 90
    assert last[-100:].count(4) > 90


def test_batch_sizes_are_told_apart() -> None:
    budget = LevelBudget(LEVELS)
    last: dict[int, list[int]] = {4: [], 64: []}
    for step in range(2000):
        batch = 4 if step // 20 % 2 else 64
        level = budget.choose(batch)
        last[batch].append(level)
        seconds = FREE if batch == 4 else HOPELESS
        budget.observe(level, batch, round(TOKENS[level] * batch), seconds[level])
    assert last[4][-200:].count(16) > 150
    assert last[64][-200:].count(0) > 150


def test_steps_of_other_kinds_are_no_evidence() -> None:
    budget = LevelBudget(LEVELS)
    budget.observe(3, 4, 4, 1.0)
    budget.observe(0, 4, 4, 9.0)  # the first of its kind
    budget.interrupt()
    budget.observe(0, 4, 4, 9.0)
    assert budget.rate(3, 0) is None
    budget.observe(0, 4, 4, 0.5)
    assert budget.rate(3, 0) == 2.0


@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 16, 128])
@pytest.mark.parametrize("most", [1, 2, 3, 4, 9, 256, 1 << 20])
def test_the_schedule_is_one_that_vllm_takes(nodes: int, most: int) -> None:
    levels, schedule = levels_of(nodes), by_batch_size(nodes, most)
    assert levels[0] == 0
    assert levels[-1] == nodes
    assert schedule[0][0] == 1
    assert schedule[-1][1] == most
    assert all(start <= end for start, end, _ in schedule)
    assert all(b[0] == a[1] + 1 for a, b in itertools.pairwise(schedule))
    sizes = [level for *_, level in schedule]
    assert sizes == sorted(sizes, reverse=True)
    if most >= len(levels):
        assert sizes == levels[::-1]


@pytest.mark.parametrize(
    ("nodes", "levels"), [(15, [0, 3, 7, 15]), (7, [0, 3, 7]), (3, [0, 3]), (16, [0, 4, 8, 16])]
)
def test_sizes_of_trees(nodes: int, levels: list[int]) -> None:
    assert levels_of(nodes) == levels


def test_steps_without_a_captured_graph_are_not_taken() -> None:
    budget = LevelBudget([0, 3, 7, 15], most_rows=512)
    seen: dict[int, set[int]] = {32: set(), 33: set(), 200: set()}
    for batch, levels in seen.items():
        for _ in range(600):
            level = budget.choose(batch)
            levels.add(level)
            budget.observe(level, batch, (1 + level) * batch, 1.0 + level / 100)
    assert seen == {32: {0, 3, 7, 15}, 33: {0, 3, 7}, 200: {0}}


def test_one_request_that_gets_few_tokens_at_first_is_no_verdict() -> None:
    """Trees whose first four steps were unlucky are tried for longer, where one request is all there is."""
    budget, chosen = LevelBudget([0, 15]), []
    for _ in range(400):
        level = budget.choose(1)
        chosen.append(level)
        tried = chosen.count(15)
        budget.observe(level, 1, 1 if not level or tried <= 5 or tried % 2 else 4, 1.1 if level else 1.0)
    assert chosen[-100:].count(15) > 95


def test_levels_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"levels=\[4, 8\] must be ascending and begin with 0"):
        LevelBudget([4, 8])


def test_its_figures_are_those_of_the_machine() -> None:
    budget = LevelBudget(LEVELS)
    assert budget.state(4) == {"nodes_per_request": 0.0, "correction": 1.0}
    for _ in range(2000):
        level = budget.choose(4)
        budget.observe(level, 4, round(TOKENS[level] * 4), FREE[level])
    while budget.choose(4) != 16:
        budget.interrupt()
    (free, *_, drafting) = measured = budget.measured()
    assert [each["level"] for each in measured] == LEVELS
    assert {each["requests_below"] for each in measured} == {8}
    assert (free["seconds"], drafting["seconds"]) == pytest.approx((FREE[0], FREE[16]))
    assert (free["tokens"], drafting["tokens"]) == pytest.approx((TOKENS[0], TOKENS[16]), rel=0.2)
    assert all(each["steps"] >= 1 for each in measured)
    state = budget.state(4)
    assert state["nodes_per_request"] == 16.0
    assert state["step_seconds"] == pytest.approx(FREE[16])
    assert state["target_efficiency"] == pytest.approx(FREE[0] / FREE[16])
    assert state["gain"] == pytest.approx(TOKENS[16] / TOKENS[0] * FREE[0] / FREE[16])


def prefixes(trees: list[list[float]], nodes: int) -> list[tuple[int, ...]]:
    """All ways to verify so many nodes in all, each tree's first ones."""
    ways = itertools.product(*(range(1 + len(tree)) for tree in trees))
    return [way for way in ways if sum(way) == min(nodes, sum(map(len, trees)))]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_rows_go_where_most_is_expected(data: st.DataObject) -> None:
    """Beside all other ways: none has a larger sum of chances, and what is chosen is each tree's first nodes."""
    chance = st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.75, 1.0])
    trees = data.draw(st.lists(st.lists(chance, max_size=4), max_size=4))
    for tree in trees:
        tree.sort(reverse=True)
    nodes = data.draw(st.integers(0, 17))
    counts = shared_out([np.array(tree, np.float32) for tree in trees], nodes)
    assert all(0 <= count <= len(tree) for count, tree in zip(counts, trees, strict=True))
    assert sum(counts) == min(nodes, sum(map(len, trees)))

    def expected(way: Sequence[int]) -> float:
        return sum(sum(tree[:count]) for tree, count in zip(trees, way, strict=True))

    assert expected(counts) == max(map(expected, prefixes(trees, nodes)))


def test_parents_come_before_their_children() -> None:
    """Of real trees: cut to its count each is a tree, also where chances are equal."""
    rng = np.random.default_rng(3)
    trees = []
    for size in (15, 15, 3, 0, 9):
        parents = np.array([rng.integers(-1, node) if node else -1 for node in range(size)], np.int32)
        trees.append(
            DraftTree.from_nodes(
                np.arange(size, dtype=np.int32),
                parents,
                rng.choice([0.5, 0.25, 0.125], size).astype(np.float32),
            )
        )
    for nodes in range(45):
        counts = shared_out([tree.probabilities for tree in trees], nodes)
        assert sum(counts) == min(nodes, 42)
        for tree, count in zip(trees, counts, strict=True):
            assert (tree.parents[:count] < np.arange(count)).all()
            assert (tree.prefix(count).parents == tree.parents[:count]).all()


def test_equal_chances_are_shared_alike() -> None:
    """Node after node: ranks of tensor parallelism must choose alike, and no request is the last one by its place."""
    half, nothing = np.full(4, 0.5, np.float32), np.full(4, np.nan, np.float32)
    assert shared_out([half, half, half], 5) == [2, 2, 1]
    assert shared_out([nothing, half], 3) == [0, 3]
    assert shared_out([nothing, half], 6) == [2, 4]
    assert shared_out([], 3) == []
