# SPDX-License-Identifier: Apache-2.0
"""Trees sampled from a draft model leave, with their verifiers, the target's law: every decision is enumerated."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from enumeration import VOCAB, Model, Script, law_of, outcomes, sparse
from enumeration import verify as walked
from scipy.stats import chisquare

from vllm_ext.kernels.chance import Chance, RandomChance
from vllm_ext.kernels.sparse import Sparse
from vllm_ext.proposers.acceptance import PRIOR, Acceptance
from vllm_ext.proposers.dyspec import SampledTree
from vllm_ext.proposers.likeliest_tree import LikeliestTree
from vllm_ext.proposers.rsd import BeamTree, BranchingTree
from vllm_ext.proposers.sampled import ASKED_PER_NODE, ROOT, TreeBuilder, grow
from vllm_ext.proposers.spectr import IndependentDrafts
from vllm_ext.samplers import k_seq, recursive_rejection

TARGET, DRAFT = Model(1), Model(2)
LENGTH = 3
EXACT = 1e-13


def path_of(builder: TreeBuilder, node: int) -> list[int]:
    path: list[int] = []
    while node != ROOT:
        path.append(builder.tokens[node])
        node = builder.parents[node]
    return path[::-1]


def drafted(*builders: TreeBuilder, draft: Model = DRAFT, least_reach: float = 0.0) -> int:
    """Grow by a model; returns the rounds."""
    return grow(
        builders,
        lambda asked: [sparse(draft.after(path_of(builders[index], node))) for index, node in asked],
        least_reach,
    )


def verify(builder: TreeBuilder, chance: Chance, target: Model = TARGET) -> list[int]:
    """Row 0 is the root, row i + 1 node i of the finished tree."""
    tree = builder.tree()
    paths: list[list[int]] = [[]]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append([*paths[parent + 1], token])

    def draw(row: int, children: list[int]) -> int:
        p = target.after(paths[row])
        if not children:
            return chance.draw(p)
        assert tree.drawn is not None
        q = tree.drawn.q[row - 1]
        if tree.drawn.drafts is None:
            return recursive_rejection.choose(p, [paths[child][-1] for child in children], q, chance)
        depth = len(paths[row])
        here = [draft for draft in tree.drawn.drafts.tolist() if depth == 0 or draft[depth - 1] == row - 1]
        return k_seq.choose(p, [int(tree.tokens[draft[depth]]) for draft in here], q, chance)

    return walked([0, *tree.tokens.tolist()], [-1, *(tree.parents + 1).tolist()], draw)


def acceptance(seed: int | None = None) -> Acceptance:
    """Estimates that are no draft's, at random; None: those that nothing was counted for."""
    found = Acceptance()
    if seed is not None:
        found.hits[:] = found.trials * np.random.default_rng(seed).random(PRIOR.shape)
    return found


def dyspec(
    nodes: int, depth: int, least: float = 0.0, seed: int | None = None
) -> Callable[[Chance], TreeBuilder]:
    return lambda chance: SampledTree(nodes, depth, chance, acceptance(seed), least)


def rsd_c(nodes: int, *branching: int) -> Callable[[Chance], TreeBuilder]:
    return lambda chance: BranchingTree(branching, nodes, chance)


