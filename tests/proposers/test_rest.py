# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import VOCAB, Texts, store_of

from vllm_ext.config import speculative
from vllm_ext.kernels import suffix_array_ref as ref
from vllm_ext.kernels.suffix_array import find
from vllm_ext.proposers import calibration
from vllm_ext.proposers.base import Request, Sampling, VerifiedRows
from vllm_ext.proposers.rest import EVIDENCE, LENGTHS, SHARES, Rest, RestOptions
from vllm_ext.proposers.tree import DraftTree

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)


def request(
    tokens: Sequence[int], budget: int = 8, depth: int = 99, name: str = "r", chain: bool = False
) -> Request:
    return Request(name, np.array(tokens, np.int32), len(tokens), budget, depth, GREEDY, chain)


def propose(proposer: Rest, *requests: Request) -> list[DraftTree]:
    """The trees, checked."""
    trees = proposer.propose(requests)
    for tree, one in zip(trees, requests, strict=True):
        tree.validate()
        assert len(tree) <= max(one.budget_tokens, 0)
        assert tree.depths().max(initial=0) <= max(one.max_depth, 0)
        assert not one.chain or tree.is_chain
    return trees


def draft(proposer: Rest, tokens: Sequence[int], budget: int = 8, depth: int = 99) -> DraftTree:
    return propose(proposer, request(tokens, budget, depth))[0]


def emit(proposer: Rest, *emitted: list[int], names: Sequence[str] = ("r",)) -> None:
    """One step's verification; only what was put out matters to this proposer."""
    none = np.zeros(0, np.int32)
    starts = np.zeros(len(names) + 1, np.int32)
    proposer.observe(
        VerifiedRows(
            names, starts, none, none, none > 0, none.reshape(0, 0), np.zeros((0, 0), np.float32), emitted
        )
    )


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append(((*found[parent],) if parent >= 0 else ()) + (token,))
    return dict(zip(found, tree.probabilities.tolist(), strict=True))


def test_what_followed_is_drafted() -> None:
    proposer = Rest(store_of([[1, 2, 3, 4, 5, 6]]))
    assert draft(proposer, [9, 2, 3]).tokens.tolist() == [4, 5, 6]
    assert len(draft(proposer, [9, 3])) == 0  # one token is less than min_match
    assert draft(Rest(store_of([[1, 2, 3]]), min_match=1), [9, 2]).tokens.tolist() == [3]


def test_the_longest_match_alone_counts() -> None:
    """The pair 2 3 is followed by 7 three times; with the 1 before it, once by 4."""
    texts = [[1, 2, 3, 4], [5, 2, 3, 7], [6, 2, 3, 7], [2, 3, 7]]
    for parts in ([texts], [texts[:1], texts[1:]], [texts[1:], texts[:1]]):
        proposer = Rest(store_of(*parts))
        assert draft(proposer, [9, 1, 2, 3]).tokens.tolist() == [4]
        assert set(draft(proposer, [9, 2, 3]).tokens.tolist()) == {4, 7}
        assert set(draft(Rest(store_of(*parts), max_match=2), [1, 2, 3]).tokens.tolist()) == {4, 7}


def test_nothing_crosses_documents() -> None:
    proposer = Rest(store_of([[1, 2, 3], [4, 5, 6, 3]]))
    assert draft(proposer, [1, 2]).tokens.tolist() == [3]
    assert len(draft(proposer, [2, 3])) == 0  # the document's end: nothing followed
    assert len(draft(proposer, [3, 4])) == 0  # no match across documents either
    assert len(draft(proposer, [5, 6, 3])) == 0


def test_ids_that_are_no_tokens_match_nothing() -> None:
    proposer = Rest(store_of([[1, 2, 3], [1, 2, 4]]))
    for root in (-1, VOCAB, VOCAB + 1, 2**31 - 1):
        assert len(draft(proposer, [1, root])) == 0
        assert len(draft(proposer, [root, 2])) == 0
        assert set(draft(proposer, [root, 1, 2]).tokens.tolist()) == {3, 4}


@pytest.mark.parametrize(("budget", "depth"), [(0, 5), (5, 0), (-1, 5), (5, -1)])
def test_no_budget_or_no_depth_is_an_empty_tree(budget: int, depth: int) -> None:
    proposer = Rest(store_of([[1, 2, 3]]))
    one, two = request([1, 2], budget, depth), request([1, 2], name="two")
    assert [len(tree) for tree in propose(proposer, one, two)] == [0, 1]


def test_empty_batch_and_unknown_context() -> None:
    proposer = Rest(store_of([[1, 2, 3]]))
    assert proposer.propose([]) == []
    emit(proposer, names=())
    assert [len(draft(proposer, tokens)) for tokens in ([7, 8], [7], [2, 1])] == [0, 0, 0]


