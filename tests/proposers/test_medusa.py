# SPDX-License-Identifier: Apache-2.0
"""Trees of heads: nodes of a depth have one distribution, and the tree is that of the largest products."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from toy_draft import VOCAB, request

from vllm_ext.proposers.draft_budget import DraftBudget
from vllm_ext.proposers.draft_model import Rows
from vllm_ext.proposers.hybrid import Hybrid, HybridOptions, draft_of
from vllm_ext.proposers.medusa import Medusa, MedusaOptions
from vllm_ext.proposers.sampled import ROOT

HEADS = 3
SUPPORT = 5


class Heads:
    """By depth a distribution, whatever the tokens are."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        q = np.sort(draw.dirichlet(np.full(SUPPORT, 0.5), HEADS).astype(np.float32))[:, ::-1]
        self.q = q
        self.ids = np.stack([draw.permutation(VOCAB)[:SUPPORT] for _ in range(HEADS)]).astype(np.int32)
        self.asked: list[int] = []

    def depths(self, request_id: str) -> Rows:
        return Rows(self.ids, np.log(self.q))

    def roots(self, request_ids: Sequence[str]) -> Rows:
        self.asked = []
        return self._rows([0] * len(request_ids))

    def nodes(self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        first = len(self.asked)
        self.asked += [1 if parent == ROOT else self.asked[parent] + 1 for parent in parents]
        return self._rows(self.asked[first:])

    def _rows(self, depths: Sequence[int]) -> Rows:
        return Rows(self.ids[list(depths)], np.log(self.q[list(depths)]))


def make(nodes: int) -> Medusa:
    proposer = Medusa(MedusaOptions(model="m", num_speculative_tokens=nodes))
    proposer.draft, proposer.deepest = Heads(), HEADS
    return proposer


@pytest.mark.parametrize("nodes", [1, 4, 16, 60])
def test_the_nodes_are_those_of_the_largest_products(nodes: int) -> None:
    proposer = make(nodes)
    tree = proposer.propose([request("a", budget_tokens=nodes)])[0]
    heads = proposer.draft
    assert isinstance(heads, Heads)
    products = {
        ranks: float(np.prod([heads.q[depth, rank] for depth, rank in enumerate(ranks)]))
        for depth in range(1, HEADS + 1)
        for ranks in itertools.product(range(SUPPORT), repeat=depth)
    }
    best = sorted(products.values(), reverse=True)[:nodes]
    assert tree.probabilities.tolist() == pytest.approx(best, rel=1e-4)
    assert tree.drawn is None
    depths = tree.depths()
    for node, depth in enumerate(depths.tolist()):
        assert tree.tokens[node] in heads.ids[depth - 1]


def test_a_drawn_tree_says_what_it_was_drawn_from() -> None:
    tree = make(12).propose([request("a", 1.0, budget_tokens=12)])[0]
    assert tree.drawn is not None
    assert set(tree.drawn.q) == set(tree.parents.tolist())
    assert tree.depths().max() <= HEADS


def test_the_budget_counts_one_pass() -> None:
    """However deep trees are: with passes that cost what a step costs, more nodes take no more of them."""
    budget = DraftBudget(16, 1, one_pass=True)
    other = DraftBudget(16, 1)
    for each in (budget, other):
        for _ in range(40):
            each.record_pass(0.01, 1, 1, 100)
            each.record_step(0.01, 1, 1, 100)
    seconds = [each._draft_seconds(np.arange(17), 1, 100)[0][[1, 16]] for each in (budget, other)]
    assert seconds[0][0] == pytest.approx(seconds[0][1])
    assert seconds[1][1] > 4 * seconds[1][0]


def test_fused_trees_are_never_drawn() -> None:
    config = {"method": "medusa_tree", "model": "m"}
    options = HybridOptions(drafters=["suffix_tree", config], num_speculative_tokens=24)
    assert draft_of(options) == MedusaOptions(model="m")
    hybrid = Hybrid.from_options(options, VOCAB)
    heads = hybrid.drafters[1]
    assert isinstance(heads, Medusa)
    said = heads.draft = Heads()
    heads.deepest = HEADS
    asked = request("a", 1.0, budget_tokens=24)
    hybrid.start(asked)
    tree = hybrid.propose([asked])[0]
    assert tree.drawn is None
    assert len(tree) == 24
    for node, depth in enumerate(tree.depths().tolist()):
        assert tree.tokens[node] in said.ids[depth - 1]
