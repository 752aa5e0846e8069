# SPDX-License-Identifier: Apache-2.0
"""The most probable span of a passage, over all of them: exact, where greedy decoding under a mask and beams are not.

`best_span` reads it off two matrices, as the paper does. `Search` finds it without most of their cells: a beginning's
probability bounds that of every span that goes on from it, so that the most promising beginnings are opened first,
until the best whole span is as probable as any that is still open. Spans that are spelled alike are one.

Source: "How Optimal is Greedy Decoding for Extractive Question Answering?", arXiv 2108.05857 (Exact-extract). There all
suffixes of the passage are read in one batch; the search is ours.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vllm_ext.kernels.sparse import Float64
from vllm_ext.kernels.trie import Int32
from vllm_ext.samplers.passage import Passage


class Span(NamedTuple):
    """A span by its place."""

    start: int
    length: int
    score: float


def best_span(losses: Float64, ends: Float64, normalize: bool = False) -> Span:
    """The span of least score; of several the first, and of those the shortest.

    Args:
        losses: float64 ``[num_tokens, longest]``: at ``[i, j]`` minus the log-probability of token ``i + j`` of the
            passage behind the tokens from ``i`` to it, infinite behind the passage's end. Rows may come in parts.
        ends: likewise, of the end behind the tokens from ``i`` up to and with ``i + j``.
        normalize: divide each score by the number of tokens, the end among them.
    """
    longest = losses.shape[1]
    scores = np.cumsum(losses, axis=1) + ends
    if normalize:
        scores /= np.arange(longest) + 2
    start, last = divmod(int(scores.argmin()), longest)
    return Span(start, last + 1, float(scores[start, last]))


class Question(NamedTuple):
    """Which log-probabilities behind a beginning are wanted."""

    tokens: tuple[int, ...]  # the beginning
    wanted: Int32  # ids; the end's last, where the beginning is a span


class Found(NamedTuple):
    """A whole span, by its tokens."""

    tokens: tuple[int, ...]
    logprob: float  # of all of them and the end
    score: float  # the same, or divided by their number


class _Open(NamedTuple):
    """A beginning. Those of least loss are opened first, and of equal ones the longest, which are nearer to an end."""

    loss: float  # minus the most that a span that begins so may score
    left: int  # tokens that may come
    tokens: tuple[int, ...]
    logprob: float


class Search:
    """A search that is told what it asks for: several of them can go on side by side."""

    def __init__(
        self, passage: Passage, end: int, max_tokens: int, normalize: bool = False, width: int = 8
    ) -> None:
        """
        Args:
            passage: whose spans.
            end: the token that ends an answer.
            max_tokens: of the longest span.
            normalize: divide each log-probability by the number of tokens, the end among them.
            width: beginnings asked about at a time. More cost more rows, and fewer rounds.
        """
        self._passage, self._end, self._normalize, self._width = passage, end, normalize, width
        left = min(max_tokens, passage.room(None))
        self._open = [_Open(0.0, left, (), 0.0)] if left else []
        self._asked: list[_Open] = []
        self.found: Found | None = None  # the best so far

    def ask(self) -> list[Question]:
        """What to look up next; nothing where the search is done."""
        self._asked = []
        while self._open and len(self._asked) < self._width:
            least = heapq.heappop(self._open)
            if self.found is not None and -least.loss <= self.found.score:
                self._open.clear()
                break
            self._asked.append(least)
        return [Question(begun.tokens, self._wanted(begun)) for begun in self._asked]

    def _wanted(self, begun: _Open) -> Int32:
        return self._passage.allowed(self._passage.behind(begun.tokens), begun.left, self._end)

    def tell(self, questions: Sequence[Question], answers: Sequence[Sequence[float]]) -> None:
        """Takes the log-probabilities of the last questions' tokens, at temperature 1, over the whole vocabulary."""
        for begun, question, answer in zip(self._asked, questions, answers, strict=True):
            places = self._passage.behind(begun.tokens)
            for token, logprob in zip(question.wanted.tolist(), map(float, answer), strict=True):
                total = begun.logprob + logprob
                if total == -np.inf:
                    continue
                if token == self._end:
                    self._offer(begun.tokens, total)
                    continue
                room = self._passage.room(self._passage.after(places, token))
                left = min(begun.left - 1, room)
                loss = -total / (len(begun.tokens) + left + 2) if self._normalize else -total
                heapq.heappush(self._open, _Open(loss, left, (*begun.tokens, token), total))

    def _offer(self, tokens: tuple[int, ...], logprob: float) -> None:
        score = logprob / (len(tokens) + 1) if self._normalize else logprob
        if self.found is None or score > self.found.score:
            self.found = Found(tokens, logprob, score)


def search(
    look_up: Callable[[Sequence[Question]], Sequence[Sequence[float]]],
    passage: Passage,
    end: int,
    max_tokens: int,
    normalize: bool = False,
    width: int = 8,
) -> Found | None:
    """The most probable span; None where the passage has no token, or no span has a chance. See `Search`."""
    one = Search(passage, end, max_tokens, normalize, width)
    while questions := one.ask():
        one.tell(questions, look_up(questions))
    return one.found
