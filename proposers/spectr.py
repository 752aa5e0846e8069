# SPDX-License-Identifier: Apache-2.0
"""SpecTr: ``k`` sequences drawn from the draft model independently of each other, as one tree.

Source: "SpecTr: Fast Speculative Decoding via Optimal Transport", arXiv 2310.15141, section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from vllm_ext.kernels.chance import Chance
from vllm_ext.kernels.sparse import Int32, Sparse
from vllm_ext.proposers.base import MethodOptions
from vllm_ext.proposers.draft_model import DraftModelOptions, DraftModelProposer
from vllm_ext.proposers.sampled import ROOT, TreeBuilder
from vllm_ext.proposers.tree import SampledDrafts

if TYPE_CHECKING:
    from vllm_ext.proposers.sampled_device import Growth  # with torch


class IndependentDrafts(TreeBuilder):
    """Drafts that agree share their nodes, and count each.

    Args:
        k: drafts.
        length: tokens of each.
        chance: of this request alone; not verification's.
    """

    def __init__(self, k: int, length: int, chance: Chance) -> None:
        super().__init__()
        self.nodes: Int32 = np.zeros((k, length), np.int32)  # of each draft
        self._chance = chance
        self._depth = 0
        self._children: dict[tuple[int, int], int] = {}  # by parent and token

    def wanted(self) -> list[int]:
        """See `TreeBuilder.wanted`."""
        if self._depth == self.nodes.shape[1] or not len(self.nodes):
            return []
        return [ROOT] if self._depth == 0 else sorted(set(self.nodes[:, self._depth - 1].tolist()))

    def give(self, rows: Sequence[Sparse]) -> None:
        """See `TreeBuilder.give`."""
        self.q.update(zip(self.wanted(), rows, strict=True))
        for draft in range(len(self.nodes)):
            parent = int(self.nodes[draft, self._depth - 1]) if self._depth else ROOT
            row = self.q[parent]
            token = int(row.ids[self._chance.draw(row.q)])
            if (parent, token) not in self._children:
                self._children[parent, token] = self.add(token, parent)
            self.nodes[draft, self._depth] = self._children[parent, token]
        self._depth += 1

    def drawn(self, q: dict[int, Sparse]) -> SampledDrafts:
        """See `TreeBuilder.drawn`."""
        return SampledDrafts(q, self.nodes)


class SpecTrOptions(DraftModelOptions):
    """Options of ``spectr``."""

    drafts: int = Field(default=4, ge=1, le=32, description="drafts drawn independently of each other")


class SpecTr(DraftModelProposer):
    """Independent drafts."""

    summary: ClassVar[str] = "a draft model's drafts, drawn independently of each other"
    paper: ClassVar[str] = "arXiv 2310.15141"
    Options: ClassVar[type[MethodOptions]] = SpecTrOptions
    # How many nodes a tree has, and so whether one is cut, depends on which tokens were drawn.
    whole: ClassVar[bool] = True
    on_v2 = "device"

    def drawn(self, num_nodes: int, max_depth: int) -> TreeBuilder:
        """See `DraftModelProposer.drawn`. In the worst case no two drafts share a node."""
        k = min(self.options.drafts, num_nodes)
        return IndependentDrafts(k, min(num_nodes // k, max_depth), self.chance)

    def drawn_on_device(self, num_nodes: int) -> Growth:
        """See `DraftModelProposer.drawn_on_device`."""
        from vllm_ext.proposers import spectr_device

        return spectr_device.IndependentDrafts(self.options.drafts, self.options.max_depth, num_nodes)
