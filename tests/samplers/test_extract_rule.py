# SPDX-License-Identifier: Apache-2.0
"""Rule extract beside all spans of a passage, and the likeliest span beside all of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ASKED
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.samplers import exact_extract
from vllm_ext.samplers.base import Row
from vllm_ext.samplers.extract import ExtractOptions, ExtractParams, ExtractRule, Passage

END = 9


class Words:
    """A letter, a letter behind a space, or both at once: what a tokenizer makes of them."""

    pieces = (b"a", b"b", b" a", b" b", b" c", b"ab", b" ab", b"", b"c", b"")
    size = len(pieces)

    def encode(self, text: str) -> list[int]:
        """Longest first."""
        tokens = []
        while text:
            token = max(
                (i for i, piece in enumerate(self.pieces) if piece and text.startswith(piece.decode())),
                key=lambda i: len(self.pieces[i]),
            )
            tokens.append(token)
            text = text[len(self.pieces[token]) :]
        return tokens


WORDS = Words()
PASSAGES = st.text(alphabet="ab c", min_size=1, max_size=12).filter(
    lambda text: "  " not in text and not text.endswith(" ")
)


def spans(passage: str, most: int) -> set[tuple[int, ...]]:
    """By brute force."""
    tokens = WORDS.encode(passage)
    found = set()
    for start, end in itertools.combinations(range(len(tokens) + 1), 2):
        span = tokens[start:end][:most]
        found.add(tuple(span))
        bare = WORDS.pieces[span[0]].removeprefix(b" ")
        if bare in WORDS.pieces and bare:
            found.add((WORDS.pieces.index(bare), *span[1:]))
    return found


def following(passage: str, most: int, prefix: Sequence[int]) -> set[int]:
    here = tuple(prefix)
    found = {
        span[len(here)]
        for span in spans(passage, most)
        if len(span) > len(here) and span[: len(here)] == here
    }
    return found | ({END} if here else set())


def row(passage: str, prefix: Sequence[int], most: int = 64) -> Row:
    return Row([1], list(prefix), END, ExtractParams(extract=passage, extract_max_tokens=most), ASKED)


@given(PASSAGES, st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_rows_and_constraints_are_those_of_all_spans(passage: str, most: int) -> None:
    rule = ExtractRule.from_options(ExtractOptions(), WORDS)
    all_spans = spans(passage, most)
    prefixes = sorted({span[:n] for span in all_spans for n in range(len(span) + 1)})
    before = torch.randn(len(prefixes), WORDS.size)
    after = before.clone()
    rule.apply(after, [row(passage, prefix, most) for prefix in prefixes])
    for prefix, left, right in zip(prefixes, before, after, strict=True):
        allowed = following(passage, most, prefix)
        assert set(torch.isfinite(right).nonzero().flatten().tolist()) == allowed
        assert (left[list(allowed)] == right[list(allowed)]).all()
        constraint = rule.constraint(row(passage, prefix, most))
        for token in range(WORDS.size):
            assert constraint.accept(token) == (token in allowed)
            if token in allowed:
                constraint.rollback(1)
        path = list(prefix)
        forced = constraint.forced(3)
        for token in forced:
            assert following(passage, most, path) == {token}
            path.append(token)
        assert len(forced) == 3 or END in path or len(following(passage, most, path)) > 1


def test_an_answer_needs_no_leading_space() -> None:
    rule = ExtractRule.from_options(ExtractOptions(), WORDS)
    first = torch.zeros(1, WORDS.size)
    rule.apply(first, [row("b ab", [])])
    assert torch.isfinite(first[0]).nonzero().flatten().tolist() == [1, 5, 6]  # b, ab and " ab"


def test_rows_behind_the_end_and_behind_what_is_no_span() -> None:
    rule = ExtractRule.from_options(ExtractOptions(), WORDS)
    logits = torch.randn(2, WORDS.size)
    before = logits.clone()
    rule.apply(logits, [row("ab c", [5, END, 1]), row("ab c", [1])])
    assert torch.equal(logits[0], before[0])
    assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == [END]


@pytest.mark.parametrize(
    ("params", "changes", "says"),
    [
        (
            {"extract": "abcabc"},
            {},
            "extract: 6 characters are not allowed; allowed: 5, which the server's option",
        ),
        ({"extract": "ab"}, {"ignores_end": True}, "extract does not go with ignore_eos=True"),
        ({"extract": "ab"}, {"structured": True}, "extract does not go with structured_outputs"),
    ],
)
def test_requests_that_are_refused(params: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    options = ExtractOptions(max_passage=5)
    problem = ExtractRule.problem(options, ExtractParams(**params), replace(ASKED, **changes))
    assert problem is not None
    assert says in problem
    assert ExtractRule.problem(options, ExtractParams(extract="ab"), ASKED) is None


def toy_model(seed: int) -> Any:
    """Log-probabilities of all tokens behind a prefix."""

    def log_p(prefix: tuple[int, ...]) -> Any:
        logits = np.random.default_rng([seed, *prefix]).normal(0, 2, WORDS.size)
        return logits - np.log(np.exp(logits).sum())

    return log_p


@given(PASSAGES, st.integers(0, 1000), st.integers(1, 5), st.integers(1, 5))
@settings(deadline=None, max_examples=80)
def test_the_likeliest_span_is_that_of_all(passage: str, seed: int, most: int, width: int) -> None:
    log_p = toy_model(seed)
    asked: list[tuple[int, ...]] = []

    def score(prefixes: Sequence[tuple[int, ...]], ids: Sequence[Any]) -> list[Any]:
        asked.extend(prefixes)
        assert len(prefixes) <= width
        return [log_p(prefix)[its] for prefix, its in zip(prefixes, ids, strict=True)]

    rule = ExtractRule.from_options(ExtractOptions(), WORDS)
    found = exact_extract.likeliest(rule.passage(passage), END, most, score, width)
    scores = {
        span: sum(log_p(span[:n])[token] for n, token in enumerate((*span, END)))
        for span in spans(passage, most)
    }
    assert found.log_probability == pytest.approx(max(scores.values()), abs=1e-9)
    assert scores[found.tokens] == pytest.approx(found.log_probability, abs=1e-9)
    assert len(set(asked)) == len(asked) == found.rows
    # A shorter limit takes longer spans away and nothing else.
    if len(found.tokens) < most:
        shorter = exact_extract.likeliest(rule.passage(passage), END, most - 1, score, width)
        assert shorter[:2] == found[:2]


def test_the_search_leaves_out_what_cannot_win() -> None:
    passage = Passage(np.arange(100, dtype=np.int32), np.full(100, -1, dtype=np.int32))

    def score(prefixes: Sequence[tuple[int, ...]], ids: Sequence[Any]) -> list[Any]:
        """Sure of what it says: 40, then the end."""
        wanted = [40 if not prefix else 100 for prefix in prefixes]
        return [np.where(its == token, -0.1, -9.0) for its, token in zip(ids, wanted, strict=True)]

    found = exact_extract.likeliest(passage, 100, 20, score, 1)
    assert found.tokens == (40,)
    assert found.rows == 2  # of 1,811 prefixes of spans
