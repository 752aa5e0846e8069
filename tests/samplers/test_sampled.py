# SPDX-License-Identifier: Apache-2.0
"""Verifiers of drafts that were sampled: exact by enumeration of every decision, and the known mistakes are found."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from enumeration import VOCAB, Model, Script, law_of, outcomes, sparse, verify

from vllm_ext.kernels.chance import Chance, RandomChance
from vllm_ext.kernels.sparse import Sparse
from vllm_ext.samplers import k_seq, recursive_rejection
from vllm_ext.samplers.k_seq import left_of, smallest_rho
from vllm_ext.samplers.tree_walk import walk

TARGET, DRAFT = Model(1), Model(2)
LENGTH = 3
EXACT = 1e-13


class SampledDrafts:
    """A tree of paths; row 0 is the root."""

    def __init__(self) -> None:
        self.paths: list[tuple[int, ...]] = [()]
        self.parents = [-1]

    def add(self, parent: int, token: int) -> int:
        self.paths.append((*self.paths[parent], token))
        self.parents.append(parent)
        return len(self.paths) - 1

    def verify(self, chance: Chance, target: Model = TARGET, draft: Model = DRAFT) -> list[int]:
        def draw(row: int, children: list[int]) -> int:
            p = target.after(self.paths[row])
            if not children:
                return chance.draw(p)
            tokens = [self.paths[child][-1] for child in children]
            return recursive_rejection.choose(p, tokens, sparse(draft.after(self.paths[row])), chance)

        return verify([path[-1] if path else 0 for path in self.paths], self.parents, draw)


def without_replacement(chance: Chance, branching: Sequence[int], draft: Model = DRAFT) -> SampledDrafts:
    """So many children of each node of each depth, drawn one after the other."""
    tree = SampledDrafts()
    rows = [0]
    for children in branching:
        below = []
        for row in rows:
            left = draft.after(tree.paths[row]).copy()
            for _ in range(children):
                token = chance.draw(left)
                left[token] = 0.0
                below.append(tree.add(row, token))
        rows = below
    return tree


@pytest.mark.parametrize("branching", [(), (1,), (2,), (3,), (1, 1), (2, 1), (1, 2), (2, 2)])
def test_recursive_rejection_is_exact(branching: Sequence[int]) -> None:
    law = law_of(lambda chance: without_replacement(chance, branching).verify(chance), TARGET, LENGTH)
    assert law == pytest.approx(TARGET.law(LENGTH), abs=EXACT)


def test_what_the_builder_must_keep() -> None:
    """The mistakes that a sampled tree is easily verified with, and how far each is off."""

    def error(code: object) -> float:
        return float(np.abs(law_of(code, TARGET, LENGTH) - TARGET.law(LENGTH)).max())  # type: ignore[arg-type]

    def reordered(chance: Script) -> list[int]:
        """Siblings do not stand in the order they were drawn."""
        tree = without_replacement(chance, (2,))
        order = sorted(range(1, 3), key=lambda row: tree.paths[row])
        tree.paths[1:] = [tree.paths[row] for row in order]
        return tree.verify(chance)

    def pruned(chance: Script) -> list[int]:
        """Drawn nodes are dropped for being improbable."""
        tree = without_replacement(chance, (2,))
        kept = [row for row in (1, 2) if DRAFT.rows[0][tree.paths[row][0]] > 0.25]
        tree.paths[1:], tree.parents[1:] = [tree.paths[row] for row in kept], [0] * len(kept)
        return tree.verify(chance)

    def chosen(chance: Script) -> list[int]:
        """The likeliest children, as if they had been drawn."""
        tree = SampledDrafts()
        for token in np.argsort(-DRAFT.rows[0])[:2]:
            tree.add(0, int(token))
        return tree.verify(chance)

    def longest_of_paths(chance: Script) -> list[int]:
        """The target is sampled again for each path of a tree, and the one that gets farthest is taken."""
        outputs = []
        for path in itertools.product((0, 1), (0, 1)):
            row_start, tokens = np.array([0, 3], np.int32), np.array([0, *path], np.int32)

            def draw(_: object, rows: Sequence[int], __: object, path: tuple[int, ...] = path) -> list[int]:
                return [chance.draw(TARGET.after(path[: rows[0]]))]

            outputs.append(walk(row_start, tokens, np.array([-1, 0, 1], np.int32), draw)[1][0])
        return max(outputs, key=len)

    errors = [error(code) for code in (reordered, pruned, chosen, longest_of_paths)]
    assert min(errors) > 0.01, errors


def test_a_whole_vocabulary_of_children_is_never_rejected() -> None:
    for emitted, weight in outcomes(lambda chance: without_replacement(chance, (VOCAB,)).verify(chance)):
        assert len(emitted) == 2 or weight < EXACT


def test_the_first_child_is_accepted_where_draft_and_target_agree() -> None:
    for emitted, weight in outcomes(
        lambda chance: without_replacement(chance, (2, 1), TARGET).verify(chance, TARGET, TARGET)
    ):
        assert len(emitted) == 3 or weight < EXACT


def test_a_greedy_target_takes_its_token_wherever_it_stands() -> None:
    greedy = Model(1)
    greedy.rows = np.eye(VOCAB)[[2, 0, 1]]
    for emitted, weight in outcomes(
        lambda chance: without_replacement(chance, (2, 2)).verify(chance, greedy)
    ):
        assert emitted == [2, 1, 0][: len(emitted)] or weight == 0.0


def spectr(chance: Chance, k: int, length: int) -> list[int]:
    """``k`` drafts, and the tree they are together."""
    tree = SampledDrafts()
    rows = np.zeros((k, length + 1), np.int32)
    for draft in range(k):
        for depth in range(length):
            path = (*tree.paths[rows[draft, depth]], chance.draw(DRAFT.after(tree.paths[rows[draft, depth]])))
            if path not in tree.paths:
                tree.add(int(rows[draft, depth]), path[-1])
            rows[draft, depth + 1] = tree.paths.index(path)

    def draw(row: int, children: list[int]) -> int:
        p = TARGET.after(tree.paths[row])
        if not children:
            return chance.draw(p)
        depth = len(tree.paths[row])
        tokens = [tree.paths[below][-1] for at, below in rows[:, depth : depth + 2].tolist() if at == row]
        return k_seq.choose(p, tokens, sparse(DRAFT.after(tree.paths[row])), chance)

    return verify([path[-1] if path else 0 for path in tree.paths], tree.parents, draw)


@pytest.mark.parametrize(("k", "length"), [(1, 1), (1, 2), (2, 1), (3, 1), (2, 2), (3, 2), (2, 0)])
def test_k_seq_is_exact(k: int, length: int) -> None:
    law = law_of(lambda chance: spectr(chance, k, length), TARGET, LENGTH)
    assert law == pytest.approx(TARGET.law(LENGTH), abs=1e-9)  # rho is found by bisection


def test_equal_drafts_count_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rho for more drafts than are tried the law is another one."""
    monkeypatch.setattr(k_seq, "smallest_rho", lambda p, q, k: smallest_rho(p, q, 1))
    law = law_of(lambda chance: spectr(chance, 3, 1), TARGET, LENGTH)
    assert np.abs(law - TARGET.law(LENGTH)).max() > 0.01


