# SPDX-License-Identifier: Apache-2.0
"""Typical acceptance by the runner's arrays, without an engine."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm_ext.engine.lossy.typical import TypicalStep
from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.samplers.typical_acceptance import Typical

VOCAB = 8
PAPER = Typical(0.09, 0.3)
# Two requests: a root alone, and the tree
#     0
#    / \
#   1   2      2 is likelier, and nothing passes below it
#   |   |
#   3   4
TOKENS, PARENTS = [7, 7, 1, 2, 3, 4], [-1, -1, 0, 0, 1, 2]


def step(tokens: list[int], p: dict[int, dict[int, float]], temperature: float = 1.0) -> TypicalStep:
    """Of the two requests, both typical; ``p``: by row of the second, probabilities of some tokens."""
    logits = torch.full((len(tokens), VOCAB), -math.inf)
    for row, chances in p.items():
        for token, chance in chances.items():
            logits[1 + row, token] = temperature * math.log(chance)
    logits[0] = 0.0
    trees = StepTrees(
        row_start=np.array([0, 1, len(tokens)], dtype=np.int32),
        tokens=np.array(tokens, dtype=np.int32),
        parents=np.array(PARENTS[: len(tokens)], dtype=np.int32),
        query_row=np.array([0, 1], dtype=np.int32),
        context=np.array([5, 5], dtype=np.int32),
        branching=[1],
        decoding=[0, 1],
    )
    temperatures = torch.full((2,), temperature)
    return TypicalStep({0: PAPER, 1: PAPER}, trees, trees.tokens, logits, temperatures)


def row(chances: dict[int, float]) -> torch.Tensor:
    """Logits that the sampler would draw from."""
    logits = torch.full((1, VOCAB), -math.inf)
    for token, chance in chances.items():
        logits[0, token] = math.log(chance)
    return logits


ROOT = {1: 0.3, 2: 0.6, 5: 0.1}
TREE = {0: ROOT, 1: {3: 0.5, 5: 0.5}, 2: {4: 0.01, 5: 0.99}}


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_branch_that_goes_on_furthest(temperature: float) -> None:
    made = step(TOKENS, TREE, temperature)
    # A visited row of the request without drafts is the target's to draw.
    visited = [(0, 0), (1, 0)]
    assert made.choose(visited, torch.cat([row({0: 1.0}), row(ROOT)])) == {1: 1}
    assert made.choose([(1, 1)], row(TREE[1])) == {0: 3}
    assert made.choose([(1, 3)], row({0: 1.0})) == {}  # a leaf
    assert made.choose([(1, 2)], row(TREE[2])) == {}  # 0.01 is too little
    assert made.num_kept == 2


def test_what_the_sampler_may_not_draw_is_not_kept() -> None:
    """Whatever the logits before masks and penalties have said."""
    made = step(TOKENS, TREE)
    assert made.choose([(1, 0)], row({2: 0.6, 5: 0.4})) == {0: 2}
    assert made.choose([(1, 0)], row({5: 1.0})) == {}


@pytest.mark.parametrize("filler", [-1, VOCAB, VOCAB + 3])
def test_fillers_and_prompt_tokens_are_no_drafts(filler: int) -> None:
    made = step([7, 7, filler, 2, 3, 4], TREE)
    assert made.choose([(1, 0)], row(ROOT)) == {0: 2}
    assert step([7, 7, filler], {0: ROOT}).choose([(1, 0)], row(ROOT)) == {}
