# SPDX-License-Identifier: Apache-2.0
"""The answer is a span of a passage that the request gives, then the end token.

A span may begin at any token of the passage, and where that one begins with a space also without it. Tokens are weighed
among those that continue a span, one by one. `extraction` has the likeliest span of all, which no decoding token by
token is sure to find.

Source: "How Optimal is Greedy Decoding for Extractive Question Answering?", arXiv 2108.05857, its set of spans.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field

from vllm_ext.kernels.sparse import Int32
from vllm_ext.samplers.base import Asked, Row, Rule, RuleOptions, RuleParams, Vocabulary, closed_set_problem

PASSAGES = 64  # whose tokens are kept


class ExtractOptions(RuleOptions):
    """Of the server."""

    max_passage: int = Field(default=100_000, ge=1, description="most characters of a passage")


class ExtractParams(RuleParams):
    """Of a request."""

    extract: str = Field(min_length=1, description="the passage that the answer is to be a span of")
    extract_max_tokens: int = Field(default=64, ge=1, description="most tokens of the answer")


@dataclass(frozen=True)
class Passage:
    """A passage's tokens."""

    tokens: Int32  # [length]
    first: Int32  # [length] the same less a leading space, -1 where there is none or that is no token

    def behind(self, prefix: Sequence[int]) -> Int32:
        """Places of the tokens that may follow a prefix; one is the passage's end, where there is nothing more."""
        if not len(prefix):
            return np.arange(len(self.tokens), dtype=np.int32)
        places = np.flatnonzero((self.tokens == prefix[0]) | (self.first == prefix[0])).astype(np.int32) + 1
        for token in prefix[1:]:
            places = places[places < len(self.tokens)]
            places = places[self.tokens[places] == token] + 1
        return places

    def following(self, prefix: Sequence[int]) -> Int32:
        """Tokens that may follow a prefix, ascending, without the end token."""
        places = self.behind(prefix)
        found = self.tokens[places[places < len(self.tokens)]]
        if not len(prefix):
            found = np.concatenate([found, self.first[self.first >= 0]])
        return np.unique(found)


class ExtractRule(Rule):
    """A span, whole."""

    summary = "the answer is a span of a passage that the request gives"
    paper = "arXiv 2108.05857"
    Options = ExtractOptions
    Params = ExtractParams

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.passage = functools.lru_cache(PASSAGES)(self._read)

    @classmethod
    def from_options(cls, options: ExtractOptions, vocabulary: Vocabulary) -> ExtractRule:
        """See the base class."""
        return cls(vocabulary)

    @classmethod
    def problem(cls, options: ExtractOptions, params: ExtractParams, asked: Asked) -> str | None:
        """See the base class."""
        if len(params.extract) > options.max_passage:
            return (
                f"extract: {len(params.extract)} characters are not allowed; allowed: {options.max_passage}, which the "
                "server's option max_passage sets"
            )
        return closed_set_problem(asked, "extract")

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """See the base class."""
        for place, row in enumerate(rows):
            if row.end in row.output:
                continue
            index = torch.from_numpy(self._allowed(row.params, row.output, row.end)).long().to(logits.device)
            allowed = logits[place, index]
            logits[place] = -torch.inf
            logits[place, index] = allowed

    def constraint(self, row: Row) -> Span:
        """See the base class."""
        return Span(self, row)

    def _allowed(self, params: ExtractParams, output: Sequence[int], end: int) -> Int32:
        """All that may follow; the end token behind anything, and alone behind what is no span."""
        if len(output) >= params.extract_max_tokens:
            return np.array([end], dtype=np.int32)
        found = self.passage(params.extract).following(output)
        return np.append(found, np.int32(end)) if len(output) or not len(found) else found

    def _read(self, passage: str) -> Passage:
        tokens = np.array(self._vocabulary.encode(passage), dtype=np.int32)
        bare = [self._bare.get(token, -1) for token in tokens.tolist()]
        return Passage(tokens, np.array(bare, dtype=np.int32))

    @functools.cached_property
    def _bare(self) -> dict[int, int]:
        """By token that begins with a space the one that lacks it."""
        by_piece = {piece: token for token, piece in enumerate(self._vocabulary.pieces) if piece}
        return {
            token: by_piece[piece[1:]]
            for piece, token in by_piece.items()
            if piece[:1] == b" " and piece[1:] in by_piece
        }


class Span:
    """A `Constraint`: what continues a span."""

    def __init__(self, rule: ExtractRule, row: Row) -> None:
        self._rule, self._params, self._end = rule, row.params, row.end
        self._path = list(row.output)

    def accept(self, token: int) -> bool:
        """See `Constraint`."""
        taken = token in self._next()
        if taken:
            self._path.append(token)
        return taken

    def rollback(self, num_tokens: int) -> None:
        """See `Constraint`."""
        if num_tokens:
            del self._path[-num_tokens:]

    def forced(self, most: int) -> list[int]:
        """See `Constraint`."""
        before = len(self._path)
        while len(self._path) - before < most and len(allowed := self._next()) == 1:
            self._path.append(int(allowed[0]))
        tokens = self._path[before:]
        self.rollback(len(tokens))
        return tokens

    def _next(self) -> Int32:
        if self._end in self._path:
            return np.empty(0, dtype=np.int32)
        return self._rule._allowed(self._params, self._path, self._end)
