# SPDX-License-Identifier: Apache-2.0
"""Heads that are asked node by node: what they say depends on the branch, and each depth of a tree is a pass.

Alone they grow trees as draft models do. In a hybrid they go on below what its other drafters say (`joint_tree`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from vllm_ext.proposers.base import Request
from vllm_ext.proposers.draft_model import DraftModelProposer
from vllm_ext.proposers.dyspec import SampledTree
from vllm_ext.proposers.joint_tree import JointTree
from vllm_ext.proposers.sampled import TreeBuilder
from vllm_ext.proposers.tree import DraftTree


class NodeHeads(DraftModelProposer):
    """Trees of such heads."""

    on_v2 = None
    why_v1 = "reads hidden states that V2 does not hand out yet"
    fuses: ClassVar[bool] = True

    beside: Mapping[str, DraftTree] = {}  # set by a hybrid: by request id, what its other drafters propose

    def _builder(self, request: Request) -> TreeBuilder:
        others = self.beside.get(request.request_id)
        if others is None or request.chain:
            return super()._builder(request)
        return JointTree(*self.limits(request), others)

    def drawn(self, num_nodes: int, max_depth: int) -> TreeBuilder:
        """See `DraftModelProposer.drawn`."""
        return SampledTree(num_nodes, max_depth, self.chance)
