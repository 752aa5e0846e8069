# SPDX-License-Identifier: Apache-2.0
"""DEL: early exit whose exit and length are chosen again each step (`exit_choice`), and that stops where it is unsure.

Source: "DEL: Context-Aware Dynamic Exit Layer for Efficient Self-Speculative Decoding", arXiv 2504.05598. The paper's
rule for stopping was not found in full; ours (as SpecDec++, arXiv 2405.19715, which trains a head to tell): one more
token is drafted while the chance that it is accepted is worth its cost, at the rate the step has anyway. The chance is
that of the path so far, by what the exit's probabilities have been worth, times the exit's mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, field_validator

from vllm_ext.kernels.sparse import Float64
from vllm_ext.proposers.base import MAX_SPECULATIVE_TOKENS, MethodOptions, Request, VerifiedRows
from vllm_ext.proposers.self_draft import HeadOptions, SelfDraftOptions, SelfDraftProposer
from vllm_ext.proposers.tree import DraftTree

MOST_EXITS = 6  # by default: each is a piece of the model to compile
CLASSES = 8  # of probabilities, equally wide
DECAY = 0.99  # of what is known of a class, each time there is new
PRIOR = 2.0  # tokens' worth of trust in the probabilities as they are


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
        le=1_000_000,
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

    summary: ClassVar[str] = "layerskip with exit layer and length chosen each step"
    paper: ClassVar[str] = "arXiv 2504.05598"
    why_v1: ClassVar[str] = "chooses its exits on the host, by what it has seen"
    Options: ClassVar[type[MethodOptions]] = DynamicExitOptions
    tested_with: ClassVar[Mapping[str, Any]] = {"num_speculative_tokens": 3}

    def __init__(self, options: DynamicExitOptions) -> None:
        super().__init__(options)
        self.exit_layer = 0  # set by the adapter: the one that drafts
        self.least_worth = 0.0  # set by the adapter: see `SelfDraftProposer`
        # By exit, of each class of probabilities: tokens accepted, and tokens seen; float64 `[2, CLASSES]`.
        self._known: defaultdict[int, Float64] = defaultdict(_unknown)
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

    def worth(self, probability: float) -> float:
        """See `SelfDraftProposer`: how often tokens of such probabilities were accepted, of the exit in use."""
        accepted, seen = self._known[self.exit_layer][:, _class_of(probability)].tolist()
        return float(accepted / seen)

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
            for right, probability in zip(accepted, sure, strict=False):
                known = self._known[exit_layer][:, _class_of(probability)]
                known *= DECAY
                known += (float(right), 1.0)
                if not right:
                    break

    def finish(self, request_id: str) -> None:
        """See `Proposer.finish`."""
        self._drafted.pop(request_id, None)


def _unknown() -> Float64:
    centres = (np.arange(CLASSES) + 0.5) / CLASSES
    return PRIOR * np.array([centres, np.ones(CLASSES)])


def _class_of(probability: float) -> int:
    return min(int(probability * CLASSES), CLASSES - 1)
