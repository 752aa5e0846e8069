# SPDX-License-Identifier: Apache-2.0
"""Which sure tokens a request's parameters let be, by the runner's arrays, without an engine."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm_ext.engine.lossy.entropy import EntropyStep
from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.proposers.tree import DraftTree

VOCAB = 8
# A request without drafts, and one with the chain 1, 2, 3, of which the last is not sure; 9 is no token.
CHAIN = [1, 2, 3]


def step(temperature: float, sure: list[bool] | None = None, chain: list[int] = CHAIN) -> EntropyStep:
    tree = DraftTree.chain(np.array(chain, np.int32), np.ones(len(chain), np.float32))
    marked = DraftTree(
        tree.tokens, tree.parents, tree.probabilities, None, np.array(sure or [True, True, False])
    )
    trees = StepTrees.from_step(
        ["none", "sure"],
        [0, len(chain)],
        {"sure": chain},
        {"sure": marked},
        np.array([0, 1, 2 + len(chain)], np.int32),
        np.array([1, 1 + len(chain)], np.int32),
        np.array([5, 5], np.int32),
        np.array([7, 7, *chain], np.int32),
    )
    temperatures = np.array([1.0, temperature], np.float32)
    return EntropyStep(trees, trees.tokens, raw(len(chain)), temperatures)


def raw(length: int) -> torch.Tensor:
    return torch.randn(2 + length, VOCAB, generator=torch.Generator().manual_seed(0)) * 30


def logits_of(rows: list[int], temperature: float) -> torch.Tensor:
    """As the sampler has them."""
    return raw(3)[rows] / (temperature or 1.0)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.7])
def test_sure_tokens_are_taken_and_no_others(temperature: float) -> None:
    made, greedy = step(temperature), temperature == 0.0
    visited = [(0, 0), (1, 0)]
    assert made.choose(visited, logits_of([0, 1], temperature), greedy=greedy) == {1: 1}
    assert made.choose(visited, logits_of([0, 1], temperature), greedy=not greedy) == {}
    assert made.choose([(1, 1)], logits_of([2], temperature), greedy=greedy) == {0: 2}
    assert made.choose([(1, 2)], logits_of([3], temperature), greedy=greedy) == {}  # not sure
    assert (
        made.choose([(1, 3)], logits_of([4], temperature), greedy=greedy) == {}
    )  # the last has nothing below
    assert made.num_kept == 2


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize(("change", "taken"), [(-math.inf, False), (-0.1, False), (0.0, True), (2.0, True)])
def test_what_was_lowered_is_the_targets(temperature: float, change: float, taken: bool) -> None:
    made = step(temperature)
    changed = raw(3)[[1]]
    changed[0, 1] += change
    changed[0, 2:] -= 1.0  # of others nobody asks
    found = made.choose([(1, 0)], changed / (temperature or 1.0), greedy=temperature == 0.0)
    assert found == ({0: 1} if taken else {})
    assert made.num_kept == taken


def test_what_was_masked_before_is_not_taken() -> None:
    made = step(0.0)
    made._logits[1, 1] = -math.inf
    assert made.choose([(1, 0)], made._logits[[1]], greedy=True) == {}


def test_what_is_no_token_is_not_taken() -> None:
    made = step(0.0, [True], [9])
    assert made.choose([(1, 0)], raw(1)[[1]], greedy=True) == {}


def test_a_step_without_sure_tokens_has_none() -> None:
    assert step(0.0, [False, False, False])._trees.sure == {}
