# SPDX-License-Identifier: Apache-2.0
"""Methods that draft with the model's own layers: shapes of their trees, what they ask, and when they stop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy_draft import VOCAB, Draft, request

from vllm_ext.proposers.base import VerifiedRows
from vllm_ext.proposers.registry import load_method


def make(method: str, **options: Any) -> Any:
    proposer_class: Any = load_method(method)
    proposer = proposer_class.from_options(proposer_class.Options(**options), VOCAB)
    proposer.draft = Draft()
    return proposer


@pytest.mark.parametrize("method", ["layerskip", "unified_skip", "del"])
@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_chains_take_a_pass_for_each_node_but_the_last(method: str, nodes: int) -> None:
    proposer = make(method, num_speculative_tokens=nodes)
    requests = [
        request("greedy"),
        request("drawn", 1.0),
        request("seeded", 1.0, seed=3),
        request("none", max_depth=0),
    ]
    trees = proposer.propose(requests)
    assert [len(tree) for tree in trees] == [nodes, nodes, nodes, 0]
    assert all(tree.is_chain and tree.drawn is None for tree in trees)
    assert proposer.draft.passes == nodes - 1
    # The likeliest child each time.
    token = 0
    for expected in trees[0].tokens.tolist():
        token = int(proposer.draft.model.rows[token].argmax())
        assert token == expected


@pytest.mark.parametrize("width", [2, 4])
def test_trees_ask_about_no_more_nodes_than_they_have(width: int) -> None:
    proposer = make("layerskip", num_speculative_tokens=7, width=width)
    (tree,) = proposer.propose([request("a")])
    assert len(tree) == 7
    assert not tree.is_chain
    assert np.bincount(tree.parents + 1).max() <= width
    assert len(proposer.draft.nodes_of["a"]) <= 7


def test_nothing_is_drafted_below_what_is_unsure() -> None:
    proposer = make("layerskip", num_speculative_tokens=8, least_sure=0.99)
    (tree,) = proposer.propose([request("a")])
    assert len(tree) == 1
    assert proposer.draft.passes == 0
    sure = make("layerskip", num_speculative_tokens=8, least_sure=0.05).propose([request("a")])
    assert len(sure[0]) == 8


def verified(tree: Any, right: int) -> VerifiedRows:
    """One request's chain, of which so many were accepted."""
    rows = 1 + len(tree)
    return VerifiedRows(
        ["a"],
        np.array([0, rows], np.int32),
        np.array([0, *tree.tokens], np.int32),
        np.arange(-1, rows - 1, dtype=np.int32),
        np.arange(rows) <= right,
        np.zeros((rows, 0), np.int32),
        np.zeros((rows, 0), np.float32),
        [[0] * (1 + right)],
    )


def test_probabilities_are_worth_what_they_were() -> None:
    proposer = make("del", num_speculative_tokens=4)
    proposer.exit_layer = 3
    before = [proposer.worth(value) for value in (0.05, 0.5, 1.0)]
    assert before == pytest.approx([1 / 16, 9 / 16, 15 / 16])  # the middles of their classes
    for _ in range(600):
        (tree,) = proposer.propose([request("a")])
        proposer.observe(verified(tree, right=1))
    first, second = np.array([1.0, *tree.probabilities])[1:3] / np.array([1.0, *tree.probabilities])[:2]
    assert int(8 * first) != int(8 * second)
    assert proposer.worth(float(first)) > 0.97  # always accepted
    assert proposer.worth(float(second)) < 0.03  # never; of those behind it nothing is known
    proposer.exit_layer = 5
    assert [proposer.worth(value) for value in (0.05, 0.5, 1.0)] == before
    proposer.propose([request("a")])
    proposer.finish("a")
    assert not proposer._drafted


def test_a_chain_ends_where_one_more_token_does_not_pay() -> None:
    proposer = make("del", num_speculative_tokens=8)
    (whole,) = proposer.propose([request("a")])
    own = whole.probabilities / np.array([1.0, *whole.probabilities[:-1]])
    chances = np.cumprod([proposer.worth(float(value)) for value in own])
    for length in (1, 3, 6):
        proposer.least_worth = float(chances[length - 1] + chances[length - 2]) / 2 if length > 1 else 1.0
        (tree,) = proposer.propose([request("a")])
        assert len(tree) == length
        assert tree.tokens.tolist() == whole.tokens.tolist()[:length]
