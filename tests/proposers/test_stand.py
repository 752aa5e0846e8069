# SPDX-License-Identifier: Apache-2.0
"""STAND: what is recorded of a step, and what of it is drafted. See also test_model_free.py, test_ngram_table.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from enumeration import Model, Script, law_of, verify
from scipy.stats import chisquare

from vllm_ext.kernels import ngram_table_numba
from vllm_ext.kernels.chance import RandomChance
from vllm_ext.kernels.sparse import Sparse
from vllm_ext.proposers import stand
from vllm_ext.proposers.base import Request, Sampling, VerifiedRows
from vllm_ext.proposers.stand import Stand, StandOptions
from vllm_ext.proposers.tree import DraftTree
from vllm_ext.samplers import recursive_rejection

VOCAB = 1000
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)


def sampling(seed: int | None, temperature: float = 1.0) -> Sampling:
    return Sampling(temperature, 1.0, 0, 0.0, seed)


def request(
    text: Sequence[int], how: Sampling = GREEDY, name: str = "r", budget: int = 8, depth: int = 99
) -> Request:
    return Request(name, np.array(text, np.int32), 1, budget, depth, how)


def rows(
    path: Sequence[int],
    ids: Sequence[Sequence[int]],
    shares: Sequence[Sequence[float]],
    emitted: Sequence[int],
) -> VerifiedRows:
    """The rows of a root and of the accepted chain below it."""
    return VerifiedRows(
        ["r"],
        np.array([0, len(path)], np.int32),
        np.array(path, np.int32),
        np.arange(-1, len(path) - 1, dtype=np.int32),
        np.ones(len(path), np.bool_),
        np.array(ids, np.int32),
        np.log(np.array(shares, np.float32)),
        [list(emitted)],
    )


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    seen: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        seen.append(((*seen[parent],) if parent >= 0 else ()) + (token,))
    return dict(zip(seen, tree.probabilities.tolist(), strict=True))


def drafter(width: int = 2, **options: object) -> Stand:
    return Stand.from_options(
        StandOptions.model_validate({"memory_mb": 1, "table_width": width, **options}), VOCAB
    )


def teach(one: Stand, text: Sequence[int], ids: Sequence[int], shares: Sequence[float]) -> None:
    """What the target said after a text."""
    one.start(request(text, name="r"))
    one.propose([request(text, budget=0)])
    one.observe(rows(text[-1:], [ids], [shares], [ids[0]]))
    one.finish("r")


def draft(
    one: Stand, text: Sequence[int], how: Sampling = GREEDY, name: str = "q", **kw: int
) -> list[DraftTree]:
    asked = request(text, how, name, **kw)
    one.start(asked)
    trees = one.propose([asked])
    one.finish(name)
    for tree in trees:
        tree.validate()
    return trees


def test_contexts_reach_behind_the_root_of_a_step() -> None:
    one = drafter()
    one.start(request([1, 2, 3, 4]))
    one.propose([request([1, 2, 3, 4], budget=0)])
    # 4 and the accepted 5; the target then said 6.
    one.observe(rows([4, 5], [[5, 50], [6, 60]], [[0.9, 0.1], [0.8, 0.2]], [5, 6]))
    teach(one, [9, 9, 9, 5], [7, 70], [0.9, 0.1])  # of the single 5 a mean; its other contexts are others
    (tree,) = draft(one, [2, 3, 4, 5])
    assert next(iter(paths(tree))) == (6,)
    (tree,) = draft(one, [1, 2, 3, 4])
    assert list(paths(tree))[:2] == [(5,), (5, 6)]
    (tree,) = draft(one, [8, 8, 8, 5])
    assert next(iter(paths(tree))) == (7,)  # 0.45 and 0.4
    teach(one, [9, 9, 4, 5], [8, 80], [0.99, 0.01])  # outweighs 6 where only the last two tokens are the same
    for text, token in (([2, 3, 4, 5], 6), ([9, 3, 4, 5], 6), ([2, 2, 4, 5], 8)):
        assert draft(one, text)[0].tokens[0] == token


def test_rows_of_unknown_requests_and_of_other_roots_teach_their_last_token_only() -> None:
    for known in (False, True):
        one = drafter()
        if known:
            one.start(request([1, 2, 3]))
            one.propose([request([1, 2, 3], budget=0)])
        one.observe(rows([4], [[5, 50]], [[0.9, 0.1]], [5] if known else []))
        assert int((one.table.keys != 0).sum()) == 1
        assert paths(draft(one, [4], depth=1)[0]).keys() == {(5,), (50,)}


def test_the_temperature_sharpens_or_flattens_the_shares() -> None:
    one = drafter(3)
    one.calibration.hits[:] = (
        one.calibration.trials * np.array([0.0025, *stand.SHARES])[:, None]
    )  # a class's chance is its lower bound
    teach(one, [1, 2], [5, 6, 7], [0.6, 0.3, 0.1])
    for temperature in (0.5, 1.0, 2.0):
        shares = np.array([0.6, 0.3, 0.1]) ** (1 / temperature)
        shares /= shares.sum()
        expected = [max([0.0025, *stand.SHARES[share > stand.SHARES]]) for share in shares]
        (tree,) = draft(one, [1, 2], sampling(3, temperature), depth=1)
        assert paths(tree) == pytest.approx(dict(zip([(5,), (6,), (7,)], expected, strict=True)))
    greedy = paths(draft(one, [1, 2], depth=1)[0])
    assert greedy == paths(draft(one, [1, 2], sampling(3, 1.0), depth=1)[0])


def children(one: Stand, how: Sampling, name: str = "q") -> frozenset[int]:
    return frozenset(draft(one, (1, 2), how, name, depth=1, budget=32)[0].tokens.tolist())


def test_children_are_the_most_probable_unless_they_are_drawn() -> None:
    """Drawn are those of requests that sample without a seed, where the adapter lets them."""
    shares = [0.3, 0.2, 0.15, 0.12, 0.1, 0.08, 0.05]
    best = frozenset(range(100, 100 + stand.BRANCHES))
    assert drafter(7)._drawn is None  # the default
    for branches in ("drawn", "probable"):
        one = drafter(7, branches=branches)
        teach(one, [1, 2], list(range(100, 107)), shares)
        for how in (GREEDY, sampling(3), sampling(None)):
            assert {children(one, how, str(i)) for i in range(20)} == {best}
        free = {frozenset(drawn_tree(one).tokens.tolist()) for _ in range(20)}
        assert (free == {best}) == (branches == "probable")
        asked = request([1, 2], sampling(None), "c", depth=1)
        one.start(asked)
        kinds = [
            replace(asked, may_draw=True),
            replace(asked, may_draw=True, chain=True),
            replace(asked, may_draw=True, sampling=sampling(0)),
            replace(asked, may_draw=True, sampling=GREEDY),
        ]
        are = [tree.drawn is not None for kind in kinds for tree in one.propose([kind])]
        assert are == [branches == "drawn", False, False, False]
        one.draws = False  # among a hybrid's
        assert one.propose(kinds[:1])[0].drawn is None


def drawn_tree(one: Stand, budget: int = 32, depth: int = 1, temperature: float = 1.0) -> DraftTree:
    """A request's that samples without a seed; it is verified as it is."""
    asked = request([1, 2], sampling(None, temperature), "d", budget, depth)
    one.start(asked)
    (tree,) = one.propose([replace(asked, may_draw=True)])
    tree.validate()
    return tree


