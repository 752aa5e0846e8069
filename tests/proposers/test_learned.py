# SPDX-License-Identifier: Apache-2.0
"""What every method keeps over a restart: the same drafts afterwards, and nothing foreign that is let in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.kernels.learned_arrays import Learned
from vllm_ext.kernels.ngram_table import MOST_COUNT, NgramTable
from vllm_ext.kernels.suffix_array_ref import sort_key_ref
from vllm_ext.kernels.suffix_index import SEPARATOR, SuffixIndex, append, contents, find, rebuild
from vllm_ext.proposers.aded import CAP, Aded
from vllm_ext.proposers.base import Proposer, Request, Sampling, VerifiedRows
from vllm_ext.proposers.datastore import Datastore, Header, Segment, SegmentInfo
from vllm_ext.proposers.draft_model import DraftModelProposer
from vllm_ext.proposers.hybrid import Hybrid
from vllm_ext.proposers.input_copy import InputCopy
from vllm_ext.proposers.registry import METHODS, load_method
from vllm_ext.proposers.rest import Rest
from vllm_ext.proposers.stand import Stand
from vllm_ext.proposers.suffix_tree import SuffixDecoding
from vllm_ext.proposers.token_recycling import SHARES, TokenRecycling

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)
SAMPLED = Sampling(temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, seed=None)
VOCAB = 12


def store() -> Datastore:
    """Two documents, in memory."""
    tokens = [VOCAB, 1, 2, 3, 4, 5, 6, VOCAB, 2, 3, 7, 1, 2, 4, VOCAB]
    order = sorted(range(len(tokens)), key=lambda at: sort_key_ref(tokens, VOCAB, at))
    info = SegmentInfo(
        name="000000", num_tokens=len(tokens), num_documents=2, tokens_blake3="", suffixes_blake3=""
    )
    header = Header(created="", tokenizer="", tokenizer_hash="", vocab_size=VOCAB, segments=[info])
    return Datastore(header, (Segment(np.array(tokens, np.uint16), np.array(order, np.int32)),))


STORE = store()


def suffix() -> SuffixDecoding:
    """With room for 64 shared tokens: the tests overflow it."""
    proposer = SuffixDecoding(VOCAB, 1)
    proposer.shared = SuffixIndex.empty(64)
    return proposer


def ngrams(proposer: Stand | Aded) -> Proposer:
    """With room for 32 contexts: the tests overflow it."""
    proposer.table = NgramTable.empty(32, proposer.table.successors.shape[1])
    return proposer


# Small ones. A method that is not here is made with its default options.
SMALL: dict[str, Callable[[], Proposer]] = {
    "rest": lambda: Rest(STORE),
    "token_recycling": lambda: TokenRecycling(VOCAB, 3),
    "suffix_tree": suffix,
    "stand": lambda: ngrams(Stand(VOCAB, 1, 3, 3)),
    "aded": lambda: ngrams(Aded(VOCAB, 1)),
    "input_copy": lambda: InputCopy(VOCAB),
    "hybrid": lambda: Hybrid(
        [TokenRecycling(VOCAB, 3), suffix(), ngrams(Stand(VOCAB, 1, 2, 4)), TokenRecycling(VOCAB, 2, 1)]
    ),
}


def default(name: str) -> Proposer:
    proposer = load_method(name)
    return proposer.from_options(proposer.Options(), VOCAB)


# What a draft model's method learns is a `Calibration`'s, and it cannot draft here.
ASKING = {name for name in METHODS if issubclass(load_method(name), DraftModelProposer)}
LEARNING = [
    name
    for name in METHODS
    if load_method(name).state_dict is not Proposer.state_dict and name not in {*ASKING, "rasd"}
]
MAKE = {name: SMALL.get(name, functools.partial(default, name)) for name in LEARNING}


def test_every_method_is_tested_here() -> None:
    # Prompt tokens learn a few counts; `rasd` keeps its arrays as `hybrid` does.
    assert set(MAKE) == set(METHODS) - ASKING - {"ppd", "rasd"}


class Traffic:
    """Random requests for any number of proposers at once, whose trees must be the same."""

    def __init__(self, seed: int, first: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.count = first
        self.tokens: dict[str, tuple[list[int], int]] = {}  # by request id: tokens, how many are the prompt's
        self.logits = self.random.normal(size=(VOCAB, VOCAB)).astype(np.float32)

    def step(self, *proposers: Proposer) -> None:
        """Verify, start, propose and finish, each now and then."""
        random = self.random
        names = list(self.tokens)
        if names:
            emitted = [random.integers(0, 5, random.integers(1, 4)).tolist() for _ in names]
            roots = np.array([self.tokens[name][0][-1] for name in names], np.int32)
            order = np.argsort(-self.logits[roots], 1, kind="stable").astype(np.int32)
            for proposer in proposers:
                top_ids = np.ascontiguousarray(order[:, : proposer.verified_top_k])
                top_logits = np.take_along_axis(self.logits[roots], top_ids, 1)
                row_start = np.arange(len(names) + 1, dtype=np.int32)
                parents, accepted = np.full(len(names), -1, np.int32), np.ones(len(names), np.bool_)
                proposer.observe(
                    VerifiedRows(names, row_start, roots, parents, accepted, top_ids, top_logits, emitted)
                )
            for name, tokens in zip(names, emitted, strict=True):
                self.tokens[name][0].extend(tokens)
        if len(names) < 3:
            name = f"request {self.count}"
            self.count += 1
            # Ids outside the vocabulary stand for images.
            prompt = random.integers(0, VOCAB + 1, random.integers(1, 12)).tolist()
            self.tokens[name] = [*prompt, int(random.integers(0, 5))], len(prompt)
            for proposer in proposers:
                proposer.start(self._request(name))
        requests = [self._request(name) for name in self.tokens]
        trees = [proposer.propose(requests) for proposer in proposers]
        for tree in trees[0]:
            tree.validate()
            assert (tree.tokens < VOCAB).all()
        for others in trees[1:]:
            for mine, other in zip(trees[0], others, strict=True):
                for field in ("tokens", "parents", "probabilities"):
                    assert np.array_equal(getattr(mine, field), getattr(other, field))
        if len(self.tokens) > 1 and random.random() < 0.4:
            self.finish(list(self.tokens)[int(random.integers(0, len(self.tokens)))], *proposers)

    def finish(self, name: str, *proposers: Proposer) -> None:
        """A request is gone."""
        del self.tokens[name]
        for proposer in proposers:
            proposer.finish(name)

    def _request(self, name: str) -> Request:
        tokens, num_prompt_tokens = self.tokens[name]
        sampling = SAMPLED if name[-1] in "13579" else GREEDY
        return Request(name, np.array(tokens, np.int32), num_prompt_tokens, 6, 5, sampling)


def trained(method: str, seed: int, steps: int) -> Proposer:
    """A proposer that has seen requests, all of them finished; the last not yet shared."""
    proposer = MAKE[method]()
    traffic = Traffic(seed)
    for _ in range(steps):
        traffic.step(proposer)
    for name in list(traffic.tokens):
        traffic.finish(name, proposer)
    return proposer


@pytest.mark.parametrize("method", MAKE)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(0, 60))
@settings(max_examples=15, deadline=None)
def test_a_restored_proposer_drafts_what_the_old_one_would(method: str, seed: int, steps: int) -> None:
    old, new = trained(method, seed, steps), MAKE[method]()
    new.load_state_dict(old.state_dict())
    traffic = Traffic(seed + 1, first=1000)
    for _ in range(25):
        traffic.step(old, new)
    again = new.state_dict()
    for name, array in old.state_dict().items():
        assert np.array_equal(array, again[name]), name


@pytest.mark.parametrize("method", MAKE)
def test_what_was_learnt_makes_a_difference(method: str) -> None:
    fresh = MAKE[method]().state_dict()
    assert any(
        not np.array_equal(array, fresh[name]) for name, array in trained(method, 1, 30).state_dict().items()
    )


@pytest.mark.parametrize("method", MAKE)
def test_learned_changes_nothing_and_is_a_copy(method: str) -> None:
    """One rank of several is asked, in the middle of things."""
    one, two = MAKE[method](), MAKE[method]()
    traffic = Traffic(3)
    for number in range(40):
        traffic.step(one, two)
        if number % 3 == 0:
            for array in one.state_dict().values():
                assert array.flags.c_contiguous
                if array.size:
                    array.view(np.uint8)[...] = 1


@pytest.mark.parametrize("method", MAKE)
def test_no_request_is_named(method: str) -> None:
    assert "request" not in "".join(trained(method, 5, 10).state_dict())


CASES = [(method, name) for method in MAKE for name in MAKE[method]().state_dict()]


def refused(method: str, arrays: dict[str, Learned], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MAKE[method]().load_state_dict(arrays)


@pytest.mark.parametrize(("method", "name"), CASES)
def test_what_has_another_shape_or_type_is_refused(method: str, name: str) -> None:
    arrays = trained(method, 2, 20).state_dict()
    array = arrays[name]
    short = name.rpartition(".")[2]
    refused(method, {key: value for key, value in arrays.items() if key != name}, f"{short} is missing")
    refused(method, {**arrays, name + "x": array}, f"{short}x is unknown")
    wrong_type = np.int16 if array.dtype != np.int16 else np.int32
    refused(method, {**arrays, name: array.astype(wrong_type)}, rf"{short} is int16.*expected {array.dtype}")
    refused(method, {**arrays, name: array[None]}, rf"{short} is {array.dtype}\[1, ")
    if short not in ("tokens", "keys"):  # may have any length; the others then have not
        longer = np.concatenate([array, array, array[:1] * 0 if len(array) else np.ones(1, array.dtype)])
        refused(method, {**arrays, name: longer}, rf"{short} is .*expected")


@pytest.mark.parametrize(("method", "name"), CASES)
def test_values_out_of_range_are_refused(method: str, name: str) -> None:
    arrays = trained(method, 2, 20).state_dict()
    short = name.rpartition(".")[2]
    bad: dict[str, list[Any]] = {
        "hits": [-0.1, np.nan, np.inf, 199.9],
        "trials": [0.0, -1.0, np.nan, np.inf, 201.0],
        "successors": [-2, VOCAB],
        "text_successors": [-2, VOCAB],
        "bases": [2 * len(SHARES) + 4, 255],
        "first_successors": [-1],
        "tokens": [-2, VOCAB],
        "used": [0, -1, (1 << 62) + 1],
        "counts": [-1, MOST_COUNT + 1],
        "weights": [-0.1, np.nan, np.inf, CAP + 0.1],
    }
    for value in bad.get(short, []):
        array = arrays[name].copy()
        if array.size:
            array.reshape(-1)[-1] = value
            refused(method, {**arrays, name: array}, f"{short} has (values from|more than trials)")


@pytest.mark.parametrize("method", MAKE)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_whatever_is_let_in_is_safe(method: str, data: st.DataObject) -> None:
    """Random bits in one array: refused, or drafts of existing tokens only."""
    arrays = trained(method, 2, data.draw(st.sampled_from([0, 20]))).state_dict()
    name = data.draw(st.sampled_from(sorted(arrays)))
    array = np.array(arrays[name])
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    if array.dtype == np.bool_:
        array[...] = random.integers(0, 2, array.shape)
    elif (kind := data.draw(st.sampled_from(["bits", "small", "one"]))) == "bits":
        array.view(np.uint8)[...] = random.integers(0, 256, array.view(np.uint8).shape)
    elif kind == "small":
        array[...] = random.integers(-1, VOCAB, array.shape).astype(array.dtype)
    elif array.size:
        array.reshape(-1)[random.integers(array.size)] = np.array(random.integers(-1, VOCAB)).astype(
            array.dtype
        )
    proposer = MAKE[method]()
    try:
        proposer.load_state_dict({**arrays, name: array})
    except ValueError:
        return
    requests = [
        Request(f"{token}", np.array([1, 2, 3, token], np.int32), 3, 8, 8, GREEDY) for token in range(VOCAB)
    ]
    for request in requests:
        proposer.start(request)
    for tree in proposer.propose(requests):
        tree.validate()
        assert (tree.tokens < VOCAB).all()
    traffic = Traffic(data.draw(st.integers(0, 99)), first=1000)
    for _ in range(10):
        traffic.step(proposer)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(-1, 2), max_size=30), st.integers(0, 12)), min_size=1, max_size=8
    ),
    st.lists(st.integers(0, 2), min_size=1, max_size=20),
    st.sampled_from([16, 64, 256]),
)
@settings(max_examples=300, deadline=None)
def test_a_rebuilt_index_answers_alike(
    parts: list[tuple[list[int], int]], context: list[int], capacity: int
) -> None:
    """Also after it has overflowed; and of more than it has room for, the end counts."""
    index = SuffixIndex.empty(capacity)
    for tokens, first in parts:
        append(index, np.array(tokens, np.int32), first, 3)
    again = rebuild(capacity, *contents(index), 3)
    text = SuffixIndex.empty(64)
    append(text, np.array(context, np.int32), 0, 3)
    moved = index.end[0] - again.end[0]  # positions begin again
    for tokens, first in [(list[int](), 0), *parts]:  # also when both go on
        for part in (index, again):
            append(part, np.array(tokens, np.int32), first, 3)
        for least in (1, 3):
            positions, lengths = find(index, text, least, 32)
            new_positions, new_lengths = find(again, text, least, 32)
            assert (positions - moved).tolist() == new_positions.tolist()
            assert lengths.tolist() == new_lengths.tolist()
        for one, other in zip(contents(index), contents(again), strict=True):
            assert np.array_equal(one, other)


def test_a_row_with_one_token_twice_is_refused() -> None:
    arrays = trained("token_recycling", 2, 20).state_dict()
    arrays["successors"][0] = 3, 4, 3
    refused("token_recycling", arrays, "successors has a row with one token twice")
    arrays["successors"][0] = 3, -1, -1
    MAKE["token_recycling"]().load_state_dict(arrays)


def entries(*rows: tuple[int, list[int], list[float]]) -> dict[str, Learned]:
    """What a `Stand` of width 3 may have learnt: keys, successors and weights."""
    keys, successors, weights = zip(*rows, strict=True)
    return {
        **MAKE["stand"]().state_dict(),
        "keys": np.array(keys, np.int64),
        "used": np.arange(1, len(rows) + 1),
        "counts": np.ones(len(rows), np.int32),
        "successors": np.array(successors, np.int32),
        "weights": np.array(weights, np.float32),
    }


@pytest.mark.parametrize(
    ("successors", "weights", "says"),
    [
        ([3, 4, 3], [0.5, 0.3, 0.2], "successors has a row with one token twice"),
        ([3, -1, 4], [0.5, 0.0, 0.0], "successors has a row with a token behind its end"),
        ([3, -1, -1], [0.5, 0.3, 0.0], "weights has one of no successor"),
        ([-1, -1, -1], [0.5, 0.0, 0.0], "weights has one of no successor"),
        ([3, 4, 5], [0.3, 0.5, 0.2], "weights has a row that is not descending"),
        ([3, 4, 5], [0.5, 0.0, 0.2], "weights has a row that is not descending"),
        ([3, 4, 5], [1.02, 0.0, 0.0], "weights has values from"),
    ],
)
def test_a_row_that_no_table_can_have_is_refused(
    successors: list[int], weights: list[float], says: str
) -> None:
    refused("stand", entries((1, [1, 2, 3], [0.5, 0.4, 0.1]), (2, successors, weights)), says)


def test_rows_that_a_table_can_have() -> None:
    """Nothing known, also after all; and shares so small that they are none."""
    rows = ([-1, -1, -1], [0.0] * 3), ([3, -1, -1], [1.0, 0.0, 0.0]), ([3, 4, 5], [1.0, 0.0, 0.0])
    MAKE["stand"]().load_state_dict(entries(*((key, *row) for key, row in enumerate(rows))))
    MAKE["stand"]().load_state_dict(MAKE["stand"]().state_dict())


def test_contexts_without_a_place_are_refused() -> None:
    row = [3, 4, 5], [0.5, 0.3, 0.2]
    MAKE["stand"]().load_state_dict(entries(*((key, *row) for key in range(4))))  # all of the same slots
    refused("stand", entries(*((key, *row) for key in (0, 1, 2, 3, 7))), r"keys\[4\]=7 has no place")
    refused("stand", entries(*((key, *row) for key in (9, 8, 9))), r"keys\[2\]=9 has no place")


def test_another_size_of_the_shared_index_keeps_the_end() -> None:
    old = trained("suffix_tree", 4, 60)
    smaller = SuffixDecoding(VOCAB, 1)
    smaller.shared = SuffixIndex.empty(16)
    smaller.load_state_dict(old.state_dict())
    assert np.array_equal(smaller.state_dict()["tokens"], old.state_dict()["tokens"][-16:])


def test_finished_outputs_count_before_they_are_shared() -> None:
    old = suffix()
    request = Request("r", np.array([1, 2, 3, 4, 5], np.int32), 2, 4, 4, GREEDY)
    old.start(request)
    old.propose([request])
    assert old.state_dict()["tokens"].tolist() == []
    old.finish("r")
    kept = old.state_dict()
    assert kept["tokens"].tolist() == [1, 2, 3, 4, 5, SEPARATOR]
    assert kept["findable"].tolist() == [False, True, True, True, True, True]


def test_asking_one_rank_does_not_change_the_order_of_sharing() -> None:
    """Outputs are shared in the order their requests started, whenever they end and whoever is asked meanwhile."""
    asked, other = suffix(), suffix()
    requests = [Request(name, np.array([1, 2, ord(name) - 90], np.int32), 2, 4, 4, GREEDY) for name in "ab"]
    for proposer in (asked, other):
        for request in requests:
            proposer.start(request)
        proposer.propose(requests)
        proposer.finish("b")
        if proposer is asked:
            proposer.state_dict()
        proposer.finish("a")
        proposer.propose([])
    for field in SuffixIndex._fields:
        assert np.array_equal(getattr(asked.shared, field), getattr(other.shared, field))


def test_nothing_is_kept_by_default() -> None:
    class Forgetful(Rest):
        state_dict = Proposer.state_dict
        load_state_dict = Proposer.load_state_dict

    proposer = Forgetful(STORE)
    assert proposer.state_dict() == {}
    proposer.load_state_dict({})
    with pytest.raises(ValueError, match="hits is unknown"):
        proposer.load_state_dict({"hits": np.zeros(1)})