def test_rho_is_valid_and_more_drafts_accept_more() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        p, q = rng.dirichlet(np.ones(20) / 4, size=2)
        accepted = []
        for k in (1, 2, 3, 8):
            rho = smallest_rho(p, q, k)
            assert 1.0 <= rho <= k
            beta = np.minimum(q, p / rho).sum()
            accepted.append(1 - (1 - beta) ** k)
            left = p - np.minimum(q, p / rho) * accepted[-1] / beta
            assert left.min() > -1e-7
            assert left.sum() == pytest.approx(1 - accepted[-1], abs=1e-9)
            assert left_of(p, q, rho, k) == pytest.approx(np.maximum(left, 0), abs=1e-12)
        assert accepted == sorted(accepted)
        assert accepted[0] == pytest.approx(np.minimum(p, q).sum())  # speculative sampling
        assert smallest_rho(p, p, 5) == pytest.approx(1.0, abs=0.01)


def test_drafts_that_have_nothing_in_common_with_the_target() -> None:
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.0, 1.0])
    assert (left_of(p, q, smallest_rho(p, q, 2), 2) == p).all()
    tree = SampledDrafts()
    tree.add(0, 2)
    target, draft = Model(1), Model(2)
    target.rows, draft.rows = np.tile(p, (3, 1)), np.tile(q, (3, 1))
    for emitted, weight in outcomes(lambda chance: tree.verify(chance, target, draft)):
        assert (len(emitted), weight) in ((1, 0.5), (2, 0.0))


def test_random_decisions_have_their_chances() -> None:
    chance = RandomChance(np.random.default_rng(3))
    accepted = sum(chance.accepts(0.3, 0.4) for _ in range(40_000))
    assert accepted == pytest.approx(30_000, abs=4 * (40_000 * 0.75 * 0.25) ** 0.5)
    assert not any(chance.accepts(0.0, 0.0) for _ in range(100))
    assert all(chance.accepts(2.0, 1.0) for _ in range(100))
    weights = np.array([0.0, 3.0, 0.0, 1.0, 0.0])
    drawn = np.bincount([chance.draw(weights) for _ in range(40_000)], minlength=5)
    assert drawn[[0, 2, 4]].sum() == 0
    assert drawn[3] == pytest.approx(10_000, abs=4 * (40_000 * 0.75 * 0.25) ** 0.5)

    class Last(np.random.Generator):
        def random(self) -> float:  # type: ignore[override]
            return 1.0  # what rounding can make of the product

    assert RandomChance(Last(np.random.PCG64())).draw(weights) == 3


@pytest.mark.parametrize("rule", [recursive_rejection, k_seq])
def test_a_draft_of_few_tokens_of_the_vocabulary(rule: Any) -> None:
    """Tokens the draft cannot have keep their chances, whatever the order of those it can."""
    p = np.random.default_rng(0).dirichlet(np.ones(6))
    q = Sparse(np.array([4, 0, 3], np.int32), np.array([0.5, 0.2, 0.3]))

    def code(chance: Script) -> int:
        left, tokens = q.q.copy(), []
        for _ in range(2):
            tokens.append(place := chance.draw(left))
            if rule is recursive_rejection:
                left[place] = 0.0
        return int(rule.choose(p, [int(q.ids[place]) for place in tokens], q, chance))

    law = np.zeros(6)
    for token, weight in outcomes(code):
        law[token] += weight
    assert law == pytest.approx(p, abs=1e-9)