def test_continuations_and_occurrences_are_bounded() -> None:
    store = store_of([[1, 2, *range(3, 15)], [1, 2, 16]])
    assert draft(Rest(store, max_continuation=4), [1, 2], 99).depths().max() == 4
    assert draft(Rest(store, max_occurrences=1), [1, 2], 99).is_chain
    assert len(draft(Rest(store), [1, 2], 99)) == 13


def test_occurrences_are_sampled_evenly_over_the_text_before() -> None:
    """1000 occurrences, of which every second is followed by 2: not by the smaller id first, nor by chance."""
    rng = np.random.default_rng(0)
    texts = [[int(rng.integers(4, 20)), int(rng.integers(4, 20)), 0, 1, 2 + i % 2] for i in range(1000)]
    store = store_of(texts)
    proposer = Rest(store, max_occurrences=100)
    (longest, first, last) = find(
        store.segments[0].tokens, store.segments[0].suffixes, VOCAB, np.array([0, 1], np.int32)
    )
    assert (longest, last - first) == (2, 1000)
    rows = proposer._continuations([(longest, first, last)], 2, 1)
    assert rows.shape == (100, 1)
    # Systematic sampling of a fair coin: no worse than independent draws, 4 sigma.
    assert abs(int((rows == 2).sum()) - 50) <= 4 * (100 * 0.25) ** 0.5
    assert (proposer._continuations([(longest, first, last)], 2, 1) == rows).all()
    # Each stretch of ten neighbours gives one.
    places = store.segments[0].suffixes[first:last].reshape(100, 10)
    followers = store.segments[0].tokens[places + 1]
    assert ((followers == rows).any(axis=1)).all()


SMALL = 3
texts = st.lists(st.lists(st.integers(0, SMALL - 1), min_size=1, max_size=15), min_size=1, max_size=6)
contexts = st.lists(st.integers(0, SMALL - 1), min_size=1, max_size=8)


@given(
    texts,
    contexts,
    st.integers(0, 12),
    st.integers(0, 6),
    st.booleans(),
    st.integers(0, 99),
    st.integers(1, 4),
)
@settings(deadline=None, max_examples=150)
def test_trees_equal_the_reference_in_any_number_of_segments(
    corpus: Texts, context: list[int], budget: int, depth: int, chain: bool, seed: int, num_parts: int
) -> None:
    """Matches and weights by looking at every position of every document."""
    parts = [part for part in (corpus[i::num_parts] for i in range(num_parts)) if part]
    proposer = Rest(store_of(*parts, vocab=SMALL), max_match=4, min_match=1, max_continuation=3)
    rng = np.random.default_rng(seed)
    proposer.calibration.trials[:] = 1.0
    proposer.calibration.hits[:] = rng.choice([0.0, 0.25, 0.5, 0.7, 1.0], proposer.calibration.hits.shape)
    tree = propose(proposer, request(context, budget, depth, chain=chain))[0]

    found = [ref.find_ref([SMALL, *text, SMALL], SMALL, context[-4:]) for text in corpus]
    length = max(longest for longest, _ in found)
    rows = [
        ref.continuation_ref([SMALL, *text, SMALL], SMALL, at, min(3, max(depth, 0)))
        for text, (longest, places) in zip(corpus, found, strict=True)
        for at in places
        if longest == length
    ]
    level = sum(length > bound for bound in LENGTHS)
    expected = ref.grow_tree_ref(
        rows, level, proposer.calibration.estimates, SHARES, EVIDENCE.tolist(), budget, depth, chain
    )
    drafted = list(zip(tree.tokens.tolist(), tree.parents.tolist(), tree.probabilities.tolist(), strict=True))
    assert drafted == ([node[:3] for node in expected] if length else [])


@given(texts, st.lists(contexts, min_size=1, max_size=4))
@settings(deadline=None)
def test_drafts_depend_neither_on_the_batch_nor_on_the_process(corpus: Texts, prompts: Texts) -> None:
    def run(order: list[int]) -> dict[int, dict[tuple[int, ...], float]]:
        proposer = Rest(store_of(corpus, vocab=SMALL), min_match=1)
        trees = propose(proposer, *(request(prompts[i], i + 1, name=str(i)) for i in order))
        return {i: paths(tree) for i, tree in zip(order, trees, strict=True)}

    order = list(range(len(prompts)))
    first = run(order)
    assert run(order) == first
    assert run(order[::-1]) == first


def test_smaller_trees_are_prefixes_of_larger_ones() -> None:
    rng = np.random.default_rng(2)
    proposer = Rest(store_of([[1, 2, *rng.integers(0, 4, 8).tolist()] for _ in range(40)]))
    largest = draft(proposer, [1, 2], 60)
    assert len(largest) == 60
    for size in range(60):
        smaller, cut = draft(proposer, [1, 2], size), largest.prefix(size)
        assert smaller.tokens.tolist() == cut.tokens.tolist()
        assert smaller.parents.tolist() == cut.parents.tolist()


