# SPDX-License-Identifier: Apache-2.0
"""Adaptive weighted rejection sampling: exact by enumeration of every draw, for all constraints on five tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from enumeration import Script, outcomes

from vllm_ext.kernels.chance import RandomChance
from vllm_ext.samplers import awrs

EXACT = 1e-13
TARGETS = {
    "flat": np.array([0.3, 0.25, 0.2, 0.15, 0.1]),
    "peaked": np.array([0.9, 0.05, 0.03, 0.02, 0.0]),
    "truncated": np.array([0.4, 0.0, 0.2, 0.1, 0.0]),
}
CONSTRAINTS = [set(c) for n in range(6) for c in itertools.combinations(range(5), n)]


@pytest.mark.parametrize("patience", [None, 0, 1, 2, 16])
@pytest.mark.parametrize("name", TARGETS)
def test_law_and_weights_are_exact(name: str, patience: int | None) -> None:
    p = TARGETS[name]
    for constraint in CONSTRAINTS:
        law, weighted, nothing = np.zeros(5), np.zeros(5), 0.0
        ids = np.array(sorted(constraint), dtype=np.int32)
        mask = (None, 0) if patience is None else (lambda ids=ids: ids, patience)
        for found, weight in outcomes(lambda script: awrs.draw(p, constraint.__contains__, script, *mask)):  # noqa: B023
            if found.token is None:
                nothing += weight
                assert found.weight == 0.0
            else:
                law[found.token] += weight
                weighted[found.token] += weight * found.weight
        inside = np.where(np.isin(np.arange(5), list(constraint)), p, 0.0)
        np.testing.assert_allclose(weighted, inside, atol=EXACT)
        if inside.any():
            np.testing.assert_allclose(law, inside / inside.sum(), atol=EXACT)
            assert nothing == 0.0
        else:
            assert nothing == pytest.approx(1.0, abs=EXACT)


def test_a_weight_that_asks_no_more_is_biased() -> None:
    """The mutation: what was not rejected is taken for what is allowed."""
    p, constraint = TARGETS["flat"], {1, 3}
    total = 0.0
    for _, weight in outcomes(lambda script: awrs.draw(p, constraint.__contains__, script)):
        total += weight
    assert total == pytest.approx(1.0, abs=EXACT)

    def careless(script: Script) -> float:
        left, mass = p.copy(), 1.0
        while True:
            token = script.draw(left)
            left[token] = 0.0
            if token in constraint:
                return mass
            mass = float(left.sum())

    mean = sum(value * weight for value, weight in outcomes(careless))
    assert mean > p[[1, 3]].sum() + 0.05


def test_nothing_is_asked_twice_nor_in_vain() -> None:
    p, asked = TARGETS["truncated"], []

    def allowed(token: int) -> bool:
        asked.append(token)
        return False

    found = awrs.draw(p, allowed, RandomChance(np.random.default_rng(0)))
    assert found == (None, 0.0, 3)
    assert sorted(asked) == [0, 2, 3]


def test_patience_ends() -> None:
    """A constraint that allows nearly nothing is asked about few tokens, and then for all it allows."""
    p = np.random.default_rng(1).dirichlet(np.ones(20_000))
    inside, asked = np.array([5, 12_345], dtype=np.int32), []

    def allowed(token: int) -> bool:
        asked.append(token)
        return token in inside

    found = awrs.draw(p, allowed, RandomChance(np.random.default_rng(0)), lambda: inside)
    assert found.token in inside
    assert found.weight == pytest.approx(p[inside].sum(), rel=1e-12)
    assert len(asked) == found.checks == awrs.PATIENCE


def test_few_tokens_of_a_large_vocabulary_are_asked_about() -> None:
    """A tenth of ``p`` is allowed: ten tokens and one more in expectation, of 20,000."""
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.ones(20_000))
    inside = np.flatnonzero(np.cumsum(p) < 0.1)
    chance, constraint = RandomChance(rng), set(inside.tolist())
    found = [awrs.draw(p, constraint.__contains__, chance) for _ in range(400)]
    assert {draw.token for draw in found} <= constraint
    assert np.mean([draw.checks for draw in found]) == pytest.approx(11.0, abs=2.0)
    assert np.mean([draw.weight for draw in found]) == pytest.approx(0.1, abs=0.06)
