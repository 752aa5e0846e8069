# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.kernels import suffix_index_ref as ref
from vllm_ext.kernels.grown_tree import GrownTree
from vllm_ext.kernels.suffix_index import (
    OCCURRENCES,
    SEPARATOR,
    Estimates,
    SuffixIndex,
    append,
    find,
    grow_tree,
)
from vllm_ext.proposers import calibration
from vllm_ext.proposers import suffix_tree as suffix
from vllm_ext.proposers.base import Request, Sampling, VerifiedRows
from vllm_ext.proposers.suffix_tree import SuffixDecoding, SuffixOptions
from vllm_ext.proposers.tree import DraftTree

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)
VOCAB = 100


def index_of(tokens: Sequence[int], capacity: int = 64, first: int = 0) -> SuffixIndex:
    index = SuffixIndex.empty(capacity)
    append(index, np.array(tokens, np.int32), first, VOCAB)
    return index


def found(index: SuffixIndex, text: SuffixIndex, least: int = 1, most: int = 32) -> list[tuple[int, int]]:
    return list(zip(*(part.tolist() for part in find(index, text, least, most)), strict=True))


def proposer(vocab: int = VOCAB, least: int = 1, most: int = 32) -> SuffixDecoding:
    return SuffixDecoding(vocab, 1, least, most)


def request(
    tokens: Sequence[int], budget: int = 8, prompt: int | None = None, name: str = "r", depth: int = 99
) -> Request:
    num_prompt_tokens = len(tokens) if prompt is None else prompt
    return Request(name, np.array(tokens, np.int32), num_prompt_tokens, budget, depth, GREEDY)


def propose(drafter: SuffixDecoding, *requests: Request) -> list[DraftTree]:
    """The trees, checked."""
    trees = drafter.propose(requests)
    for tree, one in zip(trees, requests, strict=True):
        tree.validate()
        assert len(tree) <= max(one.budget_tokens, 0)
        assert tree.depths().max(initial=0) <= max(one.max_depth, 0)
    return trees


def draft(drafter: SuffixDecoding, one: Request) -> DraftTree:
    """The tree of a request that goes on."""
    drafter.start(one)
    return propose(drafter, one)[0]


def answer(drafter: SuffixDecoding, prompt: Sequence[int], output: Sequence[int], name: str = "past") -> None:
    """A request that comes, puts out some tokens, and goes."""
    draft(drafter, request([*prompt, *output], 0, len(prompt), name))
    drafter.finish(name)
    drafter.propose([])


def emit(drafter: SuffixDecoding, emitted: list[int], name: str = "r") -> None:
    none = np.zeros(0, np.int32)
    nothing = np.zeros((0, 0), np.int32)
    rows = VerifiedRows(
        [name], np.zeros(2, np.int32), none, none, none > 0, nothing, nothing.astype(np.float32), [emitted]
    )
    drafter.observe(rows)


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    seen: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        seen.append(((*seen[parent],) if parent >= 0 else ()) + (token,))
    return dict(zip(seen, tree.probabilities.tolist(), strict=True))


def same(one: SuffixIndex, two: SuffixIndex) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(two, name)) for name in SuffixIndex._fields)


def lists(lowest: int, least: int, most: int) -> st.SearchStrategy[list[int]]:
    """Of three token ids and of all lengths alike: by itself Hypothesis makes few lists longer than ten."""
    element = st.integers(lowest, 2)
    return st.integers(least, most).flatmap(lambda size: st.lists(element, min_size=size, max_size=size))


# The index. Negative ids are separators; 64 columns for 60 tokens: every chain holds others' contexts too.
logs = lists(-1, 0, 60)
texts = lists(0, 1, 40)


@given(logs, texts, st.integers(1, 9), st.integers(1, 20))
@settings(deadline=None)
def test_occurrences_equal_a_scan_of_the_text(log: list[int], text: list[int], least: int, most: int) -> None:
    own = index_of(text)
    expected = ref.find_ref([SEPARATOR, *log], text, least, most)
    assert found(index_of(log), own, least, most) == expected
    assert found(own, own, least, most) == ref.find_ref([SEPARATOR, *text], text, least, most)


@given(logs, st.integers(0, 60), texts)
@settings(deadline=None)
def test_nothing_follows_what_is_context_only(log: list[int], first: int, text: list[int]) -> None:
    unfindable = frozenset(range(1, first + 1))
    expected = ref.find_ref([SEPARATOR, *log], text, 1, 32, unfindable=unfindable)
    assert found(index_of(log, first=first), index_of(text)) == expected


