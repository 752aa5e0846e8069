# SPDX-License-Identifier: Apache-2.0
"""How a chain is laid out to be read twice."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_ext.proposers.reflection import ReflectionRule, most_drafts, read_again
from vllm_ext.proposers.tree import DraftTree

RULE = ReflectionRule(0.3, (8, 9))
CHAIN = DraftTree.chain(np.array([5, 6, 7], np.int32), np.array([0.9, 0.5, 0.2], np.float32))


def test_chain_prompt_and_chain() -> None:
    tree = read_again(CHAIN, RULE)
    tree.validate()
    assert tree.is_chain
    assert tree.tokens.tolist() == [5, 6, 7, 8, 9, 5, 6, 7]
    assert tree.again == (3, 0.3)
    assert tree.prefix(4).again == (3, 0.3)
    assert tree.probabilities[3:].sum() == 0.0


def test_without_a_rule_or_drafts_nothing_is_laid_out() -> None:
    assert read_again(CHAIN, None) is CHAIN
    assert not len(read_again(DraftTree.empty(), RULE))


@pytest.mark.parametrize(("nodes", "drafts"), [(0, 0), (3, 0), (4, 1), (5, 1), (8, 3), (9, 3)])
def test_both_copies_have_room(nodes: int, drafts: int) -> None:
    assert most_drafts(nodes, RULE) == drafts
