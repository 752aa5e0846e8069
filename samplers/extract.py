# SPDX-License-Identifier: Apache-2.0
"""Answers out of a passage: the whole output is a span of a text that the request gives, then the end token.

The mask of a row is the tokens that come next at the places of the passage where the output so far stands; see
`passage.py` for what a span is. A token's probability is the model's among those that are allowed, so that spans are
weighed step by step, as under any mask; the most probable span of all is what `exact_extract.py` finds.

Source: Exact-extract, arXiv 2108.05857, whose spans these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from vllm_ext.kernels.token_mask import keep_tokens
from vllm_ext.kernels.trie import Int32
from vllm_ext.samplers.base import Asked, Row, Rule, RuleOptions, RuleParams, Vocabulary, contradiction
from vllm_ext.samplers.passage import Passage, Passages

PASSAGE = -1  # the place of a request's passage in what its rows keep
KEPT = 32  # places behind outputs that are kept of a request, the longest ones: a tree's path and more


class ExtractOptions(RuleOptions):
    max_passage: int = Field(
        default=100_000, ge=1, le=10_000_000, description="longest passage, in characters"
    )

    @property
    def text_limit(self) -> tuple[str, int]:
        return "max_passage", self.max_passage


class ExtractParams(RuleParams):
    extract: str = Field(
        min_length=1, description="the passage that the answer is to be a span of, as it stands"
    )
    extract_max_tokens: int = Field(default=64, ge=1, le=100_000, description="longest span, in tokens")


class ExtractRule(Rule):
    """A span of a passage, then the end."""

    summary = "the answer is a span of a passage that the request gives"
    paper = "arXiv 2108.05857"
    closed = True
    Options = ExtractOptions
    Params = ExtractParams
    example: ClassVar[Mapping[str, Any]] = {"extract": "The harbour was closed for the winter."}

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._passages = Passages(vocabulary)

    @classmethod
    def from_options(cls, options: ExtractOptions, vocabulary: Vocabulary) -> ExtractRule:
        return cls(vocabulary)

    @classmethod
    def problem(cls, options: ExtractOptions, params: ExtractParams, asked: Asked) -> str | None:
        if (given := len(params.extract)) > options.max_passage:
            return (
                f"extract has {given} characters; allowed: {options.max_passage}, which is this server's max_passage. "
                "Give a part of the passage"
            )
        return contradiction("extract", "the passage", asked)

    def warm_up(self) -> None:
        self._passages.warm_up()

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        places = [place for place, row in enumerate(rows) if row.end not in row.output]
        keep_tokens(logits, places, [self._allowed(rows[place]) for place in places])

    def _allowed(self, row: Row) -> Int32:
        spans = self.constraint(row)
        allowed = spans.allowed()
        # Never wanting for tokens that were drawn from these masks; should it be, the request ends.
        return allowed if len(allowed) else np.array([row.end], dtype=np.int32)

    def constraint(self, row: Row) -> SpanConstraint:
        if PASSAGE not in row.kept:
            row.kept[PASSAGE] = self._passages.of(row.params.extract, row.end)
        return SpanConstraint(row.kept[PASSAGE], row.params.extract_max_tokens, row.output, row.end, row.kept)


class SpanConstraint:
    """A `Constraint`: the places behind an output, the last ones those of all of it."""

    def __init__(
        self,
        passage: Passage,
        max_tokens: int,
        output: Sequence[int],
        end: int,
        kept: dict[int, Any] | None = None,
    ) -> None:
        """
        Args:
            passage: whose span the answer is.
            max_tokens: of the longest span.
            output: what is there of it.
            end: the token that ends an answer.
            kept: see `Row.kept`: the places behind shorter outputs, and then behind this one.
        """
        self._passage, self._max_tokens, self._end = passage, max_tokens, end
        self._num_before = len(output)
        fits = len(output) <= max_tokens and end not in output
        kept = {} if kept is None else kept
        if not fits:
            places: Int32 | None = np.zeros(0, dtype=np.int32)
        elif len(output) in kept:
            places = kept[len(output)]
        elif output and len(output) - 1 in kept:
            places = passage.after(kept[len(output) - 1], output[-1])
        else:
            places = passage.behind(output)
        if fits:
            kept[len(output)] = places
            kept.pop(len(output) - KEPT, None)
        self._places = [places]

    def allowed(self) -> Int32:
        """What may come next; nothing where the output has ended, or is no span."""
        return self._next(self._places[-1], self._num_before + len(self._places) - 1)

    def _next(self, places: Int32 | None, num_tokens: int) -> Int32:
        return self._passage.allowed(places, self._max_tokens - num_tokens, self._end)

    def accept(self, token: int) -> bool:
        """See `Constraint`."""
        if token not in self.allowed():
            return False
        self._places.append(self._behind(self._places[-1], token))
        return True

    def _behind(self, places: Int32 | None, token: int) -> Int32:
        return np.zeros(0, dtype=np.int32) if token == self._end else self._passage.after(places, token)

    def rollback(self, num_tokens: int) -> None:
        """See `Constraint`."""
        if num_tokens:
            del self._places[-num_tokens:]

    def forced(self, most: int) -> list[int]:
        """See `Constraint`; the end token among them. Mostly none: behind a token the answer may end."""
        tokens: list[int] = []
        places = self._places[-1]
        before = self._num_before + len(self._places) - 1
        while len(tokens) < most:
            allowed = self._next(places, before + len(tokens))
            if len(allowed) != 1:
                break
            tokens.append(int(allowed[0]))
            places = self._behind(places, tokens[-1])
        return tokens