def test_a_request_that_can_only_have_a_chain_gets_a_whole_one() -> None:
    rng = np.random.default_rng(2)
    proposer = Rest(store_of([[1, 2, *rng.integers(0, 4, 8).tolist()] for _ in range(40)]))
    tree = request([1, 2], 6)
    drafts = propose(proposer, tree, dataclasses.replace(tree, request_id="chain", chain=True))
    assert [one.is_chain for one in drafts] == [False, True]
    assert len(drafts[1]) == 6


def test_what_is_sure_by_the_corpus_is_taken_first() -> None:
    """Before anything is learnt: the common follower before the rare one, the long match before the short."""
    proposer = Rest(store_of([[1, 2, 3]] * 9 + [[1, 2, 4]]))
    common, rare = draft(proposer, [1, 2]).probabilities.tolist()
    assert common > 2 * rare
    assert draft(proposer, [1, 2]).tokens.tolist() == [3, 4]
    long = Rest(store_of([[*range(1, 15), 3]] * 9))
    assert draft(long, list(range(1, 15))).probabilities[0] > draft(long, [13, 14]).probabilities[0]


def test_estimates_converge_to_the_true_frequencies() -> None:
    """Two followers with shares of 0.9 and 0.1, right in 30 % and 60 % of all cases."""
    proposer = Rest(store_of([[1, 2, 3]] * 9 + [[1, 2, 4]]))
    rng = np.random.default_rng(1)
    for _ in range(1500):
        propose(proposer, request([1, 2]))
        emit(proposer, [int(rng.choice([3, 4, 5], p=[0.3, 0.6, 0.1]))])
    # A fading mean of n trials has the variance p (1 - p) (1 - fade) / (1 + fade): 4 sigma.
    tree = draft(proposer, [1, 2])
    assert tree.tokens.tolist() == [4, 3]
    for frequency, estimate in zip((0.6, 0.3), tree.probabilities.tolist(), strict=True):
        sigma = (frequency * (1 - frequency) * (1 - calibration.FADE) / (1 + calibration.FADE)) ** 0.5
        assert estimate == pytest.approx(frequency, abs=4 * sigma)


def test_each_tree_is_judged_once_and_finished_requests_are_forgotten() -> None:
    proposer = Rest(store_of([[1, 2, 3]]))
    before = proposer.calibration.trials.sum()
    draft(proposer, [1, 2])
    emit(proposer, [])  # a prompt that is not complete
    assert proposer.calibration.trials.sum() == before
    emit(proposer, [3])
    once = proposer.calibration.trials.sum()
    assert once == pytest.approx(before + 1, abs=0.1)
    emit(proposer, [3])
    draft(proposer, [1, 2])
    proposer.finish("r")
    proposer.finish("never seen")
    emit(proposer, [3])
    draft(proposer, [1, 2])
    draft(proposer, [7, 8])  # no match: the tree before is not judged by what follows this
    emit(proposer, [3])
    assert proposer.calibration.trials.sum() == once


def test_warm_up_leaves_no_trace() -> None:
    proposer = Rest(store_of([[1, 2, 3]]))
    trials, hits = proposer.calibration.trials.copy(), proposer.calibration.hits.copy()
    proposer.warm_up()
    assert (proposer.calibration.trials == trials).all()
    assert (proposer.calibration.hits == hits).all()
    assert proposer.calibration._drafted == {}
    assert proposer.memory_bytes == trials.nbytes + hits.nbytes
    assert proposer.verified_top_k == 0
    assert len(proposer.calibration.estimates) <= 256  # groups are bytes


def test_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"datastore is missing, and required: folder of the store"):
        speculative.parse({"method": "rest"})
    with pytest.raises(ValueError, match=r"max_match=65 is not allowed; allowed: integer, 1 to 64"):
        speculative.parse({"method": "rest", "datastore": "x", "max_match": 65})
    for lengths in ({"min_match": 5, "max_match": 4}, {"max_match": 1}):
        most = lengths["max_match"]
        with pytest.raises(ValueError, match=rf"min_match={most + 1}: it must be at most max_match={most}"):
            speculative.parse({"method": "rest", "datastore": "x", **lengths})
    assert RestOptions.model_validate({"datastore": "x", "min_match": 16}).min_match == 16
    rows = {row[0]: row[1] for row in speculative.option_rows(RestOptions)}
    assert rows["datastore"] == "required"
    assert rows["max_match"] == "16"
    missing = speculative.parse({"method": "rest", "datastore": str(tmp_path)})
    with pytest.raises(ValueError, match=r"there is no store.*vllm-ext datastore build"):
        missing.proposer_class.from_options(missing.options, VOCAB)
