# SPDX-License-Identifier: Apache-2.0
"""Trees that are chosen beside such that are drawn, grown by the same passes of the draft model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from vllm_ext.proposers.sampled_device import ROOT, Asked, Grown, Growth, Limits, Noise, Rows


class Mixed(Growth):
    """Two growths of a batch, of which each request has one.

    Args:
        chosen: of the requests that are not drawn.
        drawn: of those that are.
        is_drawn: bool ``[requests]``.
    """

    def __init__(self, chosen: Growth, drawn: Growth, is_drawn: torch.Tensor) -> None:
        super().__init__(max(chosen.num_nodes, drawn.num_nodes), max(chosen.max_depth, drawn.max_depth))
        self._growths, self._is_drawn = (chosen, drawn), is_drawn
        self.independent = drawn.independent
        self._widths = common_widths(chosen, drawn)
        self._grows = [True, True]

    @property
    def widths(self) -> Sequence[int]:
        """See `Growth.widths`: the wider one's."""
        return self._widths

    def _shift(self, growth: Growth, depth: int) -> int:
        """From a growth's own places to these, of nodes of a depth."""
        return sum(self._widths[: depth - 1]) - sum(growth.widths[: depth - 1]) if depth else 0

    def give(self, depth: int, rows: Rows, limits: Limits, noise: Noise) -> Asked | None:
        """See `Growth.give`."""
        given: list[Asked | None] = [None, None]
        for side, growth in enumerate(self._growths):
            if self._grows[side]:
                width = growth.widths[depth - 1] if depth else 1
                own = growth.give(depth, Rows(rows.ids[:, :width], rows.q[:, :width]), limits, noise)
                given[side], self._grows[side] = own and self._common(own, growth, depth), own is not None
        chosen, drawn = given
        if chosen is None or drawn is None:
            return chosen or drawn
        here = self._is_drawn[:, None]
        return Asked(*(torch.where(here, b, a) for a, b in zip(chosen, drawn, strict=True)))

    def _common(self, asked: Asked, growth: Growth, depth: int) -> Asked:
        missing = self._widths[depth] - asked.tokens.shape[1]
        parents = torch.where(asked.parents >= 0, asked.parents + self._shift(growth, depth), ROOT)
        return Asked(
            torch.nn.functional.pad(asked.tokens, (0, missing)),
            torch.nn.functional.pad(parents, (0, missing), value=ROOT),
        )

    def grown(self) -> Grown:
        """See `Growth.grown`."""
        both = []
        for growth in self._growths:
            own = growth.grown()
            places = own.places
            for depth in range(1, 1 + len(growth.widths)):
                here = (own.depths == depth) & (own.places >= 0)
                places = torch.where(here, own.places + self._shift(growth, depth), places)
            both.append(own._replace(places=places))
        most = max(of.tokens.shape[1] for of in both)
        chosen, drawn = (
            [torch.nn.functional.pad(part, (0, most - part.shape[1]), value=-1) for part in of] for of in both
        )
        here = self._is_drawn[:, None]
        return Grown(*(torch.where(here, b, a) for a, b in zip(chosen, drawn, strict=True)))


def common_widths(*growths: Growth) -> list[int]:
    """By depth, those of the widest growth."""
    pairs = itertools.zip_longest(*(growth.widths for growth in growths), fillvalue=0)
    return [max(pair) for pair in pairs]
