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

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import numpy as np
from pydantic import Field

from vllm_ext.kernels.sparse import Sparse
from vllm_ext.kernels.user_paths import UserPath
from vllm_ext.proposers.base import MethodOptions, Request
from vllm_ext.proposers.draft_model import DraftModel, Rows, is_drawn, shaped
from vllm_ext.proposers.dyspec import DynamicTreeProposer
from vllm_ext.proposers.sampled import ROOT
from vllm_ext.proposers.tree import DraftTree


class AllDepths(DraftModel, Protocol):
    """Heads that have run."""

    def depths(self, request_id: str) -> Rows:
        """Of a request ``[num_heads, support]``: by depth what all nodes of it are drawn from."""


class MedusaOptions(MethodOptions):
    """Options of ``medusa_tree``."""

    model: UserPath = Field(
        min_length=1,
        description="folder or hub name of heads for the target, in vLLM's layout of Medusa: `vllm-ext train heads`",
    )
    max_depth: int = Field(default=16, ge=1, le=32, description="deepest node; not below the last head's")


class Medusa(DynamicTreeProposer):
    """Trees of independent heads."""

    summary: ClassVar[str] = "trained heads on the last hidden state, one a depth"
    paper: ClassVar[str] = "arXiv 2401.10774"
    Options: ClassVar[type[MethodOptions]] = MedusaOptions
    in_rounds: ClassVar[bool] = False
    tested_with: ClassVar[Mapping[str, Any]] = {}  # tests make heads for their models
    draft: AllDepths

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """See `Proposer.propose`. Chosen trees need no rounds: what the heads say is all there."""
        drawn = [self.draws and is_drawn(request) for request in requests]
        # Those that are not its own have no room there.
        rest = [
            request if draws else replace(request, budget_tokens=0)
            for request, draws in zip(requests, drawn, strict=True)
        ]
        trees = super().propose(rest)
        for index, request in enumerate(requests):
            if request.has_room and not drawn[index]:
                rows = self.draft.depths(request.request_id)
                depths = [shaped(ids, log_q, request.sampling) for ids, log_q in zip(*rows, strict=True)]
                num_nodes, max_depth = self.limits(request)
                trees[index] = product_tree(depths[:max_depth], num_nodes)
        return trees


def product_tree(depths: Sequence[Sparse], num_nodes: int) -> DraftTree:
    """The nodes of the largest path probabilities, where all nodes of a depth have one distribution.

    Args:
        depths: by depth the distribution, likeliest first.
        num_nodes: most nodes.
    """
    logs = [np.log(depth.q).tolist() for depth in depths]
    ids = [depth.ids.tolist() for depth in depths]
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    # Negated logarithm of the path, a number that settles ties, parent, its own negated, depth, rank.
    heap = [(-logs[0][0], 0, ROOT, 0.0, 0, 0)] if depths else []
    while heap and len(tokens) < num_nodes:
        cost, _, parent, above, depth, rank = heapq.heappop(heap)
        tokens.append(ids[depth][rank])
        parents.append(parent)
        chances.append(math.exp(-cost))
        number = 2 * len(tokens)
        if rank + 1 < len(ids[depth]):
            heapq.heappush(heap, (above - logs[depth][rank + 1], number, parent, above, depth, rank + 1))
        if depth + 1 < len(depths):
            below = cost - logs[depth + 1][0]
            heapq.heappush(heap, (below, number + 1, len(tokens) - 1, cost, depth + 1, 0))
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(chances, np.float32))
