# SPDX-License-Identifier: Apache-2.0
"""ADED: the correction of tri-grams and the best-first tree. See also test_model_free.py, test_ngram_table.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import store_of

from vllm_ext.kernels.best_first_tree_numba import mix
from vllm_ext.proposers import aded, calibration
from vllm_ext.proposers.aded import Aded, AdedOptions
from vllm_ext.proposers.base import Request, Sampling, VerifiedRows
from vllm_ext.proposers.tree import DraftTree

VOCAB = 100
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)


def request(text: Sequence[int], name: str = "r", budget: int = 8, depth: int = 99) -> Request:
    return Request(name, np.array(text, np.int32), len(text), budget, depth, GREEDY)


def weights(one: Aded, first: int, second: int) -> dict[int, float]:
    """What the table has for a pair, by successor."""
    slots = np.flatnonzero(one.table.keys == mix(mix(0, second), first))
    if not slots.size:
        return {}
    row = one.table.successors[slots[0]]
    kept = row >= 0
    return dict(zip(row[kept].tolist(), one.table.weights[slots[0]][kept].tolist(), strict=True))


def learn(one: Aded, *texts: Sequence[int]) -> None:
    for text in texts:
        one.start(request(text, "past"))
        one.finish("past")


def draft(one: Aded, text: Sequence[int], **kw: int) -> DraftTree:
    asked = request(text, "q", **kw)
    one.start(asked)
    (tree,) = one.propose([asked])
    one.finish("q")
    tree.validate()
    return tree


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    seen: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        seen.append(((*seen[parent],) if parent >= 0 else ()) + (token,))
    return dict(zip(seen, tree.probabilities.tolist(), strict=True))


def test_each_occurrence_adds_its_step_up_to_the_cap() -> None:
    one = Aded(VOCAB, 1)
    for count in range(1, 100):
        learn(one, [1, 2, 3])
        assert weights(one, 1, 2) == {3: pytest.approx(min(0.04 * count, 3.0), rel=1e-5)}
    learn(one, [1, 2, 4])
    assert weights(one, 1, 2) == {3: 3.0, 4: pytest.approx(0.04)}


def test_each_position_is_recorded_once_also_after_a_preemption() -> None:
    text = [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2, 3]
    one, whole = Aded(VOCAB, 1), Aded(VOCAB, 1)
    one.start(request(text[:2]))
    for stop in (2, 3, 4, 4, 7, 7, 12, 12):  # the same length twice: preempted, computed again
        one.propose([request(text[:stop])])
    learn(whole, text)
    assert weights(one, 1, 2) == weights(whole, 1, 2) == {3: pytest.approx(0.12), 4: pytest.approx(0.04)}
    for pair in ((2, 3), (3, 1), (2, 4), (4, 1)):
        assert weights(one, *pair) == weights(whole, *pair) != {}


def test_the_lightest_of_too_many_successors_makes_room() -> None:
    one = Aded(VOCAB, 1)
    for successor in range(aded.WIDTH):
        learn(one, *[[1, 2, 10 + successor]] * (2 + successor % 2))
    learn(one, [1, 2, 99])
    kept = weights(one, 1, 2)
    assert len(kept) == aded.WIDTH
    assert kept[99] == pytest.approx(0.04)
    assert {10 + i for i in range(1, aded.WIDTH, 2)} < set(kept)  # those seen three times


def test_unknown_pairs_draft_nothing() -> None:
    one = Aded(VOCAB, 1)
    assert len(draft(one, [1, 2])) == 0
    assert len(draft(one, [1])) == 0
    learn(one, [1, 2, 3])
    assert len(draft(one, [9, 2])) == 0
    assert draft(one, [1, 2]).tokens.tolist() == [3]
    assert draft(one, [7, 7, 1, 2]).tokens.tolist() == [3]


def test_what_one_request_taught_another_drafts_at_once() -> None:
    one = Aded(VOCAB, 1)
    reader, writer = request([5, 6], "reader"), request([5, 6, 7], "writer")
    one.start(reader)
    one.start(writer)
    # Whoever stands first: the whole step is recorded before anything is drafted.
    longer = request([5, 6, 7, 5, 6, 8], "writer")
    trees = one.propose([reader, longer])
    assert paths(trees[0]).keys() >= {(7,), (8,)}


@given(
    st.lists(st.integers(0, 3), min_size=3, max_size=60),
    st.integers(0, 999),
    st.integers(0, 20),
    st.integers(0, 6),
)
@settings(deadline=None)
def test_trees_are_the_most_probable_paths_of_all(
    text: list[int], seed: int, budget: int, depth: int
) -> None:
    """Brute force: all paths, each the product of its pairs' estimates, sorted."""
    one = Aded(VOCAB, 1)
    one.calibration.hits[:] = one.calibration.trials * np.random.default_rng(seed).random(
        one.calibration.hits.shape
    )
    learn(one, text)
    tree = draft(one, text[-2:], budget=budget, depth=depth)
    estimates = one.calibration.estimates
    every: dict[tuple[int, ...], float] = {}

    def visit(path: tuple[int, ...], chance: float) -> None:
        if len(path) == depth:
            return
        found = weights(one, *(*text[-2:], *path)[-2:])
        total = np.float32(sum(found.values()))
        for token, weight in found.items():
            share = sum(bool(np.float32(weight) / total > bound) for bound in aded.SHARES)
            every[(*path, token)] = chance * float(
                estimates[share, min(len(path), calibration.NUM_DEPTHS - 1)]
            )
            visit((*path, token), every[(*path, token)])

    visit((), 1.0)
    best = sorted(every.values(), reverse=True)[:budget]
    assert tree.probabilities.tolist() == pytest.approx(best, rel=1e-4)
    for path, chance in paths(tree).items():
        assert chance == pytest.approx(every[path], rel=1e-4)