@given(lists(-1, 0, 150), st.lists(st.integers(0, 150), max_size=5))
@settings(deadline=None)
def test_appending_in_parts_equals_appending_at_once(log: list[int], cuts: list[int]) -> None:
    in_parts, one_by_one = SuffixIndex.empty(64), SuffixIndex.empty(64)
    bounds = [0, *sorted(min(cut, len(log)) for cut in cuts), len(log)]
    for start, stop in pairwise(bounds):
        append(in_parts, np.array(log[start:stop], np.int32), 0, VOCAB)
    for token in log:
        append(one_by_one, np.array([token], np.int32), 0, VOCAB)
    assert same(in_parts, index_of(log))
    assert same(one_by_one, index_of(log))


@given(lists(-1, 0, 120), texts, st.integers(1, 4))
@settings(deadline=None)
def test_evicted_text_is_never_found(log: list[int], text: list[int], least: int) -> None:
    """A full index equals a scan of what is left, and an index that saw nothing else."""
    index, own = index_of(log, 32), index_of(text)
    evicted = max(len(log) + 1 - 32, 0)  # positions, the separator at 0 among them
    assert found(index, own, least) == ref.find_ref([SEPARATOR, *log], text, least, 32, oldest=evicted)
    if evicted:
        shift = evicted - 1
        left = index_of(log[shift:], 64)
        assert found(index, own, least) == [(at + shift, length) for at, length in found(left, own, least)]


def test_of_too_many_occurrences_the_longest_then_the_latest_are_found() -> None:
    text = [1, 2, 3, 4, 9] + [7, 4, 8] * 100 + [1, 2, 3, 4]
    index = index_of(text, 512)
    matches = found(index, index)
    assert matches[0] == (4, 4)  # the oldest of all
    # Of the 100 others the latest; one link of their chain is the text's own end.
    assert matches[1:] == [(5 + 3 * n + 2, 1) for n in range(99, 99 - (OCCURRENCES - 1), -1)]


def test_empty_indices() -> None:
    nothing = index_of([])
    assert found(nothing, nothing) == []
    assert found(nothing, index_of([1])) == []
    assert found(index_of([1, 2]), nothing) == []


# Trees.


def even(num_lengths: int = 1, shares: Sequence[float] = (), chance: float = 0.5) -> Estimates:
    """Estimates that are all equal, but with classes of lengths 1, 2, .. and of the given shares."""
    chances = np.full((3, num_lengths, len(shares) + 1), chance, np.float32)
    return Estimates(chances, np.arange(1, num_lengths), np.array(shares, np.float64))


def grow(own: Sequence[int], shared: Sequence[int], estimates: Estimates, budget: int = 8) -> GrownTree:
    return grow_tree(index_of(own), index_of(shared), estimates, 1, 32, budget, 99, False)


def test_shares_lengths_and_sources_by_hand() -> None:
    # "1 2" was followed by 3, 3 and 4; "2" alone by 4 too. Matches of 2, 2, 2 and 1 tokens weigh 4, 4, 4 and 1.
    own = [9, 1, 2, 3, 8, 1, 2, 3, 7, 1, 2, 4, 6, 2, 4, 5, 1, 2]
    shares = [4.9 / 17, 5.1 / 17, 7.9 / 17, 8.1 / 17]
    tree = grow(own, [], even(4, shares), 2)
    assert dict(zip(tree.tokens.tolist(), tree.groups.tolist(), strict=True)) == {4: 1 * 5 + 1, 3: 1 * 5 + 3}
    # Elsewhere "5 1 2" was followed by 4 and 6, which now weigh 9 each: 8, 14 and 9 of 31 + 9.
    shares = [n / 40 for n in (7.9, 8.1, 8.9, 9.1, 13.9, 14.1)]
    tree = grow(own, [5, 1, 2, 4, SEPARATOR, 5, 1, 2, 6], even(4, shares), 3)
    own_3, shared_6, both_4 = (1 * 7 + 1), (4 * 7 + 2 * 7 + 3), (8 * 7 + 2 * 7 + 5)
    groups = dict(zip(tree.tokens.tolist(), tree.groups.tolist(), strict=True))
    assert groups == {3: own_3, 6: shared_6, 4: both_4}


def test_matches_grow_with_the_path() -> None:
    tree = grow([1, 2, 3, 4, 9, 1], [], even(8), 4)
    assert tree.tokens.tolist() == [2, 3, 4, 9]
    assert tree.groups.tolist() == [0, 1, 2, 3]  # one more token in common each


