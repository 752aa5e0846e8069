# SPDX-License-Identifier: Apache-2.0
"""Parallel prompt decoding: what stands in a tree, what a step leaves for the next one, and what it learns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy_draft import request

from vllm_ext.kernels.sparse import Sparse
from vllm_ext.proposers.base import VerifiedRows
from vllm_ext.proposers.hybrid import HybridOptions
from vllm_ext.proposers.medusa import product_tree
from vllm_ext.proposers.ppd import Ppd, PpdOptions, split_tree
from vllm_ext.proposers.tree import DraftTree

VOCAB, PROMPTS = 40, 3
REACH = np.array([0.5, 0.3, 0.1])


def guesses(draw: np.random.Generator, count: int, support: int = 4) -> list[Sparse]:
    """Some, likeliest first, which leave a part of the chance to other tokens."""
    found = []
    for _ in range(count):
        q = np.sort(draw.dirichlet(np.full(support + 1, 0.6)))[::-1][:support]
        found.append(Sparse(draw.permutation(VOCAB)[:support].astype(np.int32), q))
    return found


def check(tree: DraftTree, num_nodes: int, max_depth: int) -> None:
    """The tree keeps its limits, and prompt tokens stand in chains below candidates or the root."""
    tree.validate()
    assert len(tree) <= num_nodes
    if len(tree):
        assert tree.depths().max() <= max_depth
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        above = tree.tokens[parent] if parent >= 0 else -1
        if token > VOCAB:
            assert above == token - 1
        else:
            assert above < VOCAB


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("state", [0, 1, 2, 3])
def test_no_split_of_the_rows_is_worth_more(seed: int, state: int) -> None:
    depths = guesses(np.random.default_rng(seed), state)
    num_nodes, max_depth = 5, 4
    tree = split_tree(depths, REACH, num_nodes, max_depth, VOCAB)
    check(tree, num_nodes, max_depth)
    best = 0.0
    candidates = product_tree(depths, num_nodes)
    for kept in range(len(candidates) + 1):
        chances = [1.0, *candidates.probabilities[:kept].tolist()]
        last = list(chances)
        for node, parent in enumerate(candidates.parents[:kept].tolist(), 1):
            last[parent + 1] -= chances[node]
        for lengths in itertools.product(range(PROMPTS + 1), repeat=kept + 1):
            if sum(lengths) <= num_nodes - kept:
                of_prompts = sum(
                    chance * REACH[:length].sum() for chance, length in zip(last, lengths, strict=True)
                )
                best = max(best, sum(chances[1:]) + of_prompts)
    assert float(tree.probabilities.sum()) == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("num_nodes", [1, 2, 7, 16, 128])
@pytest.mark.parametrize("max_depth", [1, 2, 9])
def test_trees_keep_their_limits(num_nodes: int, max_depth: int, chain: bool) -> None:
    for seed in range(5):
        for state in range(PROMPTS + 1):
            depths = guesses(np.random.default_rng(seed), state)
            tree = split_tree(depths, REACH, num_nodes, max_depth, VOCAB, chain)
            check(tree, num_nodes, max_depth)
            assert len(tree) > 0
            if chain:
                assert tree.is_chain


def test_nothing_is_known_at_first() -> None:
    tree = split_tree([], REACH, 16, 30, VOCAB)
    assert tree.tokens.tolist() == [VOCAB, VOCAB + 1, VOCAB + 2]
    assert tree.is_chain
    np.testing.assert_allclose(tree.probabilities, REACH)


def verified(
    ppd: Ppd, tree: DraftTree, root: int, accepted: Sequence[int], emitted: Sequence[int]
) -> VerifiedRows:
    """One step over a tree: row ``r`` ranks ``[r, r + 1, ...]`` first, each with half of the one before."""
    rows = 1 + len(tree)
    taken = np.zeros(rows, np.bool_)
    taken[[0, *(node + 1 for node in accepted)]] = True
    width = ppd.verified_top_k
    logits = (np.log(0.5) * np.arange(1, width + 1)).astype(np.float32)
    return VerifiedRows(
        ["a"],
        np.array([0, rows], np.int32),
        np.concatenate([[root], tree.tokens]).astype(np.int32),
        np.concatenate([[-1], tree.parents + 1]).astype(np.int32),
        taken,
        (np.arange(rows)[:, None] + np.arange(width)).astype(np.int32) % VOCAB,
        (7.0 + np.tile(logits, (rows, 1))).astype(np.float32),
        [list(emitted)],
        np.full(rows, 7.0, np.float32),
    )


def make(nodes: int = 12) -> Ppd:
    return Ppd(VOCAB, PROMPTS, nodes)


def test_what_stands_below_the_last_accepted_node_is_the_next_tree() -> None:
    ppd = make()
    first = ppd.propose([request("a", budget_tokens=12)])[0]
    assert first.tokens.tolist() == [VOCAB, VOCAB + 1, VOCAB + 2]
    ppd.observe(verified(ppd, first, 5, [], [9]))
    second = ppd.propose([request("a", budget_tokens=12)])[0]
    check(second, 12, 30)
    candidates = second.where(second.tokens < VOCAB)
    # Rows 1 to 3 were the prompt tokens: their first choices are depth 1 to 3.
    likeliest = candidates.best_chain().tokens.tolist()
    assert likeliest == [1, 2, 3][: len(likeliest)]
    at = {1: 1, 2: 2, 3: 3}
    for token, depth, chance in zip(
        candidates.tokens, candidates.depths(), candidates.probabilities, strict=True
    ):
        assert int(token) >= at[int(depth)]
        assert 0.0 < chance <= 0.5 ** int(depth)
    assert candidates.probabilities[0] == pytest.approx(0.5)


@pytest.mark.parametrize("kept", range(PROMPTS + 1))
def test_the_state_is_how_many_prompt_tokens_were_verified_there(kept: int) -> None:
    """The scheduler may cut a tree: its last rows were no part of the step."""
    ppd = make()
    tree = ppd.propose([request("a", budget_tokens=12)])[0].prefix(kept)
    ppd.observe(verified(ppd, tree, 5, [], [9]))
    nodes = ppd.propose([request("a", budget_tokens=128)])[0]
    candidates = nodes.where(nodes.tokens < VOCAB)
    assert (candidates.depths().max() if len(candidates) else 0) == kept


def test_prompt_tokens_below_other_nodes_are_of_no_use() -> None:
    ppd = make()
    tree = DraftTree.from_nodes(
        np.array([3, VOCAB, 4, VOCAB, VOCAB + 1], np.int32),
        np.array([-1, -1, 0, 2, 3], np.int32),
        np.array([0.6, 0.4, 0.3, 0.2, 0.1], np.float32),
    )
    place = {
        (int(t), int(p)): row for row, (t, p) in enumerate(zip(tree.tokens, tree.parents, strict=True), 1)
    }
    ppd._depth["a"] = 2
    accepted = [place[3, -1] - 1, next(row - 1 for (token, _), row in place.items() if token == 4)]
    ppd.observe(verified(ppd, tree, 5, accepted, [3, 4, 8]))
    next_tree = ppd.propose([request("a", budget_tokens=128)])[0]
    candidates = next_tree.where(next_tree.tokens < VOCAB)
    assert candidates.depths().max() == 2
    below = next(row for (token, parent), row in place.items() if token == VOCAB and parent >= 0)
    assert candidates.tokens[0] == below


@pytest.mark.parametrize(
    ("emitted", "accepted"),
    [([], []), ([3], [0])],
    ids=["a prompt is incomplete", "its last token was put off"],
)
def test_guesses_of_another_place_are_dropped(emitted: list[int], accepted: list[int]) -> None:
    ppd = make()
    tree = DraftTree.from_nodes(
        np.array([3, VOCAB], np.int32), np.array([-1, 0], np.int32), np.array([0.6, 0.4], np.float32)
    )
    ppd.observe(verified(ppd, tree, 5, accepted, emitted))
    assert (ppd.propose([request("a", budget_tokens=9)])[0].tokens >= VOCAB).all()


def test_a_guess_serves_one_tree() -> None:
    ppd = make()
    tree = ppd.propose([request("a", budget_tokens=12)])[0]
    ppd.observe(verified(ppd, tree, 5, [], [9]))
    nodes = request("a", budget_tokens=12)
    assert len(ppd.propose([replace(nodes, budget_tokens=0)])[0]) == 0
    assert (ppd.propose([nodes])[0].tokens >= VOCAB).all()


def test_how_deep_trees_are_right_is_learnt() -> None:
    ppd = make()
    before = ppd.reach()
    np.testing.assert_allclose(before, [0.5, 0.25, 0.125])
    for _ in range(200):
        tree = ppd.propose([request("a", budget_tokens=12)])[0]
        child = np.flatnonzero((tree.parents < 0) & (tree.tokens < VOCAB))[:1].tolist()
        emitted = [*tree.tokens[child].tolist(), 9]
        ppd.observe(verified(ppd, tree, 5, child, emitted))
    # One candidate of each tree was accepted.
    first, second, third = ppd.reach()
    assert first > 0.9
    assert second < 0.15
    assert third <= second
    # What is worth nothing gets no rows where others are worth more.
    tree = ppd.propose([request("a", budget_tokens=12)])[0]
    prompts = tree.tokens[tree.tokens >= VOCAB]
    assert (prompts == VOCAB).sum() > (prompts > VOCAB).sum()


def test_a_request_that_samples_guesses_as_it_samples() -> None:
    ppd = make()
    for temperature, top_k in ((0.0, 0), (1.0, 2), (1.0, 0)):
        tree = ppd.propose([request("a", budget_tokens=12)])[0]
        ppd.observe(verified(ppd, tree, 5, [], [9]))
        asked: Any = request("a", budget_tokens=128)
        asked = replace(asked, sampling=replace(asked.sampling, temperature=temperature, top_k=top_k))
        nodes = ppd.propose([asked])[0]
        ones = (nodes.parents < 0) & (nodes.tokens < VOCAB)
        assert ones.sum() == top_k if top_k else ones.sum() > 2
        ppd.finish("a")


class Cycle:
    """A target whose tokens have one successor each, known at every row, prompt tokens' too."""

    def __init__(self) -> None:
        self.after = (np.arange(VOCAB) * 7 + 3) % VOCAB

    def step(self, ppd: Ppd, tree: DraftTree, root: int) -> list[int]:
        """Verify a tree; the tokens put out."""
        tokens, said = [root, *tree.tokens.tolist()], []
        for row, token in enumerate(tokens):
            if token < VOCAB:
                said.append(int(self.after[token]))
            else:  # behind its parent's word
                said.append(int(self.after[said[int(tree.parents[row - 1]) + 1]]))
        accepted, emitted, at = [], [said[0]], -1
        while len(child := np.flatnonzero((tree.parents == at) & (tree.tokens == emitted[-1]))):
            at = int(child[0])
            accepted.append(at)
            emitted.append(said[at + 1])
        rows = verified(ppd, tree, root, accepted, emitted)
        top = np.array(said)[:, None] + np.arange(ppd.verified_top_k)
        logits = np.full(rows.top_logits.shape, -9.0, np.float32)
        logits[:, 0] = 7.0
        ppd.observe(replace(rows, top_ids=(top % VOCAB).astype(np.int32), top_logits=logits))
        return emitted


@pytest.mark.parametrize(("nodes", "tokens"), [(6, 4), (16, 4), (1, 1.5)])
def test_with_a_target_that_knows_what_follows(nodes: int, tokens: float) -> None:
    """With room for it each step puts out a token for each prompt token, and one more."""
    ppd, cycle, root, out = make(nodes), Cycle(), 3, []
    for _ in range(60):
        tree = ppd.propose([request("a", budget_tokens=nodes)])[0]
        emitted = cycle.step(ppd, tree, root)
        for token in emitted:
            assert token == cycle.after[root]
            root = token
        out.append(len(emitted))
    assert np.mean(out[4:]) == pytest.approx(tokens, abs=0.05)


def test_it_stands_alone() -> None:
    with pytest.raises(ValueError, match="'ppd' has rows in the tree"):
        HybridOptions(drafters=["suffix_tree", {"method": "ppd", "model": "m"}])
    made = Ppd.from_options(PpdOptions(model="m", num_speculative_tokens=7), VOCAB)
    assert made.verified_top_k == 7
    made.warm_up()
