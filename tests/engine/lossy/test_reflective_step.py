# SPDX-License-Identifier: Apache-2.0
"""Rows of a chain that is read twice: which are drafts, and whose logits are mixed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm_ext.engine.lossy import reflective
from vllm_ext.engine.tree_layout import NO_TOKEN, StepTrees
from vllm_ext.proposers.reflection import ReflectionRule, read_again
from vllm_ext.proposers.tree import DraftTree
from vllm_ext.samplers.reflective import mixed
from vllm_ext.samplers.tree_walk import greedy_walk

CHAIN, RULE = [5, 6], ReflectionRule(0.5, (1, 2, 3))  # rows: a root, two drafts, the prompt, two again


def step(scheduled: int) -> StepTrees:
    tree = read_again(DraftTree.chain(np.array(CHAIN, np.int32), np.ones(2, np.float32)), RULE)
    drafts = tree.tokens[:scheduled].tolist()
    return StepTrees.from_step(
        ["other", "twice"],
        [0, scheduled],
        {"twice": drafts},
        {"twice": tree},
        np.array([0, 1, 2 + scheduled], np.int32),
        np.array([1, 1 + scheduled], np.int32),
        np.array([5, 5], np.int32),
        np.array([7, 7, *drafts], np.int32),
    )


@pytest.mark.parametrize("scheduled", [1, 2, 4, 6, 7])
def test_scratch_rows_have_no_tokens(scheduled: int) -> None:
    trees = step(scheduled)
    drafts = CHAIN[:scheduled]
    assert trees.tokens.tolist() == [7, 7, *drafts, *[NO_TOKEN] * (scheduled - len(drafts))]
    assert (1 in trees.again) == (scheduled == 7)
    assert not trees.branching


def test_no_scratch_row_is_ever_accepted() -> None:
    """The target says at each row what the next one reads; a mutation, which has these tokens, goes to the end."""
    trees = step(7)
    choice = np.array([0, 5, 6, 1, 2, 3, 5, 6, 0], np.int32)
    accepted, emitted = greedy_walk(trees.row_start, trees.tokens, trees.parents, choice)
    assert accepted == [[], [1, 2]]
    assert emitted == [[0], [5, 6, 1]]
    mutated = trees.tokens.copy()
    mutated[4:] = [1, 2, 3, 5, 6]
    assert len(greedy_walk(trees.row_start, mutated, trees.parents, choice)[0][1]) == 7


def test_logits_of_both_copies_are_mixed_and_no_others() -> None:
    trees, logits = step(7), torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    reflective.mix(trees, logits)
    # Row 1 is the root, and row 6 the last of the prompt: both are followed by the first draft.
    assert torch.equal(logits[1], mixed(before[[1]], before[[6]], 0.5)[0])
    assert torch.equal(logits[2], mixed(before[[2]], before[[7]], 0.5)[0])
    others = [0, 3, 4, 5, 6, 7, 8]
    assert torch.equal(logits[others], before[others])
