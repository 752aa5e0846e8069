# SPDX-License-Identifier: Apache-2.0
"""A draft's tree beside others' nodes: below which it is asked, which passes it leaves out, and what is its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from vllm_ext.kernels.sparse import Sparse
from vllm_ext.proposers.joint_tree import JointTree, PassGain, unsaid
from vllm_ext.proposers.likeliest_tree import LikeliestTree
from vllm_ext.proposers.sampled import ROOT, TreeBuilder, grow
from vllm_ext.proposers.tree import DraftTree


def path_of(builder: TreeBuilder, node: int) -> tuple[int, ...]:
    path: tuple[int, ...] = ()
    while node != ROOT:
        path, node = (builder.tokens[node], *path), builder.parents[node]
    return path


def of_path(path: tuple[int, ...], spread: float = 1.0) -> Sparse:
    """A distribution over eight tokens that is the path's own."""
    draw = np.random.default_rng([7, *path])
    q = np.sort(np.exp(spread * draw.normal(size=8)))[::-1]
    return Sparse(draw.permutation(20)[:8].astype(np.int32), q / q.sum())


def grown(builder: TreeBuilder, least_reach: float = 0.0) -> list[list[tuple[int, ...]]]:
    """Grow it; by round, the paths after which the draft was asked."""
    rounds: list[list[tuple[int, ...]]] = []

    def draft(asked: Sequence[tuple[int, int]]) -> list[Sparse]:
        rounds.append([path_of(builder, node) for _, node in asked])
        return [of_path(path) for path in rounds[-1]]

    grow([builder], draft, least_reach)
    return rounds


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return dict(zip(found, tree.probabilities.tolist(), strict=True))


def chain(tokens: Sequence[int], chance: float) -> DraftTree:
    path = np.cumprod(np.full(len(tokens), chance)).astype(np.float32)
    return DraftTree.chain(np.array(tokens, np.int32), path)


@pytest.mark.parametrize("nodes", [1, 5, 16])
def test_beside_nothing_it_is_the_likeliest_tree(nodes: int) -> None:
    alone, beside = LikeliestTree(nodes, 6), JointTree(nodes, 6, DraftTree.empty())
    assert grown(alone) == grown(beside)
    wanted = {path: chance for path, chance in paths(alone.tree()).items() if chance >= 0.01}
    found = paths(beside.tree())
    assert wanted.keys() <= found.keys()
    for path, chance in wanted.items():
        assert found[path] == pytest.approx(chance)


@pytest.mark.parametrize("seed", range(20))
def test_what_it_hands_on_is_a_tree(seed: int) -> None:
    draw = np.random.default_rng(seed)
    size = int(draw.integers(0, 12))
    parents = np.array([int(draw.integers(-1, i)) for i in range(size)], np.int32)
    chances = np.zeros(size, np.float32)
    for node, parent in enumerate(parents.tolist()):
        chances[node] = draw.uniform(0.2, 1.0) * (chances[parent] if parent >= 0 else 1.0)
    others = DraftTree.from_nodes(np.arange(100, 100 + size, dtype=np.int32), parents, chances)
    builder = JointTree(10, 5, others)
    asked = grown(builder)
    assert all(len(path) == depth for depth, of_round in enumerate(asked) for path in of_round)
    tree = builder.tree()
    assert len(tree) <= 10
    assert (np.diff(tree.probabilities) <= 0).all()
    assert (tree.parents < np.arange(len(tree))).all()
    known = {path for of_round in asked for path in of_round}
    for path, chance in paths(tree).items():
        assert path[:-1] in known  # after each node's parent it was asked
        row = of_path(path[:-1])
        own = float(row.q[row.ids == path[-1]].sum())
        above = paths(tree).get(path[:-1], 1.0)
        assert chance == pytest.approx(above * max(own, 1e-6), rel=1e-5)


def test_it_goes_on_below_what_others_say() -> None:
    """The draft gives token 99 nothing; others do, so that it is asked after it, and says what comes then."""
    builder = JointTree(8, 4, chain([99], 0.9))
    asked = grown(builder)
    assert (99,) in asked[1]
    found = paths(builder.tree())
    row = of_path((99,))
    assert found[99, int(row.ids[0])] == pytest.approx(1e-6 * float(row.q[0]))


def test_no_pass_where_others_are_sure() -> None:
    """A pass below a node counts for what others do not say: of a chain that goes on for long, next to nothing."""
    assert len(grown(JointTree(8, 8, chain(range(90, 98), 0.99)), least_reach=0.2)) == 1
    # Where their chain ends, it is the draft's turn.
    asked = grown(JointTree(8, 8, chain(range(90, 92), 0.9)), least_reach=0.2)
    assert (90, 91) not in asked[0]
    assert len(grown(JointTree(8, 8, chain([90], 0.9)), least_reach=0.2)) > 1


def test_what_passes_bring_is_what_no_other_said() -> None:
    gain = PassGain()
    before = gain.given
    for _ in range(200):
        # Three passes; the text is theirs and the others' at first, and at depth 3 theirs alone.
        gain.drafted("a", chain([5, 6], 0.5), [0.5, 0.4, 0.3])
        gain.judge(["a"], [[5, 6, 7, 8]])
    assert gain.given == pytest.approx(1 / 1.2, rel=0.05)
    for _ in range(400):
        gain.drafted("a", chain([5, 6], 0.5), [0.5, 0.4])
        gain.judge(["a", "b"], [[5, 6, 7], [1]])
    assert gain.given < 0.15 < before
    for _ in range(400):
        gain.judge(["a"], [[5, 6, 7]])  # nothing of theirs was verified
    assert gain.given == pytest.approx(before, rel=0.01)
    gain.drafted("a", DraftTree.empty(), [1.0])
    gain.forget("a")
    gain.judge(["a"], [[5, 6]])
    assert gain.given == pytest.approx(before, rel=0.01)


def test_what_a_request_has_shown_is_its_own() -> None:
    """One in which passes bring nothing is not asked for more, whatever they bring to others; a new one is as all."""
    gain = PassGain()
    for _ in range(50):
        for name in ("good", "bad"):
            gain.drafted(name, chain([5, 6], 0.5), [0.5, 0.4, 0.3])
        gain.judge(["good", "bad"], [[5, 6, 7, 8], [5, 6, 9]])
    assert gain.given_to("bad") < 0.1 < gain.given_to("new") == gain.given < 0.6 < gain.given_to("good")
    for _ in range(400):
        gain.judge(["good"], [[5, 6, 7]])
    assert gain.given_to("bad") < 0.1
    gain.forget("bad")
    assert gain.given_to("bad") == gain.given


def test_what_passes_were_worth_counts_for_the_next() -> None:
    paid, unpaid = (JointTree(8, 4, chain([99], 0.9), given) for given in (1.0, 0.1))
    assert len(grown(paid, least_reach=0.2)) > len(grown(unpaid, least_reach=0.2)) == 1


def test_what_others_leave_unsaid() -> None:
    assert unsaid(DraftTree.empty()) == 1.0
    assert unsaid(chain([5, 6], 0.75)) == pytest.approx(0.25)
