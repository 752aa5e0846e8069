# SPDX-License-Identifier: Apache-2.0
"""The budget of a few sizes, on made-up machines: it ends where most tokens a second are, at little loss on the way."""

from __future__ import annotations

import itertools

import pytest

from vllm_ext.proposers.level_budget import LevelBudget, by_batch_size, levels_of

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
    state = budget.state(4)
    assert state["nodes_per_request"] == 16.0
    assert state["step_seconds"] == pytest.approx(FREE[16])
    assert state["target_efficiency"] == pytest.approx(FREE[0] / FREE[16])
    assert state["gain"] == pytest.approx(TOKENS[16] / TOKENS[0] * FREE[0] / FREE[16])
