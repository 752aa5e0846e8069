# SPDX-License-Identifier: Apache-2.0
"""The random decisions of verifiers and of proposers that sample, behind an interface that tests can enumerate."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from vllm_ext.kernels.sparse import Float64


class Chance(Protocol):
    """Where decisions come from. Draft and verification have one each, with independent noise."""

    def accepts(self, numerator: float, denominator: float) -> bool:
        """Yes with probability ``min(1, numerator / denominator)``; neither is negative."""

    def draw(self, weights: Float64) -> int:
        """An index, with probability in proportion to its weight; not all of them are 0."""


class RandomChance:
    """Decisions by a generator.

    Args:
        generator: used for nothing else.
    """

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def accepts(self, numerator: float, denominator: float) -> bool:
        """See `Chance`."""
        # No division: both may be tiny, and 0 / 0 is not accepted.
        return bool(self._generator.random() * denominator < numerator)

    def draw(self, weights: Float64) -> int:
        """See `Chance`."""
        sums = np.cumsum(weights)
        # Strictly above the point, so that nothing of weight 0 is drawn; rounding may take it to the end.
        place = int(np.searchsorted(sums, self._generator.random() * sums[-1], side="right"))
        return min(place, int(np.searchsorted(sums, sums[-1])))
