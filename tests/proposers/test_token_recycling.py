# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.proposers.base import Request, Sampling, VerifiedRows
from vllm_ext.proposers.token_recycling import EMPTY, TokenRecycling

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)
VOCAB = 11


def request(tokens: list[int], budget: int, num_prompt_tokens: int | None = None, name: str = "r") -> Request:
    prompt = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    return Request(name, np.array(tokens, dtype=np.int32), prompt, budget, GREEDY)


def rows(tokens: list[int], top_ids: list[list[int]], accepted: list[bool] | None = None) -> VerifiedRows:
    """All rows of one request; by default all are accepted."""
    kept = [True] * len(tokens) if accepted is None else accepted
    return VerifiedRows(
        ["r"],
        np.array([0, len(tokens)], dtype=np.int32),
        np.array(tokens, dtype=np.int32),
        np.array(kept),
        np.array(top_ids, dtype=np.int32).reshape(len(tokens), -1),
    )


def tokens_of(proposer: TokenRecycling, *requests: Request) -> list[list[int]]:
    return [draft.tokens.tolist() for draft in proposer.propose(list(requests))]


@pytest.mark.parametrize(("vocab", "width"), [(49152, 8), (151936, 8), (100, 1)])
def test_memory_is_vocabulary_times_width_times_four(vocab: int, width: int) -> None:
    proposer = TokenRecycling(vocab, width)
    assert proposer.memory_bytes == vocab * width * 4
    assert proposer.matrix.nbytes == vocab * width * 4
    assert proposer.verified_top_k == width


def test_cold_matrix_drafts_nothing() -> None:
    assert tokens_of(TokenRecycling(VOCAB), request([3], 5)) == [[]]


def test_table_equals_the_last_top_ids_of_each_token() -> None:
    proposer = TokenRecycling(VOCAB, 2)
    proposer.observe(rows([4, 7], [[1, 2], [3, 4]]))
    proposer.observe(rows([4], [[9, 8]]))
    assert proposer.matrix[4].tolist() == [9, 8]
    assert proposer.matrix[7].tolist() == [3, 4]
    assert (np.delete(proposer.matrix, [4, 7], axis=0) == EMPTY).all()


def test_rejected_rows_teach_too_but_accepted_ones_have_the_last_word() -> None:
    proposer = TokenRecycling(VOCAB, 1)
    proposer.observe(rows([4, 5, 4], [[1], [2], [3]], accepted=[True, False, False]))
    assert proposer.matrix[5].tolist() == [2]
    # The rejected row of token 4 comes later in the batch and would win without the order.
    assert proposer.matrix[4].tolist() == [1]


def test_text_loop_is_drafted_to_full_depth() -> None:
    proposer = TokenRecycling(VOCAB, 1)
    proposer.observe(rows([1, 2, 3], [[2], [3], [1]]))
    assert tokens_of(proposer, request([1], 6)) == [[2, 3, 1, 2, 3, 1]]


def test_prompt_fills_empty_entries_only() -> None:
    proposer = TokenRecycling(VOCAB, 2)
    proposer.observe(rows([1], [[7, 8]]))
    proposer.start(request([1, 2, 3, 2, 5, 6], 5, num_prompt_tokens=5))
    assert proposer.matrix[1].tolist() == [7, 8]  # the target's own ranking stays
    assert proposer.matrix[2].tolist() == [5, EMPTY]  # of two successors the last one
    assert proposer.matrix[5].tolist() == [EMPTY, EMPTY]  # 6 is output, not prompt


def test_placeholder_ids_are_ignored() -> None:
    proposer = TokenRecycling(VOCAB, 1)
    proposer.start(request([1, -1, VOCAB, 2, 3], 5))
    proposer.observe(rows([VOCAB + 5, -1], [[1], [2]]))
    assert proposer.matrix[2].tolist() == [3]
    assert (np.delete(proposer.matrix, 2, axis=0) == EMPTY).all()


def test_empty_batch() -> None:
    proposer = TokenRecycling(VOCAB)
    assert proposer.propose([]) == []
    nothing = np.zeros(0, np.int32)
    proposer.observe(
        VerifiedRows([], np.zeros(1, np.int32), nothing, nothing > 0, np.zeros((0, 8), np.int32))
    )
    assert (proposer.matrix == EMPTY).all()


matrices = st.lists(st.integers(-1, VOCAB - 1), min_size=VOCAB, max_size=VOCAB)
batches = st.lists(st.tuples(st.integers(0, VOCAB - 1), st.integers(0, 9)), min_size=1, max_size=5)


def reference_chain(successor: npt.NDArray[np.int32], root: int, budget: int) -> list[int]:
    """The draft as a loop."""
    chain: list[int] = []
    token = root
    while len(chain) < budget and successor[token] != EMPTY:
        token = int(successor[token])
        chain.append(token)
    return chain


@given(matrices, batches)
@settings(max_examples=200, deadline=None)
def test_draft_is_the_reference_chain_whatever_the_batch(
    successors: list[int], batch: list[tuple[int, int]]
) -> None:
    proposer = TokenRecycling(VOCAB, 1)
    proposer.matrix[:, 0] = successors
    requests = [request([root], budget, name=str(i)) for i, (root, budget) in enumerate(batch)]
    expected = [reference_chain(proposer.matrix[:, 0], root, budget) for root, budget in batch]
    assert tokens_of(proposer, *requests) == expected
    # Permuting the batch permutes the drafts.
    assert tokens_of(proposer, *requests[::-1]) == expected[::-1]
    for draft in proposer.propose(requests):
        assert draft.parents.tolist() == list(range(-1, len(draft.tokens) - 1))


@given(
    st.lists(
        st.tuples(st.integers(0, VOCAB - 1), st.integers(0, VOCAB - 1), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=200, deadline=None)
def test_observe_equals_writing_row_by_row(steps: list[tuple[int, int, bool]]) -> None:
    proposer = TokenRecycling(VOCAB, 1)
    proposer.observe(rows([t for t, _, _ in steps], [[n] for _, n, _ in steps], [a for _, _, a in steps]))
    expected = np.full((VOCAB, 1), EMPTY)
    for token, successor, _ in sorted(steps, key=lambda step: step[2]):
        expected[token, 0] = successor
    assert proposer.matrix.tolist() == expected.tolist()
