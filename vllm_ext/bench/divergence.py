# SPDX-License-Identifier: Apache-2.0
"""How far what one model says of each place of a text is from what another says."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PARTS = 8  # of a context, for figures by position


@dataclass(frozen=True)
class Place:
    """A token of a text: its log-probability in nats, and those of the likeliest tokens there, by id."""

    log_prob: float
    likeliest: dict[int, float]

    @property
    def best(self) -> int:
        """The likeliest token."""
        return max(self.likeliest, key=lambda token: self.likeliest[token])


def perplexity(windows: Sequence[Sequence[Place]]) -> float:
    """Of all places."""
    return math.exp(-statistics.fmean(place.log_prob for window in windows for place in window))


def divergence(plain: Sequence[Sequence[Place]], found: Sequence[Sequence[Place]]) -> dict[str, Any]:
    """How far what an engine says is from what vLLM's cache makes it say.

    Args:
        plain: by window, its places.
        found: the same of the other engine.

    Returns:
        ``same_likeliest``, the part of places with the same likeliest token; ``kl``, nats, a lower bound of the mean
        KL divergence from plain: that over the tokens both have among their likeliest, and all others as one;
        ``by_position``, for each part of the context: its last token, ``kl`` and ``perplexity_ratio``; ``by_window``,
        the latter for each window, and of its last quarter: by them two methods can be told from noise, window by
        window.
    """
    pairs = [list(zip(one, other, strict=True)) for one, other in zip(plain, found, strict=True)]
    everything = [pair for window in pairs for pair in window]
    size = min(map(len, pairs))
    by_position = []
    for part in range(PARTS):
        begin, end = part * size // PARTS, (part + 1) * size // PARTS
        inside = [pair for window in pairs for pair in window[begin:end]]
        by_position.append(
            {
                "end": end,
                "kl": statistics.fmean(kl(*pair) for pair in inside),
                "perplexity_ratio": _perplexity_ratio(inside),
            }
        )
    return {
        "same_likeliest": statistics.fmean(a.best == b.best for a, b in everything),
        "kl": statistics.fmean(kl(*pair) for pair in everything),
        "by_position": by_position,
        "by_window": [
            {
                "perplexity_ratio": _perplexity_ratio(window),
                "last_quarter": _perplexity_ratio(window[len(window) * 3 // 4 :]),
            }
            for window in pairs
        ],
    }


def _perplexity_ratio(pairs: Sequence[tuple[Place, Place]]) -> float:
    return math.exp(statistics.fmean(plain.log_prob - found.log_prob for plain, found in pairs))


def kl(plain: Place, found: Place) -> float:
    """Of one place; see `divergence`."""
    total, left, other_left = 0.0, 1.0, 1.0
    for token in plain.likeliest.keys() & found.likeliest.keys():
        p, q = plain.likeliest[token], found.likeliest[token]
        total += math.exp(p) * (p - q)
        left, other_left = left - math.exp(p), other_left - math.exp(q)
    # What is rounded away may leave a little less than nothing.
    left, other_left = max(left, 0.0), max(other_left, 1e-9)
    return total + (left * math.log(left / other_left) if left > 0 else 0.0)