def test_occurrences_that_disagree_with_the_path_drop_out() -> None:
    tree = grow([1, 2, 3, 9, 1, 4, 5, 8, 1], [], even(), 4)
    assert set(paths(DraftTree(*tree[:3]))) == {(4,), (2,), (4, 5), (2, 3)}


@st.composite
def some_estimates(draw: st.DrawFn) -> Estimates:
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    chances = rng.choice([0.0, 0.25, 0.5, 0.7, 1.0], (3, 4, 5)).astype(np.float32)
    return Estimates(chances, np.array([1, 2, 5]), np.array([0.2, 0.4, 0.5, 0.7]))


@given(
    texts,
    logs,
    some_estimates(),
    st.integers(1, 9),
    st.integers(1, 20),
    st.integers(0, 12),
    st.integers(0, 8),
    st.booleans(),
)
@settings(deadline=None)
def test_trees_equal_the_reference(
    own: list[int],
    shared: list[int],
    estimates: Estimates,
    least: int,
    most: int,
    budget: int,
    depth: int,
    chain: bool,
) -> None:
    tree = grow_tree(index_of(own), index_of(shared), estimates, least, most, budget, depth, chain)
    expected = ref.grow_tree_ref(
        [SEPARATOR, *own], [SEPARATOR, *shared], estimates, least, most, budget, depth, chain
    )
    assert list(zip(*(column.tolist() for column in tree), strict=True)) == expected


# The proposer.


@pytest.mark.parametrize("megabytes", [1, 3, 64])
def test_memory_is_bounded_and_told(megabytes: int) -> None:
    drafter = SuffixDecoding(VOCAB, megabytes)
    index = sum(part.nbytes for part in drafter.shared)
    assert megabytes * 10**6 / 2 < index <= megabytes * 10**6
    assert index < drafter.memory_bytes < index + 10_000
    assert drafter.verified_top_k == 0


def test_memory_does_not_grow_with_answers() -> None:
    drafter = proposer()
    before = drafter.memory_bytes
    rng = np.random.default_rng(0)
    for i in range(40):
        answer(drafter, [1], [*rng.integers(0, 50, 600).tolist(), 50 + i, 99])
    assert drafter.memory_bytes == before
    assert drafter.shared.end[0] > len(drafter.shared.log)
    # The latest answer is there, the first is not.
    assert draft(drafter, request([89], name="latest")).tokens.tolist() == [99]
    assert draft(drafter, request([50], name="first")).tokens.tolist() == []


def test_options_reach_the_proposer() -> None:
    options = SuffixOptions.model_validate({"memory_mb": 2, "min_match": 3, "max_match": 9})
    drafter = SuffixDecoding.from_options(options, VOCAB)
    assert len(drafter.shared.log) == 1 << 15
    assert len(draft(drafter, request([1, 2, 3, 4, 9, 2, 3]))) == 0
    assert draft(drafter, request([1, 2, 3, 4, 9, 1, 2, 3], 1, name="longer")).tokens.tolist() == [4]
    for name, value in (("memory_mb", 0), ("min_match", 9), ("max_match", 7)):
        with pytest.raises(ValueError, match=name):
            SuffixOptions.model_validate({name: value})


def test_new_text_drafts_nothing() -> None:
    drafter = proposer()
    assert len(draft(drafter, request([1, 2, 3, 4, 5]))) == 0
    assert drafter.propose([]) == []


@pytest.mark.parametrize("chain", [False, True])
def test_a_loop_is_drafted_to_full_depth(chain: bool) -> None:
    one = dataclasses.replace(request([7, 1, 2, 3, 1, 2, 3], 20, depth=15), chain=chain)
    tree = draft(proposer(), one)
    assert tree.best_chain().tokens.tolist() == [1, 2, 3] * 5
    assert tree.is_chain


def test_chains_have_the_whole_budget() -> None:
    text = [1, 2, 3, 4, 5, 6, 1, 7, 8, 9, 1]
    drafter = proposer()
    tree, chain = request(text, 6, name="t"), dataclasses.replace(request(text, 6, name="c"), chain=True)
    drafter.start(tree)
    drafter.start(chain)
    drafts = propose(drafter, tree, chain)
    assert [draft.is_chain for draft in drafts] == [False, True]
    assert drafts[1].tokens.tolist() == [7, 8, 9, 1, 7, 8]  # a loop of the later occurrence


@given(texts, st.integers(0, 99))
@settings(deadline=None)
def test_smaller_trees_are_prefixes_of_larger_ones(text: list[int], seed: int) -> None:
    drafter = proposer()
    drafter.calibration.hits[:] = drafter.calibration.trials * np.random.default_rng(seed).random(
        drafter.calibration.hits.shape
    )
    largest = draft(drafter, request(text, 30))
    for size in range(len(largest)):
        (smaller,) = propose(drafter, request(text, size))
        assert paths(smaller) == paths(largest.prefix(size))


