# SPDX-License-Identifier: Apache-2.0
"""Rule extract, and the search for the best span, beside all spans written out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ASKED
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.kernels.sparse import Float64
from vllm_ext.samplers.base import Row
from vllm_ext.samplers.exact_extract import Question, Search, best_span, search
from vllm_ext.samplers.extract import ExtractOptions, ExtractParams, ExtractRule, SpanConstraint
from vllm_ext.samplers.passage import Passage, Passages

VOCAB, END = 12, 11
PIECES = {"<s>": 0, "a": 1, "b": 2, " a": 3, " b": 4, " c": 5, " ": 6, " abb": 7, "ab": 8, "<e>": END}
BARE = {3: (1,), 4: (2,), 7: (8, 2)}  # by token, without its space; "c" alone is none
TEXTS = st.lists(st.sampled_from([*PIECES, " a", "a", "b", " b"]), min_size=1, max_size=12).map("".join)
Tokens = tuple[int, ...]


class Toy:
    size = VOCAB

    @property
    def pieces(self) -> list[bytes]:
        pieces = [b""] * VOCAB
        for text, token in PIECES.items():
            if "<" not in text:
                pieces[token] = text.encode()
        return pieces

    def encode(self, text: str) -> list[int]:
        return [PIECES[part] for part in re.findall("<.>| abb| [abc]|ab|.", text) if part in PIECES]


def spans(text: str, longest: int) -> set[Tokens]:
    """All of them, by the definition."""
    tokens = Toy().encode(text)
    found = set()
    for start, length in itertools.product(range(len(tokens)), range(1, longest + 1)):
        span = tuple(tokens[start : start + length])
        if len(span) == length and not {0, END} & {*span}:
            found |= {span, (*BARE.get(span[0], span[:1]), *span[1:])}
    return {span for span in found if len(span) <= longest}


def allowed(of: set[Tokens], prefix: Tokens) -> set[int]:
    longer = {span[len(prefix)] for span in of if len(span) > len(prefix) and span[: len(prefix)] == prefix}
    return longer | ({END} if prefix in of else set())


def prefixes(of: set[Tokens]) -> list[Tokens]:
    return sorted({span[:n] for span in of for n in range(len(span) + 1)} | {()})


def passage_of(text: str) -> Passage:
    return Passages(Toy()).of(text, END)


def params(text: str, longest: int) -> ExtractParams:
    return ExtractParams(extract=text, extract_max_tokens=longest)


@given(TEXTS, TEXTS, st.integers(1, 5))
@settings(deadline=None, max_examples=100)
def test_rows_keep_what_begins_a_span(one: str, two: str, longest: int) -> None:
    rule = ExtractRule.from_options(ExtractOptions(), Toy())
    rows, expected = [], []
    for text in (one, two):
        every = spans(text, longest)
        for prefix in prefixes(every):
            rows.append(Row([5], prefix, END, params(text, longest), ASKED))
            expected.append(allowed(every, prefix) or {END})  # of a text without tokens there is no span
    # Behind the end anything goes; behind what is no span, only the end.
    rows += [
        Row([5], end, END, params(one, longest), ASKED) for end in ([1, END, 2], [9], [1] * (longest + 1))
    ]
    expected += [set(range(VOCAB)), {END}, {END}]
    before = torch.randn(len(rows), VOCAB)
    after = before.clone()
    rule.apply(after, rows)
    for left, right, kept in zip(before, after, expected, strict=True):
        assert set(torch.isfinite(right).nonzero().flatten().tolist()) == kept
        assert (left[list(kept)] == right[list(kept)]).all()


@given(TEXTS, st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_constraints_go_down_and_back(text: str, longest: int) -> None:
    every, passage = spans(text, longest), passage_of(text)
    for prefix in prefixes(every):
        # From the output, and token by token.
        behind, walked = (
            SpanConstraint(passage, longest, prefix, END),
            SpanConstraint(passage, longest, (), END),
        )
        assert all(walked.accept(token) for token in prefix)
        for constraint in (behind, walked):
            for token in range(VOCAB):
                assert constraint.accept(token) == (token in allowed(every, prefix))
                if token in allowed(every, prefix):
                    constraint.rollback(1)
            forced = constraint.forced(3)
            path = prefix
            for token in forced:
                assert allowed(every, path) == {token}
                path += (token,)
            if len(forced) < 3 and END not in forced:
                assert len(allowed(every, path)) != 1
        if prefix in every:
            assert walked.accept(END)
            assert not walked.accept(END)
            assert walked.forced(3) == []
            walked.rollback(len(prefix) + 1)
            assert walked.accept(prefix[0])
            assert SpanConstraint(passage, longest, (*prefix, END), END).forced(3) == []


def test_what_is_certain() -> None:
    def forced(text: str, longest: int, prefix: Sequence[int], most: int) -> list[int]:
        return SpanConstraint(passage_of(text), longest, prefix, END).forced(most)

    assert forced(" c", 3, (), 5) == [5, END]
    assert forced(" c c", 1, (), 5) == [5, END]
    assert forced(" c c", 1, (), 1) == [5]
    assert forced(" a", 3, (), 5) == []  # with its space and without
    assert forced("ba", 3, (2,), 5) == []
    assert forced("ba", 3, (2, 1), 5) == [END]


def test_texts_spell_no_special_tokens() -> None:
    assert {span for span in prefixes(spans("a<e>b<s>a", 4)) if span} == {(1,), (2,)}
    constraint = SpanConstraint(passage_of("a<e>b<s>a"), 4, (1,), END)
    assert constraint.allowed().tolist() == [END]


@pytest.mark.parametrize(
    ("text", "changes", "says"),
    [
        ("abcd", {}, "extract has 4 characters; allowed: 3, which is this server's max_passage"),
        (
            "abc",
            {"structured": True},
            "extract does not go with structured_outputs (response_format): the passage",
        ),
        ("abc", {"min_tokens": 3}, "min_tokens=3"),
    ],
)
def test_requests_that_cannot_be(text: str, changes: dict[str, Any], says: str) -> None:
    options = ExtractOptions(max_passage=3)
    problem = ExtractRule.problem(options, params(text, 4), replace(ASKED, **changes))
    assert problem is not None
    assert says in problem
    assert ExtractRule.problem(options, params("abc", 4), ASKED) is None


def model(prefix: Tokens, peak: float = 3.0) -> Float64:
    """Log-probabilities behind a prefix."""
    logits = np.random.default_rng([7, *prefix]).normal(size=VOCAB) * peak
    result: Float64 = logits - np.log(np.exp(logits).sum())
    return result


def look_up(questions: Sequence[Question]) -> list[list[float]]:
    return [model(question.tokens)[question.wanted].tolist() for question in questions]


def score_of(span: Tokens, normalize: bool) -> float:
    whole = (*span, END)
    logprob = sum(float(model(whole[:n])[token]) for n, token in enumerate(whole))
    return logprob / len(whole) if normalize else logprob


@given(TEXTS, st.integers(1, 12), st.booleans(), st.integers(1, 5))
@settings(deadline=None, max_examples=150)
def test_search_finds_the_best_of_all(text: str, longest: int, normalize: bool, width: int) -> None:
    every = spans(text, longest)
    found = search(look_up, passage_of(text), END, longest, normalize, width)
    if not every:
        assert found is None
        return
    assert found is not None
    assert found.tokens in every
    assert found.score == pytest.approx(max(score_of(span, normalize) for span in every))
    assert found.score == pytest.approx(score_of(found.tokens, normalize))


@given(st.integers(1, VOCAB - 1), st.integers(1, 6), st.booleans(), st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_matrices_and_search_agree(num_tokens: int, longest: int, normalize: bool, rows: int) -> None:
    tokens = np.random.default_rng(num_tokens).permutation(VOCAB - 1)[:num_tokens].astype(np.int32)
    losses, ends = np.full((2, num_tokens, longest), np.inf)
    for start, last in itertools.product(range(num_tokens), range(longest)):
        if start + last < num_tokens:
            before = tuple(tokens[start : start + last].tolist())
            token = int(tokens[start + last])
            losses[start, last] = -model(before)[token]
            ends[start, last] = -model((*before, token))[END]
    best = best_span(losses, ends, normalize)
    passage = Passage(tokens, {})
    found = search(look_up, passage, END, longest, normalize)
    assert found is not None
    assert found.tokens == tuple(tokens[best.start : best.start + best.length].tolist())
    assert found.score == pytest.approx(-best.score)
    # The rows may come in parts.
    parts = {
        i: best_span(losses[i : i + rows], ends[i : i + rows], normalize) for i in range(0, num_tokens, rows)
    }
    first, part = min(parts.items(), key=lambda each: each[1].score)
    assert part._replace(start=first + part.start) == best
    # Fewer columns leave out longer spans and nothing else.
    for most in range(1, longest + 1):
        scores = {
            (i, j + 1): (losses[i, : j + 1].sum() + ends[i, j]) / (j + 2 if normalize else 1)
            for i, j in itertools.product(range(num_tokens), range(most))
        }
        short = best_span(losses[:, :most], ends[:, :most], normalize)
        assert short.score == pytest.approx(min(scores.values()))
        assert short.score == pytest.approx(scores[short.start, short.length])


def test_matrices_by_hand() -> None:
    losses = np.array([[1.0, 0.1], [2.0, 0.1], [0.5, np.inf]])
    ends = np.array([[9.0, 0.3], [0.2, 5.0], [1.2, 0.0]])  # the end behind the span's last token
    assert best_span(losses, ends) == pytest.approx((0, 2, 1.4))
    assert best_span(losses[:, :1], ends[:, :1]) == pytest.approx((2, 1, 1.7))
    assert best_span(losses, ends, normalize=True) == pytest.approx((0, 2, 1.4 / 3))
    ends[0, 1] = 0.8  # 1.9 in all, which is less than 1.7 a token
    assert best_span(losses, ends) == pytest.approx((2, 1, 1.7))
    assert best_span(losses, ends, normalize=True) == pytest.approx((0, 2, 1.9 / 3))


def test_search_leaves_out_what_cannot_win() -> None:
    """A model that is sure of one span of 200 tokens: little more than the beginnings of that are opened."""
    passage = passage_of("ba b" * 50)
    path = (2, 1, 4)
    opened = []
    one = Search(passage, END, 60, width=1)
    while questions := one.ask():
        answers = []
        for question in questions:
            opened.append(question.tokens)
            following = dict(zip([(), (2,), (2, 1), path], [*path, END], strict=True))
            sure = following.get(question.tokens)
            answers.append([-0.01 if token == sure else -6.0 for token in question.wanted.tolist()])
        one.tell(questions, answers)
    assert one.found is not None
    assert one.found.tokens == path
    assert opened == [(), (2,), (2, 1), path]


def test_no_chance_at_all() -> None:
    assert search(lambda qs: [[-np.inf] * len(q.wanted) for q in qs], passage_of("ab"), END, 4) is None
    assert search(look_up, passage_of("<s><e>"), END, 4) is None
