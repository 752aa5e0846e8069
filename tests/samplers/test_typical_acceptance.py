# SPDX-License-Identifier: Apache-2.0
"""Typical acceptance against hand cases and against all paths of small trees."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.samplers.typical_acceptance import Typical, best_below, choose

PAPER = Typical(0.09, 0.3)


@pytest.mark.parametrize(
    ("p", "limit"),
    [
        ([1.0], 0.09),  # H = 0: 0.3 is more than the threshold
        ([0.5, 0.5], 0.09),  # exp(-H) = 1 / 2
        ([0.25] * 4, 0.075),  # 0.3 / 4
        ([0.1] * 10, 0.03),  # 0.3 / 10: each of them passes
        ([0.9, 0.1], 0.09),  # 0.3 * exp(-0.325) = 0.217
        ([0.7, 0.1, 0.1, 0.1], 0.09),  # 0.3 * exp(-0.940) = 0.117
    ],
    ids=str,
)
def test_limits_by_hand(p: list[float], limit: float) -> None:
    entropy = -sum(x * math.log(x) for x in p)
    assert PAPER.limit(np.array(entropy)) == pytest.approx(limit, rel=1e-12)


def test_a_token_at_the_limit_does_not_pass() -> None:
    assert choose(np.array([0.09]), 0.09, [0], [0.0]) is None
    assert choose(np.array([0.0900001]), 0.09, [0], [0.0]) == 0


def test_the_longest_path_wins_and_then_the_likeliest() -> None:
    #        0
    #      / | \
    #     1  2  3      3 is likeliest, but nothing passes below it
    #     |  |  |
    #     4  5  6
    parents = np.array([-1, 0, 0, 0, 1, 2, 3], dtype=np.int32)
    chance = np.array([0.0, 0.2, 0.3, 0.5, 0.5, 0.4, 0.01])
    length, log_p = best_below(parents, chance, np.full(7, 0.09))
    assert length.tolist() == [2, 1, 1, 0, 0, 0, 0]
    assert log_p[0] == pytest.approx(math.log(0.3 * 0.4))  # more than 0.2 * 0.5
    children = [1, 2, 3]
    assert choose(chance[children], 0.09, length[children].tolist(), log_p[children].tolist()) == 1
    # Where 2 is forbidden the other path of two is taken, and where both are, the likeliest child.
    chance[2] = 0.0
    assert choose(chance[children], 0.09, length[children].tolist(), log_p[children].tolist()) == 0
    chance[1] = 0.0
    assert choose(chance[children], 0.09, length[children].tolist(), log_p[children].tolist()) == 2


@pytest.mark.parametrize("entropy", [0.0, 1.0, math.log(49152)])
def test_what_is_forbidden_never_passes_and_nothing_passes_a_limit_of_one(entropy: float) -> None:
    least, most = Typical(1e-9, 1e-9), Typical(1.0, 1e6)
    assert choose(np.array([0.0]), float(least.limit(np.array(entropy))), [0], [0.0]) is None
    assert choose(np.array([1.0]), float(most.limit(np.array(entropy))), [0], [0.0]) is None


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 12))
def test_the_best_path_is_that_of_all_paths(seed: int, num_rows: int) -> None:
    """Every path from the root, as the paper's code compares them."""
    rng = np.random.default_rng(seed)
    parents = np.array([-1, *(rng.integers(row) for row in range(1, num_rows))], dtype=np.int32)
    chance, limit = rng.random(num_rows), rng.random(num_rows) * 0.6
    best = (0, 0.0)
    for row in range(1, num_rows):
        path = [row]
        while parents[path[-1]] > 0:
            path.append(int(parents[path[-1]]))
        if all(chance[node] > limit[parents[node]] for node in path):
            best = max(best, (len(path), float(np.log(chance[path]).sum())))
    length, log_p = best_below(parents, chance, limit)
    assert length[0] == best[0]
    assert log_p[0] == pytest.approx(best[1])
    # The walk down by `choose` is that path.
    row, total, steps = 0, 0.0, 0
    while True:
        children = np.flatnonzero(parents == row)
        found = choose(chance[children], limit[row], length[children].tolist(), log_p[children].tolist())
        if found is None:
            break
        row = int(children[found])
        total, steps = total + math.log(chance[row]), steps + 1
    assert steps == best[0]
    assert total == pytest.approx(best[1])