BUILDERS = {
    "dyspec, none": dyspec(0, 3),
    "dyspec, one": dyspec(1, 3),
    "dyspec, two": dyspec(2, 3),
    "dyspec, three": dyspec(3, 2),
    "dyspec, four": dyspec(4, 3),
    "dyspec, all children": dyspec(9, 1),
    "dyspec, above a value": dyspec(9, 2, 0.2),
    "dyspec, three, odd estimates": dyspec(3, 3, seed=1),
    "dyspec, four, odd estimates": dyspec(4, 3, seed=2),
    "rsd_c, none": rsd_c(9),
    "rsd_c, siblings": rsd_c(9, 2),
    "rsd_c, all and one": rsd_c(9, 3, 1),
    "rsd_c, one and two": rsd_c(9, 1, 2),
    "rsd_c, cut": rsd_c(5, 2, 2),
    "rsd_c, a chain": rsd_c(9, 1, 1, 1),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_the_output_has_the_targets_law(name: str) -> None:
    def code(chance: Script) -> list[int]:
        builder = BUILDERS[name](chance)
        drafted(builder)
        return verify(builder, chance)

    assert law_of(code, TARGET, LENGTH) == pytest.approx(TARGET.law(LENGTH), abs=EXACT)


@pytest.mark.parametrize(("k", "length"), [(1, 2), (2, 1), (2, 2), (3, 1)])
def test_independent_drafts_have_the_targets_law(k: int, length: int) -> None:
    def code(chance: Script) -> list[int]:
        builder = IndependentDrafts(k, length, chance)
        assert drafted(builder) <= length
        return verify(builder, chance)

    assert law_of(code, TARGET, LENGTH) == pytest.approx(TARGET.law(LENGTH), abs=1e-9)


def test_a_dyspec_tree_that_is_cut_by_what_was_drawn_is_biased() -> None:
    def code(chance: Script) -> list[int]:
        builder = SampledTree(4, 3, chance, acceptance())
        drafted(builder)
        tree = builder.tree()
        depth = int((tree.parents == ROOT).sum())  # of the children only, for short
        chances = [DRAFT.rows[0][token] for token in tree.tokens[:depth]]
        builder._num_nodes = sum(np.cumprod(np.array(chances) > 0.2))
        return verify(builder, chance)

    assert np.abs(law_of(code, TARGET, LENGTH) - TARGET.law(LENGTH)).max() > 0.002


class Keyed:
    """Draws that depend on what is drawn from alone, in whatever order."""

    def accepts(self, numerator: float, denominator: float) -> bool:
        raise AssertionError

    def draw(self, weights: np.ndarray) -> int:
        return RandomChance(np.random.default_rng(list(weights.tobytes()))).draw(weights)


class Lucky(SampledTree):
    """Values what was drawn, not what may be."""

    def _fill(self, node: int, value: float) -> None:
        super()._fill(node, value)
        drawn = self._reach[len(self.tokens) - 1]
        self.values[-1] = min(value, drawn)


def test_a_dyspec_tree_that_values_what_was_drawn_is_biased() -> None:
    def code(chance: Script) -> list[int]:
        builder = Lucky(3, 3, chance, acceptance())
        drafted(builder)
        return verify(builder, chance)

    assert np.abs(law_of(code, TARGET, LENGTH) - TARGET.law(LENGTH)).max() > 0.002


@pytest.mark.parametrize("odd", [None, 3])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("nodes", "depth"), [(6, 9), (12, 3), (40, 4)])
def test_dyspec_in_layers_is_nearly_dyspec_one_at_a_time(
    seed: int, nodes: int, depth: int, odd: int | None
) -> None:
    draft, known = Model(seed, vocab=6), acceptance(odd)
    builder = SampledTree(nodes, depth, Keyed(), known)
    rounds = drafted(builder, draft=draft)
    numbers = itertools.count(1)
    # The paper's algorithm, with expected acceptance: pop, draw, push two.
    slots: list[tuple[float, int, float, int, list[int], np.ndarray]] = []
    expected: list[tuple[tuple[int, ...], float]] = []

    def push(most: float, reach: float, rank: int, path: list[int], left: np.ndarray) -> None:
        if len(path) < depth and left.any():
            chances = left / left.sum()
            mean = float((chances * known.estimates(known.groups(rank, chances))).sum())
            heapq.heappush(slots, (-min(most, reach * mean), next(numbers), reach, rank, path, left))

    push(1.0, 1.0, 0, [], draft.after([]))
    while slots and len(expected) < nodes:
        value, _, reach, rank, path, left = heapq.heappop(slots)
        token = Keyed().draw(left)
        group = known.groups(rank, np.array([left[token] / left.sum()]))
        accepted, rest = float(known.estimates(group)[0]), left.copy()
        rest[token] = 0.0
        expected.append(((*path, token), -value))
        push(-value, reach * accepted, 0, [*path, token], draft.after([*path, token]))
        push(-value, reach * (1 - accepted), rank + 1, path, rest)
    kept = builder.kept()
    assert len(kept) == len(expected)
    values, best = (
        sorted(each, reverse=True) for each in ([builder.values[n] for n in kept], dict(expected).values())
    )
    # Where a node is not asked about because others may be worth more, and they are not, some value is lost.
    assert values[: nodes // 3] == pytest.approx(best[: nodes // 3])
    assert 0.9 * sum(best) < sum(values) < sum(best) + 1e-9
    assert rounds <= max(len(path) for path, _ in expected) + 1


def test_where_the_draft_is_likely_to_be_right_the_tree_is_deep() -> None:
    def shape(sure: float) -> tuple[int, int]:
        rows = np.full((6, 6), (1.0 - sure) / 5)
        np.fill_diagonal(rows, sure)
        draft = Model(0, vocab=6)
        draft.rows = rows
        deep = wide = 0
        for seed in range(30):
            builder = SampledTree(6, 6, RandomChance(np.random.default_rng(seed)), acceptance())
            drafted(builder, draft=draft)
            tree = builder.tree()
            deep, wide = deep + int(tree.depths().max()), wide + int((tree.parents == ROOT).sum())
        return deep, wide

    (sure_deep, sure_wide), (deep, wide) = shape(0.98), shape(0.2)
    assert sure_deep > 1.5 * deep
    assert wide > 1.2 * sure_wide


def test_a_draft_that_is_the_target_is_accepted_to_the_leftmost_leaf() -> None:
    def code(chance: Script) -> tuple[int, int]:
        builder = SampledTree(4, 9, chance, acceptance())
        drafted(builder, draft=TARGET)
        parents, node, depth = builder.tree().parents.tolist(), ROOT, 0
        while node in parents:
            node, depth = parents.index(node), depth + 1
        return len(verify(builder, chance)), depth + 1

    for (emitted, depth), weight in outcomes(code):
        assert emitted == depth or weight < EXACT


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("nodes", [1, 3, 8, 30])
def test_the_likeliest_nodes(seed: int, nodes: int) -> None:
    draft = Model(seed, vocab=5)
    builder = LikeliestTree(nodes, 3)
    assert drafted(builder, draft=draft) <= 3
    best = builder.kept()
    every = {
        path: float(np.prod([draft.after(path[:place])[path[place]] for place in range(len(path))]))
        for length in (1, 2, 3)
        for path in itertools.product(range(5), repeat=length)
    }
    assert sorted((builder.values[node] for node in best), reverse=True) == pytest.approx(
        sorted(every.values(), reverse=True)[:nodes]
    )
    paths = [tuple(path_of(builder, node)) for node in best]
    assert len(set(paths)) == nodes
    assert all(path[:-1] in paths[:place] or len(path) == 1 for place, path in enumerate(paths))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("nodes", [1, 2, 5, 12])
@pytest.mark.parametrize("drawn", [False, True])
def test_no_more_is_asked_for_than_has_a_place(drawn: bool, nodes: int, seed: int) -> None:
    asked: list[int] = []
    noise = RandomChance(np.random.default_rng(0))
    builder = SampledTree(nodes, 6, noise, acceptance()) if drawn else LikeliestTree(nodes, 6)
    draft = Model(seed, vocab=12)

    def answer(wanted: Sequence[tuple[int, int]]) -> list[Sparse]:
        asked.append(len(wanted))
        return [sparse(draft.after(path_of(builder, node))) for _, node in wanted]

    assert grow([builder], answer) <= 6
    assert sum(asked[1:]) <= ASKED_PER_NODE * nodes  # the root's distribution takes no place
    assert len(builder.kept()) == nodes


def test_trees_end_where_a_pass_reaches_too_little() -> None:
    """All together: what is too little of one is enough of two. A drawn tree is as large as it was to be."""
    whole = LikeliestTree(6, 6)
    rounds = drafted(whole)
    assert len(whole.reached) == rounds - 1 >= 2
    assert all(above >= below for above, below in itertools.pairwise(whole.reached))
    least = 1.001 * whole.reached[-1]
    cut = LikeliestTree(6, 6)
    assert drafted(cut, least_reach=least) == 1 + sum(reach >= least for reach in whole.reached) < rounds
    assert cut.reached == whole.reached[: len(cut.reached)]
    assert len(cut.kept()) == 6
    twins = LikeliestTree(6, 6), LikeliestTree(6, 6)
    assert drafted(*twins, least_reach=least) == rounds
    # Without its first round there is no tree.
    assert drafted(LikeliestTree(6, 6), least_reach=9.0) == 1
    free, held = (SampledTree(6, 6, RandomChance(np.random.default_rng(0)), acceptance()) for _ in range(2))
    assert drafted(free) == drafted(held, least_reach=9.0) > 1
    assert free.tokens == held.tokens


def test_requests_grow_side_by_side() -> None:
    chances = [RandomChance(np.random.default_rng(seed)) for seed in (1, 2, 1)]
    builders: list[TreeBuilder] = [
        SampledTree(6, 4, chances[0], acceptance()),
        BranchingTree((2, 1), 9, chances[1]),
        LikeliestTree(0, 4),
    ]
    alone = SampledTree(6, 4, chances[2], acceptance())
    rounds = drafted(alone)
    assert drafted(*builders) == max(rounds, 2)
    assert builders[0].tokens == alone.tokens
    assert builders[2].tokens == []


def test_stochastic_beams_are_sequences_drawn_without_replacement() -> None:
    rng, draws = np.random.default_rng(0), 20_000
    counts: dict[tuple[tuple[int, ...], ...], int] = {}
    for _ in range(draws):
        builder = BeamTree(2, 2, 99, rng)
        drafted(builder)
        key = tuple(
            tuple(path_of(builder, node)) for node in range(len(builder.tokens)) if builder.depth(node) == 2
        )
        counts[key] = counts.get(key, 0) + 1
    p = DRAFT.law(2)
    pairs = [
        (first, second)
        for first in itertools.product(range(VOCAB), repeat=2)
        for second in itertools.product(range(VOCAB), repeat=2)
        if first != second
    ]
    expected = np.array([p[first] * p[second] / (1 - p[first]) for first, second in pairs]) * draws
    observed = np.array([counts.get(pair, 0) for pair in pairs])
    assert observed.sum() == draws
    assert expected.min() > 5
    assert chisquare(observed, expected).pvalue > 1e-4


def test_stochastic_beams_have_the_targets_law() -> None:
    rng, draws = np.random.default_rng(1), 30_000
    counts = np.zeros((VOCAB, VOCAB))
    chance = RandomChance(np.random.default_rng(2))
    lengths = 0
    for _ in range(draws):
        builder = BeamTree(2, 2, 99, rng)
        drafted(builder)
        for parent in range(ROOT, len(builder.tokens)):
            psi = [builder.psi[node] for node, above in enumerate(builder.parents) if above == parent]
            assert psi == sorted(psi, reverse=True)
            if psi and parent != ROOT:
                assert psi[0] <= builder.psi[parent] + 1e-9
        emitted = verify(builder, chance)
        lengths += len(emitted)
        if len(emitted) == 1:
            emitted.append(chance.draw(TARGET.after(emitted)))
        counts[tuple(emitted[:2])] += 1
    assert lengths > 2 * draws  # that it means something
    assert chisquare(counts.reshape(-1), TARGET.law(2).reshape(-1) * draws).pvalue > 1e-4


def test_a_beam_of_one_is_a_chain() -> None:
    builder = BeamTree(1, 4, 99, np.random.default_rng(0))
    assert drafted(builder) == 4
    assert builder.parents == [-1, 0, 1, 2]
    builder = BeamTree(3, 4, 5, np.random.default_rng(0))
    drafted(builder)
    assert len(builder.tokens) == 5
    never = Model(0)
    never.rows = np.array([[1.0, 0.0, 0.0]] * VOCAB)  # nothing else can be drawn
    builder = BeamTree(3, 2, 99, np.random.default_rng(0))
    drafted(builder, draft=never)
    assert builder.tokens == [0, 0]