@given(st.lists(st.integers(0, 3), min_size=3, max_size=60), st.integers(0, 12), st.floats(0.01, 1.0))
@settings(deadline=None)
def test_exploration_keeps_trees_valid_and_their_chances(text: list[int], budget: int, factor: float) -> None:
    plain, exploring = Aded(VOCAB, 1), Aded(VOCAB, 1, factor)
    drafts = []
    for one in (plain, exploring):
        learn(one, text)
        drafts.append(paths(draft(one, text, budget=budget, depth=5)))
    # By one that has read the text as often as they had.
    plain = Aded(VOCAB, 1)
    learn(plain, text)
    everything = paths(draft(plain, text, budget=400, depth=5))
    assert len(drafts[0]) == len(drafts[1])
    assert sum(drafts[1].values()) <= sum(drafts[0].values()) + 1e-6
    if len(everything) < 400:
        for path, chance in drafts[1].items():
            assert chance == pytest.approx(everything[path], rel=1e-4)


def test_estimates_converge_to_the_true_frequencies() -> None:
    """After "1 2" came 3 three times and 4 once; the target says 3 in 55 % and 4 in 30 % of all cases."""
    none = np.zeros(0, np.int32)
    ids, logits = none.reshape(0, 0), np.zeros((0, 0), np.float32)
    one = Aded(VOCAB, 1)
    rng = np.random.default_rng(1)
    learn(one, [1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 4])
    asked = request([1, 2], depth=1)
    one.start(asked)
    for _ in range(1500):
        one.propose([asked])
        emitted = [int(rng.choice([3, 4, 5], p=[0.55, 0.3, 0.15]))]
        one.observe(VerifiedRows(["r"], np.zeros(2, np.int32), none, none, none > 0, ids, logits, [emitted]))
    drafted = paths(one.propose([asked])[0])
    # A fading mean of n trials has the variance p (1 - p) (1 - fade) / (1 + fade): 4 sigma.
    for token, frequency in ((3, 0.55), (4, 0.3)):
        sigma = (frequency * (1 - frequency) * (1 - calibration.FADE) / (1 + calibration.FADE)) ** 0.5
        assert drafted[token,] == pytest.approx(frequency, abs=4 * sigma)


@pytest.mark.parametrize("megabytes", [1, 3, 64])
def test_memory_is_bounded_told_and_does_not_grow(megabytes: int) -> None:
    one = Aded(VOCAB, megabytes)
    table = sum(part.nbytes for part in one.table)
    assert megabytes * 10**6 / 2 < table <= megabytes * 10**6
    before = one.memory_bytes
    assert table < before < table + 20_000
    learn(one, np.random.default_rng(0).integers(0, VOCAB, 30_000).tolist(), [1, 2, 3])
    assert one.memory_bytes == before
    assert 3 in weights(one, 1, 2)
    assert one.verified_top_k == 0


def test_options_reach_the_proposer() -> None:
    one = Aded.from_options(AdedOptions.model_validate({"memory_mb": 2, "exploration": 0.5}), VOCAB)
    assert one._growing.exploration == 0.5
    assert len(one.table.keys) == 1 << 14
    for name, value in (("memory_mb", 0), ("exploration", -0.1), ("exploration", 2.0)):
        with pytest.raises(ValueError, match=name):
            AdedOptions.model_validate({name: value})


def test_a_corpus_is_what_the_table_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two segments and small pieces; no triple crosses the end of a document."""
    monkeypatch.setattr(aded, "CHUNK", 3)
    store = store_of([[1, 2, 3], [1, 2, 3], [1, 2, 4]], [[1, 2, 3, 5], [1, 2], [6, 7]], vocab=VOCAB - 1)
    one = Aded(VOCAB, 1)
    one.read(store)
    assert weights(one, 1, 2) == {3: pytest.approx(0.04 * 3 / 4), 4: pytest.approx(0.04 / 4)}
    assert weights(one, 2, 3) == {5: pytest.approx(0.04)}
    separator = VOCAB - 1  # an id of the model's
    for pair in ((2, separator), (separator, 6), (2, 6), (6, 7)):
        assert weights(one, *pair) == {}
    # What a text says once weighs as all of it.
    learn(one, [1, 2, 4])
    assert list(weights(one, 1, 2)) == [4, 3]
    assert weights(one, 1, 2)[4] == pytest.approx(0.04 + 0.01)
    assert paths(draft(one, [1, 2])).keys() >= {(4,), (3,), (3, 5)}


def test_what_was_saved_takes_the_corpus_place() -> None:
    store = store_of([[1, 2, 3]])
    before, after = Aded(VOCAB, 1), Aded(VOCAB, 1)
    for each in (before, after):
        each.read(store)
    learn(before, [1, 2, 3], [7, 8, 9])
    after.load_state_dict(before.state_dict())
    for pair in ((1, 2), (7, 8)):
        assert weights(after, *pair) == weights(before, *pair) != {}
    assert Aded.from_options(AdedOptions(), VOCAB).table.clock[0] == 0
