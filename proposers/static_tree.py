# SPDX-License-Identifier: Apache-2.0
"""A draft model's tree whose shape never changes: what dynamic trees are measured by.

Every node of a depth has the same number of children. Requests that sample have theirs drawn without replacement
(`rsd`); all others the likeliest. With ``branching`` 1 throughout it is the chain of vLLM's ``draft_model``.

Source: "SpecInfer", arXiv 2305.09781, section 3 (expansion-based trees of fixed branching). Deviation: its trees are
drawn with replacement and verified by multi-step speculative sampling; without accepts more (arXiv 2402.14160).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from vllm_ext.proposers.rsd import BranchingTree, RsdC
from vllm_ext.proposers.sampled import TreeBuilder

if TYPE_CHECKING:
    from vllm_ext.proposers.sampled_device import Growth  # with torch


class StaticTree(RsdC):
    """Trees of a fixed branching, of the likeliest tokens where nothing is drawn."""

    summary: ClassVar[str] = "a draft model's tree of fixed branching"
    paper: ClassVar[str] = "arXiv 2305.09781"

    def chosen(self, num_nodes: int, max_depth: int) -> TreeBuilder:
        """See `DraftModelProposer.chosen`."""
        return BranchingTree(self.options.branching[:max_depth], num_nodes, chance=None)

    def chosen_on_device(self, num_nodes: int) -> Growth:
        """See `DraftModelProposer.chosen_on_device`."""
        from vllm_ext.proposers.rsd_device import FixedBranching

        return FixedBranching(self.options.branching[: self.options.max_depth], num_nodes, drawn=False)
