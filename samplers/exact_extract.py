# SPDX-License-Identifier: Apache-2.0
"""The likeliest span of a passage: of all of them, where decoding token by token may miss it.

A span's score is its tokens' probability and then the end token's. What a prefix has is a bound for all that goes on
from it, so the search asks for the likeliest prefixes first, several at a time, and ends when a whole span is at least
as likely as every prefix left. The result is that of asking for all of them.

Source: "How Optimal is Greedy Decoding for Extractive Question Answering?", arXiv 2108.05857, algorithm of section 3,
which computes every suffix to its end. Deviation: the order, which leaves most of that out; no division by length.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vllm_ext.kernels.sparse import Float64, Int32
from vllm_ext.samplers.extract import Passage

# Of prefixes, each with ids [num], float64 [num]: logarithms of the probabilities of these tokens behind it.
Score = Callable[[Sequence[tuple[int, ...]], Sequence[Int32]], Sequence[Float64]]


class Span(NamedTuple):
    """What was found."""

    tokens: tuple[int, ...]  # without the end token
    log_probability: float  # the end token's included
    rows: int  # prefixes that were asked about


def likeliest(passage: Passage, end: int, max_tokens: int, score: Score, width: int = 16) -> Span:
    """The span with the largest probability; of equal ones the first that was found.

    Args:
        passage: at least one token.
        end: the token that ends an answer.
        max_tokens: most of a span, at least 1.
        score: what the model says.
        width: prefixes to ask about at a time.
    """
    best = Span((), -np.inf, 0)
    rows = 0
    open_prefixes: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]  # minus the log-probability first
    while open_prefixes and -open_prefixes[0][0] > best.log_probability:
        asked = [heapq.heappop(open_prefixes) for _ in range(min(width, len(open_prefixes)))]
        prefixes = [prefix for _, prefix in asked]
        ids = [_next(passage, prefix, end, max_tokens) for prefix in prefixes]
        rows += len(asked)
        for (cost, prefix), its, values in zip(asked, ids, score(prefixes, ids), strict=True):
            for token, value in zip(its.tolist(), (np.asarray(values) - cost).tolist(), strict=True):
                if token == end and prefix:
                    if value > best.log_probability:
                        best = Span(prefix, value, rows)
                elif value > best.log_probability:
                    heapq.heappush(open_prefixes, (-value, (*prefix, token)))
    return best._replace(rows=rows)


def _next(passage: Passage, prefix: tuple[int, ...], end: int, max_tokens: int) -> Int32:
    found = passage.following(prefix) if len(prefix) < max_tokens else np.empty(0, dtype=np.int32)
    return np.append(found[found != end], np.int32(end)) if prefix else found
