# SPDX-License-Identifier: Apache-2.0
"""`dyspec` on the device: each row's children are drawn at once, in the order in which its slots would be filled.

The largest of log-probabilities plus Gumbel noise are tokens drawn without replacement, in that order (arXiv
1903.06059). The slot of the n-th is worth the chance that verification gets there, times what a token drawn from the
rest may expect. So values are known before their tokens, as `dyspec` demands. Where it asks for fewer nodes than there,
`sampled.widths` says of how many. Chances of acceptance are those with which `acceptance` begins: nothing is learnt
here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_ext.proposers.acceptance import BOUNDS, NUM_RANKS, PRIOR
from vllm_ext.proposers.likeliest_device import BestFirst, Children
from vllm_ext.proposers.sampled_device import Noise, Rows, gumbel

LEAST = 1e-30  # of what is divided by


class DynamicTrees(BestFirst):
    """See `vllm_ext.proposers.dyspec.SampledTree`."""

    def children(self, rows: Rows, base: torch.Tensor, depth: int, noise: Noise) -> Children:
        """Tokens drawn without replacement."""
        number = sum(self._widths[: depth - 1]) + 1 if depth else 0
        tokens, q = in_drawn_order(rows, noise(number, rows.q.shape[1]))
        width = min(self._width, q.shape[2])
        expected, accepted = acceptance(q, width)
        tried = torch.nn.functional.pad((1.0 - accepted[..., :-1]).cumprod(2), (1, 0), value=1.0)
        reach = tried * (base if self._reach is None else self._reach)[..., None]
        # No slot is worth more than the one that is filled before it.
        values = torch.minimum(reach * expected, base[..., None]).cummin(2).values
        values = torch.where(q[..., :width] > 0.0, values, 0.0)
        reach = reach * accepted
        return Children(tokens[..., :width], values, torch.minimum(values, reach), reach)

    def rivals(self, below: torch.Tensor) -> Sequence[torch.Tensor]:
        """First slots of the other newest nodes."""
        return (below,)


class Tables(NamedTuple):
    """What does not depend on a step. Made once: a graph must not copy from the host."""

    bounds: torch.Tensor  # float32 `BOUNDS`
    prior: torch.Tensor  # float32 `PRIOR`
    ranks: torch.Tensor  # int64 [number, 1] its row for each draw
    remaining: torch.Tensor  # float32 [number, support] 1: not drawn before that draw

    @classmethod
    @functools.cache
    def of(cls, device: torch.device, number: int, support: int) -> Tables:
        """For so many draws."""
        bounds, prior = (torch.from_numpy(each).to(device, torch.float32) for each in (BOUNDS, PRIOR))
        ranks = torch.arange(number, device=device)[:, None].clamp(max=NUM_RANKS - 1)
        return cls(bounds, prior, ranks, torch.ones((number, support), device=device).triu())


def acceptance(q: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What verification does with draws, if it gets to them.

    Args:
        q: float32 ``[requests, width, support]`` probabilities, in the order they were drawn.
        number: of draws.

    Returns:
        float32 ``[requests, width, number]`` each: the chance of acceptance before the token was drawn, and of the
        token itself.
    """
    bounds, prior, ranks, remaining = Tables.of(q.device, number, q.shape[2])
    # What is left at each draw. A sum from the end: rounding never lets one token have more than all.
    left = q.flip(2).cumsum(2).flip(2)[..., :number, None]
    chances = q[:, :, None] / left.clamp(min=LEAST) * remaining
    accepted = prior[ranks, torch.bucketize(chances, bounds, right=True)]
    return (chances * accepted).sum(3), accepted.diagonal(dim1=2, dim2=3)


def in_drawn_order(rows: Rows, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of each row, as they are drawn without replacement: int32 ids, and float32 their probabilities.

    Args:
        rows: the distributions.
        uniforms: float64, the shape of ``rows.q``.
    """
    order = (rows.q.log().to(torch.float64) + gumbel(uniforms)).argsort(dim=2, descending=True, stable=True)
    return rows.ids.gather(2, order), rows.q.gather(2, order)