@pytest.mark.parametrize(("budget", "depth"), [(0, 5), (5, 0), (-1, 5), (5, -1), (0, 0)])
def test_no_budget_or_no_depth_is_an_empty_tree(budget: int, depth: int) -> None:
    drafter = proposer()
    one, two = request([1, 2, 1], budget, depth=depth), request([1, 2, 1], 3, name="two")
    drafter.start(one)
    drafter.start(two)
    assert [len(tree) for tree in propose(drafter, one, two)] == [0, 3]
    # The step's tokens are kept all the same.
    (tree,) = propose(drafter, request([1, 2, 1, 5, 1], 1))
    assert tree.tokens.tolist() == [5]


def test_outputs_are_found_once_finished_and_prompts_never() -> None:
    drafter = proposer()
    draft(drafter, request([10, 11, 12, 13, 20, 21, 22], prompt=4, name="first"))
    asks = {"prompt": [11], "end": [12, 13], "output": [20], "middle": [20, 21]}

    def drafts() -> dict[str, list[int]]:
        found = {}
        for name, tokens in asks.items():
            found[name] = draft(drafter, request(tokens, name=name)).tokens.tolist()
            drafter.finish(name)  # without an output: shares nothing
        return found

    assert not any(drafts().values())  # still running
    drafter.finish("first")
    assert drafts() == {"prompt": [], "end": [20, 21, 22], "output": [21, 22], "middle": [22]}


def test_aborted_outputs_are_kept_and_texts_kept_apart() -> None:
    drafter = proposer()
    answer(drafter, [1], [2, 3])  # no end of text in it
    answer(drafter, [4], [5, 6])
    assert draft(drafter, request([2], name="a")).tokens.tolist() == [3]
    assert draft(drafter, request([3], name="b")).tokens.tolist() == []


def test_running_requests_do_not_see_each_other() -> None:
    drafter = proposer()
    one, two = request([1, 2, 3, 1], name="one"), request([5, 1], name="two")
    drafter.start(one)
    drafter.start(two)
    assert [len(tree) > 0 for tree in propose(drafter, one, two)] == [True, False]


def test_the_first_tokens_of_an_answer_are_found_by_the_end_of_the_prompt() -> None:
    drafter = proposer(least=4)
    answer(drafter, [30, 31, 32, 33, 34, 35], [40, 41])
    assert draft(drafter, request([9, 32, 33, 34, 35])).tokens.tolist() == [40, 41]


def test_each_token_is_appended_once_also_after_a_preemption() -> None:
    drafter = proposer()
    text = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3]
    drafter.start(request(text[:4], prompt=3))
    for stop in (4, 4, 6, 6, 7, 10, 10):  # the same length twice: preempted, computed again
        propose(drafter, request(text[:stop], prompt=3))
    index = drafter._requests["r"].index
    assert index.log[: index.end[0]].tolist() == [SEPARATOR, *text]
    assert same(index, index_of(text, len(index.log)))
    drafter.finish("r")
    drafter.finish("r")
    drafter.propose([])
    drafter.propose([])
    assert drafter.shared.log[: drafter.shared.end[0]].tolist() == [SEPARATOR, *text, SEPARATOR]


def test_long_requests_outgrow_their_index() -> None:
    text = np.random.default_rng(0).integers(0, VOCAB, 1500).tolist()
    drafter, whole = proposer(), proposer()
    drafter.start(request(text[:200]))
    for stop in range(201, 1501, 7):
        (tree,) = propose(drafter, request(text[:stop], 16))
    assert paths(tree) == paths(draft(whole, request(text[:stop], 16)))
    assert len(tree) == 16
    index = drafter._requests["r"].index
    assert index.log[1 : index.end[0]].tolist() == text[:stop]


def test_placeholder_ids_are_harmless() -> None:
    drafter = proposer()
    for name, last in (("negative", -1), ("large", VOCAB)):
        assert len(draft(drafter, request([1, last, 2, 1, last], name=name))) == 0
    tree = draft(drafter, request([1, -1, 2, 3, VOCAB, 2], name="inside"))
    assert tree.tokens.tolist() == [3]  # and no further
    for name in ("negative", "large", "inside"):
        drafter.finish(name)
    assert len(draft(drafter, request([-1], name="after"))) == 0


