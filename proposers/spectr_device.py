# SPDX-License-Identifier: Apache-2.0
"""`spectr` on the device: each draft's token of each depth has a row, also where drafts agree.

Of those that agree the first stands for all: the others' rows are no nodes, and say only whose child they count as.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_ext.proposers.sampled_device import NONE, ROOT, Asked, Grown, Growth, Limits, Noise, Rows, gumbel


class IndependentDrafts(Growth):
    """See `vllm_ext.proposers.spectr.IndependentDrafts`.

    Args:
        drafts: how many, if there are nodes for them.
        max_depth: tokens of each, at most.
        num_nodes: of all.
    """

    independent = True

    def __init__(self, drafts: int, max_depth: int, num_nodes: int) -> None:
        self._drafts = min(drafts, num_nodes)
        super().__init__(num_nodes, min(max_depth, num_nodes // self._drafts))
        # By depth, [requests, drafts]: the token, which draft stands for it, and the parent's place.
        self._tokens: list[torch.Tensor] = []
        self._stands: list[torch.Tensor] = []
        self._parents: list[torch.Tensor] = []

    @property
    def widths(self) -> Sequence[int]:
        """See `Growth.widths`."""
        return [self._drafts] * (self.max_depth - 1)

    def give(self, depth: int, rows: Rows, limits: Limits, noise: Noise) -> Asked | None:
        """See `Growth.give`."""
        ids, q = rows
        requests, drafts = len(q), self._drafts
        above = (
            self._stands[-1] if depth else torch.zeros((requests, drafts), dtype=torch.int64, device=q.device)
        )
        # A draft that is stood for has a row of its own, with the same distribution but for rounding: the one that
        # verification will see is its stand-in's.
        index = above[..., None].expand(-1, -1, q.shape[2])
        perturbed = q.gather(1, index).log().to(torch.float64) + gumbel(noise(depth * drafts, drafts))
        tokens = ids.gather(1, index).gather(2, perturbed.argmax(2, keepdim=True))[..., 0]
        agrees = (tokens[:, :, None] == tokens[:, None, :]) & (above[:, :, None] == above[:, None, :])
        self._tokens.append(tokens)
        self._stands.append(agrees.to(torch.int8).argmax(2))  # of equals the first
        parents = (above + (depth - 1) * drafts).to(torch.int32) if depth else torch.full_like(tokens, ROOT)
        self._parents.append(parents)
        return Asked(tokens, parents) if depth + 1 < self.max_depth else None

    def grown(self) -> Grown:
        """See `Growth.grown`."""
        tokens, child_of = torch.cat(self._tokens, 1), torch.cat(self._parents, 1) + 1
        stands = torch.cat(self._stands, 1)
        own = torch.arange(self._drafts, device=tokens.device).repeat(len(self._tokens))
        row = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
        asked = row < sum(self.widths)
        first = stands == own
        depths = torch.cat([torch.full_like(one, d) for d, one in enumerate(self._tokens, 1)], 1)
        places = torch.where(first & asked, row, NONE)
        return Grown(tokens, torch.where(first, child_of, NONE), depths, child_of, places)
