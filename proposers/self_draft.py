# SPDX-License-Identifier: Apache-2.0
"""Drafting with the model's own layers: options and trees that its methods have in common.

Nothing is drawn: the likeliest nodes are verified by the target's own draws (`tree_walk`), so that greedy and seeded
output is what it is without drafts, token for token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, Field

from vllm_ext.kernels.user_paths import UserPath
from vllm_ext.proposers.base import MAX_SPECULATIVE_TOKENS, MethodOptions
from vllm_ext.proposers.draft_model import DraftModelProposer, PassOptions
from vllm_ext.proposers.likeliest_tree import LikeliestTree
from vllm_ext.proposers.sampled import TreeBuilder

if TYPE_CHECKING:
    from vllm_ext.proposers.sampled_device import Growth  # with torch


class SelfDraftOptions(PassOptions):
    """Options of all methods that draft with the model's own layers."""

    num_speculative_tokens: int = Field(
        default=4,
        ge=1,
        le=MAX_SPECULATIVE_TOKENS,
        description="most draft tokens (tree nodes) of one request verified in one step",
    )


class ShapeOptions(SelfDraftOptions):
    """Options of those whose drafts have a shape that the user chooses."""

    width: int = Field(default=1, ge=1, le=8, description="most children of a node; 1: chains")
    least_sure: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="below a node that the draft gives less than this probability nothing is drafted",
    )


class HeadOptions(BaseModel):
    """Options of those with early exits."""

    heads: UserPath | None = Field(
        default=None,
        min_length=1,
        description="file that `vllm-ext train exits` has made for this model; none: the model's own norm and head",
    )


class SelfDraftProposer(DraftModelProposer):
    """Likeliest nodes for every request."""

    Options: ClassVar[type[MethodOptions]] = ShapeOptions
    # Few nodes, and from most of the layers: what a model that is not trained for it drafts is slow and wrong.
    tested_with: ClassVar[Mapping[str, Any]] = {"num_speculative_tokens": 3, "width": 2}
    least_worth = 1.0  # of a path: below less nothing is drafted

    def width(self) -> int:
        """Most children of a node."""
        return int(self.options.width)

    def worth(self, probability: float) -> float:
        """The chance that a node of this probability is accepted, given its parents: here whether it is sure enough."""
        return float(probability >= self.options.least_sure)

    def drawn(self, num_nodes: int, max_depth: int) -> TreeBuilder:
        """See `DraftModelProposer`: nothing is."""
        return self.chosen(num_nodes, max_depth)

    def chosen(self, num_nodes: int, max_depth: int) -> TreeBuilder:
        """See `DraftModelProposer`. Leaves need slots too, so no more nodes are asked about than the tree has."""
        return LikeliestTree(num_nodes, max_depth, 1, self.width(), self.worth, self.least_worth)

    def chained(self, num_nodes: int, max_depth: int) -> TreeBuilder:
        """See `DraftModelProposer`."""
        return LikeliestTree(num_nodes, max_depth, 1, 1, self.worth, self.least_worth)

    def drawn_on_device(self, num_nodes: int) -> Growth:
        """See `DraftModelProposer`: nothing is drawn."""
        return self.chosen_on_device(num_nodes)

    def chosen_on_device(self, num_nodes: int) -> Growth:
        """See `DraftModelProposer`."""
        from vllm_ext.proposers.likeliest_device import Likeliest

        options = self.options
        return Likeliest(num_nodes, options.max_depth, 1, self.width(), options.least_sure)