@given(st.lists(texts, min_size=1, max_size=4))
@settings(deadline=None)
def test_drafts_depend_neither_on_the_batch_nor_on_the_order_of_finishing(prompts: list[list[int]]) -> None:
    def run(order: list[int]) -> tuple[list[int], dict[int, list[tuple[tuple[int, ...], float]]]]:
        drafter = proposer()
        for i, prompt in enumerate(prompts):
            drafter.start(request(prompt, prompt=1, name=f"past {i}"))
        for i in order:
            drafter.finish(f"past {i}")
        for i, prompt in enumerate(prompts):
            drafter.start(request(prompt, name=str(i)))
        trees = propose(drafter, *(request(prompts[i], 4 + i, name=str(i)) for i in order))
        drafts = {i: list(paths(tree).items()) for i, tree in zip(order, trees, strict=True)}
        return drafter.shared.log[: drafter.shared.end[0]].tolist(), drafts

    order = list(range(len(prompts)))
    first = run(order)
    assert run(order) == first
    assert run(order[::-1]) == first


# What is learnt.


def test_estimates_converge_to_the_true_frequencies() -> None:
    """After "1" came 2 twice and 3 once; the target says 2 in 70 % and 3 in 20 % of all cases."""
    drafter = proposer()
    rng = np.random.default_rng(1)
    one = request([1, 2, 9, 1, 2, 8, 1, 3, 7, 1], 2, depth=1)
    drafter.start(one)
    for _ in range(1500):
        tree = propose(drafter, one)[0]
        emit(drafter, [int(rng.choice([2, 3, 4], p=[0.7, 0.2, 0.1]))])
    # A fading mean of n trials has the variance p (1 - p) (1 - fade) / (1 + fade): 4 sigma.
    drafted = paths(tree)
    for token, frequency in ((2, 0.7), (3, 0.2)):
        sigma = (frequency * (1 - frequency) * (1 - calibration.FADE) / (1 + calibration.FADE)) ** 0.5
        assert drafted[token,] == pytest.approx(frequency, abs=4 * sigma)
    for _ in range(600):  # the stream changes
        propose(drafter, one)
        emit(drafter, [3])
    (tree,) = propose(drafter, one)
    assert tree.tokens.tolist() == [3, 2]
    assert tree.probabilities[0] > 0.9 > 0.1 > tree.probabilities[1]


def test_the_prior_is_a_chance_that_grows_with_share_and_match() -> None:
    prior = proposer().estimates.chances
    assert prior.shape == (3, len(suffix.LENGTHS) + 1, len(suffix.SHARES) + 1)
    assert prior.size <= 256
    assert ((prior > 0) & (prior < 1)).all()
    assert (np.diff(prior, axis=2) > 0).all()
    assert (np.diff(prior, axis=1) >= 0).all()


def test_each_tree_is_judged_once_and_by_the_emitted_tokens() -> None:
    drafter = proposer()
    one = request([1, 2, 3, 9, 1], 2)
    draft(drafter, one)
    trials, hits = drafter.calibration.trials.sum(), drafter.calibration.hits.sum()
    emit(drafter, [])  # preempted: nothing is known of it yet
    assert drafter.calibration.trials.sum() == trials
    emit(drafter, [2, 5])
    assert drafter.calibration.trials.sum() == pytest.approx(trials + 2, abs=0.1)
    assert drafter.calibration.hits.sum() == pytest.approx(hits + 1, abs=0.1)
    after = drafter.calibration.trials.copy()
    emit(drafter, [2, 5])
    propose(drafter, one)
    drafter.finish("r")
    emit(drafter, [2, 5])
    assert (drafter.calibration.trials == after).all()


# The process.


def test_warm_up_leaves_no_trace_and_compiles_all() -> None:
    from vllm_ext.kernels import suffix_index_numba

    drafter = proposer()
    drafter.warm_up()
    assert same(drafter.shared, SuffixIndex.empty(len(drafter.shared.log)))
    assert (drafter.calibration.trials == calibration.PRIOR_TRIALS).all()
    view = np.arange(40, dtype=np.int32).reshape(2, 20)[1, :15] % 5
    view.flags.writeable = False
    drafter.start(dataclasses.replace(request([]), tokens=view))
    propose(drafter, dataclasses.replace(request([], 4), tokens=view, chain=True))
    emit(drafter, [1])
    drafter.finish("r")
    drafter.propose([])
    # One set of types each: a second would have been compiled in the middle of a step.
    for name in ("append", "grow_tree"):
        assert len(suffix_index_numba.compiled(name).signatures) == 1


def test_numba_is_not_imported_with_the_proposer() -> None:
    script = """
import sys
from vllm_ext.proposers.suffix_tree import SuffixDecoding
SuffixDecoding(100, 1)
assert "numba" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
