# SPDX-License-Identifier: Apache-2.0
"""`dyspec` on the device: each row's children are drawn at once, in the order in which its slots would be filled.

The largest of log-probabilities plus Gumbel noise are tokens drawn without replacement, in that order (arXiv
1903.06059). The slot of the n-th is worth what verification has left when it gets there: its node's value times what
the draft has left after the tokens before it. So values are known before their tokens, as `dyspec` demands. Where it
asks for fewer nodes than there, `sampled_device.widths` says of how many.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_ext.proposers.likeliest_device import BestFirst, Children
from vllm_ext.proposers.sampled_device import Noise, Rows, gumbel


class DynamicTrees(BestFirst):
    """See `vllm_ext.proposers.dyspec.SampledTree`."""

    def children(self, rows: Rows, base: torch.Tensor, depth: int, noise: Noise) -> Children:
        """Tokens drawn without replacement."""
        number = sum(self._widths[: depth - 1]) + 1 if depth else 0
        tokens, q = in_drawn_order(rows, noise(number, rows.q.shape[1]))
        # What is left at each draw. A sum from the end, so that it never grows; rounding may take it over 1.
        left = q.flip(2).cumsum(2).flip(2).clamp(max=1.0)
        tokens, q, left = (part[..., : self._width] for part in (tokens, q, left))
        return Children(tokens, torch.where(q > 0.0, base[..., None] * left, 0.0), base[..., None] * q)

    def rivals(self, below: torch.Tensor) -> Sequence[torch.Tensor]:
        """First slots of the other newest nodes."""
        return (below,)


def in_drawn_order(rows: Rows, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of each row, as they are drawn without replacement: int32 ids, and float32 their probabilities.

    Args:
        rows: the distributions.
        uniforms: float64, the shape of ``rows.q``.
    """
    order = (rows.q.log().to(torch.float64) + gumbel(uniforms)).argsort(dim=2, descending=True, stable=True)
    return rows.ids.gather(2, order), rows.q.gather(2, order)
