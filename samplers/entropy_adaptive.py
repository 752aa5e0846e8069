# SPDX-License-Identifier: Apache-2.0
"""Rule entropy_adaptive: easy stretches are the small companion's, hard ones the target's.

Whichever model is active, its entropies over the last ``window`` tokens are averaged. Above ``threshold`` nats the
target goes on, below it the companion; after a change neither is left for ``dwell`` tokens.

Source: "Entropy Adaptive Decoding", arXiv 2502.06833, section 3. There the large model rests while the small one
writes, which saves what it costs; here both read every token, so that this is what the answer would be, not what it
would cost. What saves passes of the large one is the verification `entropy` of drafts (`proposers.sure_text`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from pydantic import Field

from vllm_ext.samplers.base import Row, RuleParams
from vllm_ext.samplers.steering import CompanionOptions, SteeringRule


class EntropyAdaptiveOptions(CompanionOptions):
    threshold: float = Field(
        default=1.0, ge=0.0, le=100.0, description="mean entropy, in nats, above which the target goes on"
    )
    window: int = Field(default=5, ge=1, le=1024, description="tokens over which entropies are averaged")
    dwell: int = Field(default=10, ge=0, le=100_000, description="tokens after a change before the next")


class EntropyAdaptiveParams(RuleParams):
    """Of a request; what it leaves out is the server's."""

    entropy_adaptive: bool = Field(default=True, description="whether the request is under the rule")
    entropy_adaptive_threshold: float | None = Field(default=None, ge=0.0, le=100.0)


class State(NamedTuple):
    """Behind a token."""

    entropies: tuple[float, ...]  # of the last tokens, as the model saw them that was active
    target: bool  # which was
    since: int  # tokens since it took over, with this one


class EntropyAdaptiveRule(SteeringRule):
    """A switch between target and companion."""

    alone = True
    name = "entropy_adaptive"
    summary = "a smaller model answers where entropy shows easy stretches"
    paper = "arXiv 2502.06833"
    Options = EntropyAdaptiveOptions
    Params = EntropyAdaptiveParams

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """See the base class. The first token is the target's."""
        companion = self.aux_logits.companion().masked_fill(logits == -torch.inf, -torch.inf)
        entropies = torch.stack([entropy(logits), entropy(companion)], 1).tolist()
        switched = []
        for place, (row, (large, small)) in enumerate(zip(rows, entropies, strict=True)):
            before = row.kept.get(len(row.output) - 1)
            target, since = active(before, self.value(row, "threshold"), self.options.dwell)
            seen = () if before is None else before.entropies
            now = (*seen, large if target else small)[-self.options.window :]
            row.kept[len(row.output)] = State(now, target, since)
            if not target:
                switched.append(place)
        if switched:
            logits[switched] = companion[switched]


def active(before: State | None, threshold: float, dwell: int) -> tuple[bool, int]:
    """Whether the next token is the target's, and how many have been the same model's with it."""
    if before is None:
        return True, dwell  # so that the second may be the companion's
    target = sum(before.entropies) / len(before.entropies) > threshold
    if target != before.target and before.since >= dwell:
        return target, 1
    return before.target, before.since + 1


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """In nats, ``[num_rows]``; tokens at minus infinity have no part in it."""
    p = logits.softmax(1)
    return -torch.xlogy(p, p).sum(1)
