# SPDX-License-Identifier: Apache-2.0
"""Rule dola: what the last layer says more than an earlier one, among what it finds plausible.

``q_N`` is what the model says, ``q_j`` what its head makes of the hidden states after layer ``j``. Of the candidate
layers the one is taken, row by row, whose ``q_j`` is farthest from ``q_N`` by Jensen-Shannon divergence, and ``p`` is
the softmax of ``log q_N - log q_j`` over tokens with ``q_N >= alpha max q_N``.

Source: "DoLa: Decoding by Contrasting Layers", arXiv 2309.03883, sections 2.1 to 2.3. As in the authors' code early
hidden states do not pass the final norm, unless ``norm`` says so. That code takes one layer for a whole batch, and
compares divergences with their arguments exchanged; here each row has its own, by the paper's definition. What a
grammar or another rule has ruled out before is ruled out in all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field

from vllm_ext.samplers.base import Row, RuleParams
from vllm_ext.samplers.steering import SteeringOptions, SteeringRule, plausible


class DolaOptions(SteeringOptions):
    """Of the server."""

    candidates: Literal["low", "high"] | list[int] = Field(
        default="low",
        description="early layers to contrast with: every second one of the lower or the higher half, or a list of "
        "how many layers to run; one alone needs no choice and costs least",
    )
    alpha: float = Field(
        default=0.1,
        gt=0.0,
        le=1.0,
        description="plausible tokens have this part of the likeliest one's probability",
    )
    norm: bool = Field(default=False, description="whether early hidden states pass the final norm")


class DolaParams(RuleParams):
    """Of a request; what it leaves out is the server's."""

    dola: bool = Field(default=True, description="whether the request is under the rule")
    dola_alpha: float | None = Field(default=None, gt=0.0, le=1.0)


class DolaRule(SteeringRule):
    """Contrast with an early layer."""

    name = "dola"
    summary = "what the last layer says more than an early one, among its plausible tokens"
    paper = "arXiv 2309.03883"
    Options = DolaOptions
    Params = DolaParams

    @classmethod
    def layers(cls, options: DolaOptions, num_layers: int) -> Sequence[int]:
        """See the base class. Not the embeddings: under a head that is tied to them they say the input token."""
        half = num_layers // 2
        if options.candidates == "low":
            return range(2, half, 2) if num_layers > 4 else [1]
        if options.candidates == "high":
            return range(half + half % 2, num_layers, 2)
        wrong = [layer for layer in options.candidates if not 0 <= layer < num_layers]
        if wrong or not options.candidates or sorted(set(options.candidates)) != options.candidates:
            raise ValueError(
                f"candidates={options.candidates} is not allowed; allowed: 'low', 'high' or some of 0 to "
                f"{num_layers - 1}, ascending"
            )
        return options.candidates

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """See the base class."""
        early = self.beside.layers(self.layer_numbers, self.options.norm)
        early.masked_fill_(logits == -torch.inf, -torch.inf)
        log_q = logits.log_softmax(1)
        chosen = early[0]
        if len(early) > 1:
            log_early = early.log_softmax(2)
            farthest = divergence(log_q, log_early).argmax(0)
            chosen = log_early[farthest, torch.arange(len(logits), device=logits.device)]
        kept = plausible(logits, self.values(rows, "alpha", logits))
        logits.copy_(torch.where(kept, log_q - chosen, -torch.inf))


def divergence(log_q: torch.Tensor, log_early: torch.Tensor) -> torch.Tensor:
    """Jensen-Shannon divergence in nats, ``[num_layers, num_rows]``.

    Args:
        log_q: ``[num_rows, vocab]`` log-probabilities.
        log_early: ``[num_layers, num_rows, vocab]``.
    """
    q, early = log_q.exp(), log_early.exp()
    log_middle = ((q + early) / 2).clamp_min_(torch.finfo(q.dtype).tiny).log_()
    # Not one difference of logarithms each: of tokens that are ruled out these are minus infinity, times nothing.
    return (torch.xlogy(q, q) + torch.xlogy(early, early) - (q + early) * log_middle).sum(2) / 2