TARGET, DRAFT = Model(3, vocab=4), Model(4, vocab=4)
LENGTH = 2


def knowing(model: Model, **options: object) -> Stand:
    """The model's rows are in the table: of its token 3 nothing is known, and it is not among the successors of 2."""
    one = drafter(3, branches="drawn", max_order=1, **options)
    for token in range(3):
        ids = np.argsort(-model.rows[token])[: 3 if token < 2 else 2]
        teach(one, [token], ids.tolist(), model.rows[token][ids].tolist())
    return one


def walked(tree: DraftTree, chance: RandomChance, fault: str = "") -> list[int]:
    """What a request puts out whose root is 2."""
    assert tree.drawn is not None
    paths: list[tuple[int, ...]] = [(2,)]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*paths[parent + 1], token))

    def draw(row: int, below: list[int]) -> int:
        p = TARGET.after(paths[row])
        if not below:
            return chance.draw(p)
        q, tokens = tree.drawn.q[row - 1], [paths[child][-1] for child in below]  # type: ignore[union-attr]
        if fault == "order":
            tokens.sort()
        if fault == "q":
            q = Sparse(q.ids, np.full(len(q.ids), 1 / len(q.ids)))
        return recursive_rejection.choose(p, tokens, q, chance)

    return verify([2, *tree.tokens.tolist()], [-1, *(tree.parents + 1).tolist()], draw)


