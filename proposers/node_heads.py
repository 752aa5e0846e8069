# SPDX-License-Identifier: Apache-2.0
"""Heads that are asked node by node: what they say depends on the branch, and each depth of a tree is a pass.

Alone they grow trees as draft models do. In a hybrid they go on below what its other drafters say (`joint_tree`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vllm_ext.proposers.base import Request
from vllm_ext.proposers.dyspec import DynamicTreeProposer
from vllm_ext.proposers.joint_tree import JointTree
from vllm_ext.proposers.sampled import TreeBuilder
from vllm_ext.proposers.tree import DraftTree


class NodeHeads(DynamicTreeProposer):
    """Trees of such heads."""

    fuses: ClassVar[bool] = True
    tested_with: ClassVar[Mapping[str, Any]] = {}  # tests make heads for their models

    # Set by a hybrid, by request id: what its other drafters propose, and what passes have been worth.
    beside: Mapping[str, DraftTree] = {}
    given: Mapping[str, float] = {}

    def _builder(self, request: Request) -> TreeBuilder:
        others = self.beside.get(request.request_id)
        if others is None or request.chain:
            return super()._builder(request)
        return JointTree(*self.limits(request), others, self.given[request.request_id])
