# SPDX-License-Identifier: Apache-2.0
"""SpecTr: ``k`` sequences drawn from the draft model independently of each other, as one tree.

Source: "SpecTr: Fast Speculative Decoding via Optimal Transport", arXiv 2310.15141, section 5.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_ext.kernels.chance import Chance
from vllm_ext.proposers.sampled import ROOT, Float64, TreeBuilder


class IndependentDrafts(TreeBuilder):
    """Drafts that agree share their nodes, and count each.

    Args:
        k: drafts.
        length: tokens of each.
        chance: of this request alone; not verification's.
    """

    def __init__(self, k: int, length: int, chance: Chance) -> None:
        super().__init__()
        self.drafts: npt.NDArray[np.int32] = np.zeros((k, length), np.int32)
        self.nodes: npt.NDArray[np.int32] = np.zeros((k, length), np.int32)  # of the tree
        self._chance = chance
        self._depth = 0
        self._children: dict[tuple[int, int], int] = {}  # by parent and token

    def wanted(self) -> list[int]:
        """See `TreeBuilder.wanted`."""
        if self._depth == self.drafts.shape[1] or not len(self.drafts):
            return []
        return [ROOT] if self._depth == 0 else sorted(set(self.nodes[:, self._depth - 1].tolist()))

    def give(self, rows: Float64) -> None:
        """See `TreeBuilder.give`."""
        self.q.update(zip(self.wanted(), rows, strict=True))
        for draft in range(len(self.drafts)):
            parent = int(self.nodes[draft, self._depth - 1]) if self._depth else ROOT
            token = self._chance.draw(self.q[parent])
            if (parent, token) not in self._children:
                self._children[parent, token] = self.add(token, parent)
            self.drafts[draft, self._depth] = token
            self.nodes[draft, self._depth] = self._children[parent, token]
        self._depth += 1