def law(one: Stand, draws: int, size: int, fault: str = "", cut: Callable[[DraftTree], int] = len) -> float:
    """The p-value of the first two tokens that many drawn trees lead to."""
    chance = RandomChance(np.random.default_rng(2))
    counts = np.zeros((4, 4))
    accepted = 0
    for _ in range(draws):
        asked = request([2], sampling(None, 0.7), "d", size, 2)
        one.start(asked)
        (tree,) = one.propose([replace(asked, may_draw=True)])
        tree = tree.prefix(cut(tree))
        emitted = walked(tree, chance, fault)
        accepted += len(emitted) - 1
        if len(emitted) == 1:
            emitted.append(chance.draw(TARGET.after(emitted)))
        counts[tuple(emitted[:2])] += 1
    assert accepted > draws / 4  # that it means something
    expected = TARGET.rows[2][:, None] * TARGET.rows
    return float(chisquare(counts.ravel(), expected.ravel() * draws).pvalue)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_drawn_trees_leave_the_target_its_law(size: int) -> None:
    assert law(knowing(DRAFT), 20_000, size) > 1e-4


def test_what_is_drawn_otherwise_does_not() -> None:
    """Siblings in another order, another q than they were drawn from, and a tree that is cut by what it holds."""

    def by_token(tree: DraftTree) -> int:
        """All, or none where the first is improbable."""
        q = tree.drawn.q[-1] if tree.drawn else None
        assert q is not None
        return len(tree) * bool(q.q[q.ids == tree.tokens[0]] > 0.4)

    for fault in ("order", "q"):
        assert law(knowing(DRAFT), 20_000, 5, fault) < 1e-6, fault
    assert law(knowing(DRAFT), 20_000, 5, cut=by_token) < 1e-6
    assert law(knowing(DRAFT), 20_000, 5, cut=lambda tree: 3) > 1e-4  # however it turned out


def test_any_table_leaves_the_target_its_law_exactly() -> None:
    """Every decision of the verifier, given the tree; trees by the law that they are drawn by."""
    one = knowing(DRAFT)
    tree = drawn_tree_of_root(one)
    assert tree.drawn is not None
    q = tree.drawn.q[-1]
    assert len(q.ids) == 2  # sparse: of four tokens
    assert tree.parents[:2].tolist() == [-1, -1]

    def code(chance: Script) -> list[int]:
        left, tokens = q.q.copy(), []
        while left.any():
            place = chance.draw(left)
            left[place] = 0.0
            tokens.append(int(q.ids[place]))

        def draw(row: int, below: list[int]) -> int:
            if row:
                return chance.draw(TARGET.after([tokens[row - 1]]))
            return recursive_rejection.choose(TARGET.rows[0], tokens, q, chance)

        return verify([0, *tokens], [-1, *[0] * len(tokens)], draw)

    assert law_of(code, TARGET, LENGTH) == pytest.approx(TARGET.law(LENGTH), abs=1e-13)


def drawn_tree_of_root(one: Stand) -> DraftTree:
    asked = request([2], sampling(None), "d", 8, 1)
    one.start(asked)
    return one.propose([replace(asked, may_draw=True)])[0]


def test_the_table_may_change_before_a_tree_is_verified() -> None:
    one = knowing(DRAFT)
    tree = drawn_tree_of_root(one)
    assert tree.drawn is not None
    before = {node: Sparse(row.ids.copy(), row.q.copy()) for node, row in tree.drawn.q.items()}
    tokens = tree.tokens.tolist()
    one.table.weights[:] = 0.25
    one.table.successors[:] = 3
    for token in range(3):
        teach(one, [token], [3, 2, 1], [0.8, 0.1, 0.1])
    assert tree.tokens.tolist() == tokens
    for node, row in tree.drawn.q.items():
        assert row.ids.tolist() == before[node].ids.tolist()
        assert row.q.tolist() == before[node].q.tolist()
        assert row.q.sum() == pytest.approx(1.0)
    assert drawn_tree_of_root(one).drawn.q[-1].ids.tolist() != before[-1].ids.tolist()  # type: ignore[union-attr]


def test_drawn_nodes_that_were_not_verified_are_not_judged() -> None:
    one = drafter(2, branches="drawn")
    teach(one, [1, 2], [5, 6], [0.58, 0.42])
    assert one._drawn is not None
    before = one._drawn.calibration.trials.copy()
    first = drawn_tree(one, budget=2).tokens[0]
    one.observe(replace(rows([2, int(first)], [[5, 6]] * 2, [[0.6, 0.4]] * 2, [9]), request_ids=["d"]))
    judged = one._drawn.calibration.trials != before
    assert judged.sum() == 1  # of two
    assert one._drawn.calibration.hits[judged] < one._drawn.calibration.trials[judged]


