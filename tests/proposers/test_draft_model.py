# SPDX-License-Identifier: Apache-2.0
"""Methods with a draft model, against a small one: what they ask it, and which trees they make of the answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from toy_draft import VOCAB, Draft, request

from vllm_ext.proposers.acceptance import PRIOR
from vllm_ext.proposers.base import Sampling, VerifiedRows, no_top
from vllm_ext.proposers.draft_model import DraftModelOptions, is_drawn, shaped
from vllm_ext.proposers.registry import load_method
from vllm_ext.proposers.sampled import ROOT

METHODS = ("dyspec", "rsd_c", "rsd_s", "spectr", "static_tree")


def make(method: str, **options: Any) -> Any:
    proposer_class: Any = load_method(method)
    proposer = proposer_class.from_options(proposer_class.Options(model="m", **options), VOCAB)
    proposer.draft = Draft()
    return proposer


@pytest.mark.parametrize("method", METHODS)
def test_trees_of_a_mixed_batch(method: str) -> None:
    proposer = make(method, max_depth=4)
    requests = [
        request("drawn", 1.0),
        request("greedy"),
        request("none", budget_tokens=0),
        request("seeded", 1.0, seed=3),
        request("chain", 1.0, chain=True),
        request("at its end", 1.0, max_depth=0),
        request("shallow", 1.0, max_depth=1),
    ]
    trees = proposer.propose(requests)
    assert [tree.drawn is not None for tree in trees] == [True, False, False, False, False, False, True]
    assert [bool(len(tree)) for tree in trees] == [True, True, False, True, True, False, True]
    for one, tree in zip(requests, trees, strict=True):
        assert len(tree) <= 10
        assert tree.depths().max(initial=0) <= min(one.max_depth, 4)
        if tree.drawn is None or tree.drawn.drafts is None:
            tree.validate()
        if tree.drawn is not None:
            assert set(tree.drawn.q) == set(tree.parents.tolist())
    assert proposer.passes == proposer.draft.passes <= 3
    # Its nodes are the likeliest: the same for all that are not drawn.
    assert trees[1].tokens.tolist() == trees[3].tokens.tolist()
    assert len(trees[1]) == 10
    # A chain is as long as a tree is deep, and not what is left of a tree.
    assert trees[4].is_chain
    assert len(trees[4]) == 4


@pytest.mark.parametrize("method", METHODS)
def test_the_draw_is_another_each_time(method: str) -> None:
    proposer = make(method)
    drawn = {tuple(proposer.propose([request("a", 1.5)])[0].tokens.tolist()) for _ in range(8)}
    assert len(drawn) > 1
    assert make(method).propose([request("a", 1.5)])[0].tokens.tolist() in [list(tree) for tree in drawn]


def test_dyspec_learns_from_what_was_verified() -> None:
    """Of a tree whose last nodes were left out these do not count; nor does one that was not verified at all."""
    proposer = make("dyspec")
    requests = [request(name, 1.0) for name in ("whole", "cut", "dropped", "greedy")]
    requests[3] = request("greedy")
    trees = proposer.propose(requests)
    sizes = [len(trees[0]), 1, 0, len(trees[3])]
    assert sizes[0] > 2
    before = proposer.acceptance.trials.copy()
    start = np.cumsum([0, *(size + 1 for size in sizes)]).astype(np.int32)
    accepted = np.zeros(start[-1], np.bool_)
    accepted[start[:-1]] = True
    rows = VerifiedRows(
        ["whole", "cut", "dropped", "greedy"],
        start,
        np.concatenate([[1, *tree.tokens[:size]] for tree, size in zip(trees, sizes, strict=True)]).astype(
            np.int32
        ),
        np.concatenate(
            [[-1, *(tree.parents[:size] + 1)] for tree, size in zip(trees, sizes, strict=True)]
        ).astype(np.int32),
        accepted,
        *no_top(int(start[-1])),
        emitted=[[1]] * 4,
    )
    proposer.observe(rows)
    hits, trials = proposer.acceptance.hits, proposer.acceptance.trials
    fewer = trials != before
    assert (hits / trials)[fewer].max() < PRIOR[fewer].max()
    # All of the root's children were tried, each in a group of its rank, and of the second tree one.
    children = int((trees[0].parents == ROOT).sum())
    assert children > 1
    assert fewer.any(axis=1).tolist() == [rank < children for rank in range(len(PRIOR))]
    learnt = trials.copy()
    proposer.observe(rows)  # judged once
    assert (trials == learnt).all()
    proposer.propose(requests)
    for each in requests:
        proposer.finish(each.request_id)
    proposer.observe(rows)
    assert (trials == learnt).all()


def test_a_distribution_is_treated_as_the_targets() -> None:
    ids = np.array([7, 3, 9, 1], np.int32)
    p = np.array([0.4, 0.3, 0.2, 0.05])  # of the whole vocabulary
    log_q = np.log(p).astype(np.float32)

    def of(temperature: float, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> dict[int, float]:
        found = shaped(ids, log_q, Sampling(temperature, top_p, top_k, min_p, None))
        assert found.q.sum() == pytest.approx(1.0)
        return dict(zip(found.ids.tolist(), found.q.tolist(), strict=True))

    whole = p / p.sum()
    assert of(0.0) == of(1.0) == pytest.approx(dict(zip(ids.tolist(), whole, strict=True)), rel=1e-6)
    sharp = p**2 / (p**2).sum()
    assert of(0.5) == pytest.approx(dict(zip(ids.tolist(), sharp, strict=True)), rel=1e-6)
    assert of(1.0, top_k=2) == pytest.approx({7: 4 / 7, 3: 3 / 7}, rel=1e-6)
    assert set(of(1.0, top_p=0.5)) == {7, 3}
    assert set(of(1.0, top_p=0.01)) == {7}
    assert set(of(1.0, min_p=0.4)) == {7, 3, 9}
    assert set(of(1e-4)) == {7}


def test_which_requests_are_drawn() -> None:
    assert is_drawn(request("a", 0.7))
    assert not is_drawn(request("a"))
    assert not is_drawn(request("a", 0.7, seed=0))
    assert not is_drawn(request("a", 0.7, chain=True))


def test_options() -> None:
    assert DraftModelOptions(model="self", self_layers=2).self_layers == 2
    with pytest.raises(ValidationError, match="only model='self' has layers to choose; model='path'"):
        DraftModelOptions(model="path", self_layers=2)
    with pytest.raises(ValidationError):
        DraftModelOptions()  # type: ignore[call-arg]
