# SPDX-License-Identifier: Apache-2.0
"""DEL: early exit whose exit and length are chosen anew each step (`exit_choice`), and that stops when it is unsure.

Source: "DEL: Context-Aware Dynamic Exit Layer for Efficient Self-Speculative Decoding", arXiv 2504.05598. The paper's
rule for stopping was not found in full; ours: below the middle between what accepted and rejected tokens of an exit
were given, both recent means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field, field_validator

from vllm_ext.proposers.base import MAX_SPECULATIVE_TOKENS, MethodOptions, Request, VerifiedRows
from vllm_ext.proposers.self_draft import HeadOptions, SelfDraftOptions, SelfDraftProposer
from vllm_ext.proposers.tree import DraftTree

MOST_EXITS = 6  # by default: each is a piece of the model to compile
RATE = 0.05  # of the running means
ACCEPTED, REJECTED = 0.8, 0.0  # before any is seen: as good as no threshold, when the second is 0


class DynamicExitOptions(HeadOptions, SelfDraftOptions):
    """Options of `del`."""

    num_speculative_tokens: int = Field(
        default=8,
        ge=1,
        le=MAX_SPECULATIVE_TOKENS,
        description="most draft tokens of one request verified in one step",
    )
    exits: list[int] | None = Field(
        default=None,
        description="after how many layers the model may exit; none: up to six, spread over its first two thirds",
    )
    watch_every: int = Field(
        default=8,
        ge=1,
        description="of so many steps that draft, one asks all exits what they would have said",
    )

    @field_validator("exits")
    @classmethod
    def _ascending(cls, exits: list[int] | None) -> list[int] | None:
        if exits is not None and (not exits or exits != sorted(set(exits)) or exits[0] < 1):
            raise ValueError("must be numbers of layers from 1, ascending, each once; correct it")
        return exits


class DynamicExit(SelfDraftProposer):
    """A chain by the layers below the exit that pays most."""

    summary: ClassVar[str] = (
        "early exit, with exit layer and length chosen each step by what exits have shown"
    )
    paper: ClassVar[str] = "arXiv 2504.05598"
    Options: ClassVar[type[MethodOptions]] = DynamicExitOptions

    def __init__(self, options: DynamicExitOptions) -> None:
        super().__init__(options)
        self.exit_layer = 0  # set by the adapter: the one that drafts
        self._means: dict[
            int, list[float]
        ] = {}  # by exit: of rejected tokens' probabilities, of accepted ones'
        self._drafted: dict[
            str, tuple[int, list[float]]
        ] = {}  # by request, its exit and its nodes' probabilities

    def exits(self, num_layers: int) -> list[int]:
        """After how many of the model's layers it may exit, ascending."""
        if self.options.exits is not None:
            return list(self.options.exits)
        last = max(2 * num_layers // 3, 1)
        count = min(MOST_EXITS, last)
        return sorted({round(last * (index + 1) / count) for index in range(count)})

    def width(self) -> int:
        """See `SelfDraftProposer`: a chain."""
        return 1

    def least_sure(self) -> float:
        """See `SelfDraftProposer`: the threshold of the exit in use."""
        rejected, accepted = self._means.get(self.exit_layer, (REJECTED, ACCEPTED))
        return 0.5 * (rejected + accepted) if rejected > 0.0 else 0.0

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """See `Proposer.propose`."""
        trees = super().propose(requests)
        for request, tree in zip(requests, trees, strict=True):
            paths = np.array([1.0, *tree.probabilities])
            own = paths[1:] / paths[tree.parents + 1]
            self._drafted[request.request_id] = self.exit_layer, own.tolist()
        return trees

    def observe(self, rows: VerifiedRows) -> None:
        """Learn how sure the draft was of what was accepted, and of the first that was not."""
        for index, request_id in enumerate(rows.request_ids):
            exit_layer, sure = self._drafted.pop(request_id, (0, []))
            accepted = rows.accepted[rows.row_start[index] + 1 : rows.row_start[index + 1]].tolist()
            for right, value in zip(accepted, sure, strict=False):
                means = self._means.setdefault(exit_layer, [REJECTED, ACCEPTED])
                before = means[right]
                means[right] = before + RATE * (value - before) if before > 0.0 else value
                if not right:
                    break

    def finish(self, request_id: str) -> None:
        """See `Proposer.finish`."""
        self._drafted.pop(request_id, None)
