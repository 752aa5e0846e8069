# SPDX-License-Identifier: Apache-2.0
"""Medusa: heads on the target's last hidden state guess the next tokens but one, but two and so on, all at once.

Head ``i`` says what stands ``i + 2`` places behind the token that the hidden state was computed for, whatever stands
between: all nodes of a depth have one distribution, and a tree costs one pass of the heads, of one row a request.

Source: "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", arXiv 2401.10774.

Deviations: the tree is not a fixed one, of accuracies measured beforehand, but the one of the largest products of
this step's own probabilities; a request that samples without a seed has a tree drawn without replacement, as DySpec
grows it (arXiv 2410.11744). Acceptance is lossless; typical acceptance, the paper's, is not there. Medusa-1 only: the
target stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from pydantic import Field

from vllm_ext.kernels.user_paths import UserPath
from vllm_ext.proposers.base import MethodOptions
from vllm_ext.proposers.draft_model import DraftModelProposer
from vllm_ext.proposers.dyspec import SampledTree
from vllm_ext.proposers.likeliest_tree import LikeliestTree
from vllm_ext.proposers.sampled import TreeBuilder

ALL = 64  # nodes asked about for each of a tree's: asking costs nothing, once the heads have run


class MedusaOptions(MethodOptions):
    """Options of ``medusa_tree``."""

    model: UserPath = Field(
        min_length=1,
        description="folder or hub name of heads for the target, in vLLM's layout of Medusa: `vllm-ext train heads`",
    )
    max_depth: int = Field(default=16, ge=1, le=32, description="deepest node; not below the last head's")


class Medusa(DraftModelProposer):
    """Trees of independent heads."""

    summary: ClassVar[str] = "trained heads on the last hidden state, one a depth"
    paper: ClassVar[str] = "arXiv 2401.10774"
    Options: ClassVar[type[MethodOptions]] = MedusaOptions
    on_v2 = None
    why_v1 = "reads hidden states that V2 does not hand out yet"
    one_pass: ClassVar[bool] = True

    @classmethod
    def check(cls, options: MedusaOptions, vocab_size: int, tokenizer_hash: Callable[[], str]) -> None:
        """See `Proposer.check`; the folder is read where the target's shape is known."""

    def drawn(self, num_nodes: int, max_depth: int) -> TreeBuilder:
        """See `DraftModelProposer.drawn`."""
        return SampledTree(num_nodes, max_depth, self.chance)

    def chosen(self, num_nodes: int, max_depth: int) -> TreeBuilder:
        """See `DraftModelProposer.chosen`."""
        return LikeliestTree(num_nodes, max_depth, ALL)