def test_what_became_of_drawn_trees_is_kept() -> None:
    one, other = (drafter(2, branches="drawn") for _ in range(2))
    for _ in range(9):
        first = drawn_tree(one, budget=1).tokens
        teach(one, [1, 2], [5, 6], [0.6, 0.4])
        one.observe(
            replace(
                rows([2, *first.tolist()], [[5, 6]] * 2, [[0.6, 0.4]] * 2, [*first, 9])
                if len(first)
                else rows([2], [[5, 6]], [[0.6, 0.4]], [5]),
                request_ids=["d"],
            )
        )
    arrays = one.state_dict()
    other.load_state_dict(arrays)
    assert one._drawn is not None
    assert other._drawn is not None
    assert (one._drawn.calibration.trials > 8).any()
    for name in ("hits", "trials"):
        assert np.array_equal(
            getattr(one._drawn.calibration, name), getattr(other._drawn.calibration, name)
        ), name
    with pytest.raises(ValueError, match="drawn_hits"):
        drafter(2).load_state_dict(arrays)
    with pytest.raises(ValueError, match="trials"):
        other.load_state_dict(arrays | {"drawn_trials": -arrays["drawn_trials"]})


def test_a_warm_drafter_compiles_nothing_more() -> None:
    one = drafter(2, branches="drawn")
    one.warm_up()
    teach(one, [1, 2], [5, 6], [0.6, 0.4])
    kernel = ngram_table_numba.compiled("draw_tree")
    for how in (Sampling(1, 1, 0, 0, None), Sampling(0.5, 0.9, 40, 0.1, None)):
        asked = replace(request([1, 2], how, "d"), may_draw=True)
        one.start(asked)
        assert len(one.propose([asked])[0])
        one.finish("d")
    assert len(kernel.signatures) == 1


def test_estimates_converge_to_the_true_frequencies_apart_for_greedy_requests() -> None:
    """The target says 5 in 60 % of the steps of requests that sample, and always when greedy."""
    one = drafter(2, branches="probable")
    rng = np.random.default_rng(0)
    asks = {
        "sampled": request([1, 2], sampling(1), "sampled", depth=1),
        "greedy": request([1, 2], name="greedy", depth=1),
    }
    teach(one, [1, 2], [5, 6], [0.58, 0.42])
    for ask in asks.values():
        one.start(ask)
    for _ in range(1500):
        one.propose(list(asks.values()))
        none = np.zeros(0, np.int32)
        one.observe(
            VerifiedRows(
                list(asks),
                np.zeros(3, np.int32),
                none,
                none,
                none > 0,
                np.zeros((0, 2), np.int32),
                np.zeros((0, 2), np.float32),
                [[int(rng.choice([5, 6], p=[0.6, 0.4]))], [5]],
            )
        )
    sampled, greedy = (paths(tree) for tree in one.propose(list(asks.values())))
    # A fading mean of n trials has the variance p (1 - p) (1 - fade) / (1 + fade): 4 sigma.
    assert sampled[5,] == pytest.approx(0.6, abs=4 * (0.24 * 0.005 / 1.995) ** 0.5)
    assert sampled[6,] == pytest.approx(0.4, abs=4 * (0.24 * 0.005 / 1.995) ** 0.5)
    assert greedy[5,] > 0.99
    assert greedy.get((6,), 0.0) < 0.01


@pytest.mark.parametrize("megabytes", [1, 3, 64])
def test_memory_is_bounded_and_told(megabytes: int) -> None:
    one = Stand(VOCAB, megabytes)
    table = sum(part.nbytes for part in one.table)
    assert megabytes * 10**6 / 2 < table <= megabytes * 10**6
    assert table < one.memory_bytes < table + 20_000
    assert one.verified_top_k == 8


def test_a_full_table_goes_on_learning() -> None:
    one = drafter()
    before = one.memory_bytes
    rng = np.random.default_rng(0)
    slots = len(one.table.keys)
    for _ in range(3 * slots // 4000):
        tokens = rng.integers(0, VOCAB, 1000)
        ids = np.stack([tokens, (tokens + 1) % VOCAB], 1)
        one.observe(rows(tokens.tolist(), ids.tolist(), np.full((1000, 2), 0.5).tolist(), []))
    assert (one.table.keys != 0).sum() > 0.9 * slots
    assert one.memory_bytes == before
    teach(one, [1, 2, 3, 4], [5, 6], [0.9, 0.1])
    assert next(iter(paths(draft(one, [1, 2, 3, 4])[0]))) == (5,)


def test_options_reach_the_proposer() -> None:
    one = drafter(3, max_order=2)
    assert one.verified_top_k == one.table.successors.shape[1] == 3
    assert one.calibration.estimates.shape[1] == 2
    teach(one, [1, 2, 3], [5, 6, 7], [0.9, 0.05, 0.05])
    assert int((one.table.keys != 0).sum()) == 2
    for name, value in (("memory_mb", 0), ("max_order", 5), ("table_width", 0), ("branches", "all")):
        with pytest.raises(ValueError, match=name):
            StandOptions.model_validate({name: value})
