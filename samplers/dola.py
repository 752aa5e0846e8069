# SPDX-License-Identifier: Apache-2.0
"""Rule dola: what the last layer says more than an earlier one, among what it finds plausible.

``q_N`` is what the model says, ``q_j`` what its head makes of the hidden states after layer ``j``. Of the candidate
layers the one is taken, row by row, whose ``q_j`` is farthest from ``q_N`` by Jensen-Shannon divergence, and ``p`` is
the softmax of ``log q_N - log q_j`` over tokens with ``q_N >= alpha max q_N``.

Source: "DoLa: Decoding by Contrasting Layers", arXiv 2309.03883, sections 2.1 to 2.3. As in the authors' code early
hidden states do not pass the final norm, unless ``norm`` says so. That code takes one layer for a whole batch, and
compares divergences with their arguments exchanged; here each row has its own, by the paper's definition, over the
128 likeliest tokens unless ``among`` says otherwise. What a grammar or another rule has ruled out before is ruled out
in all layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field

from vllm_ext.samplers.base import Row, RuleParams
from vllm_ext.samplers.plausible import Plausible, leave, plausible, plausible_mask
from vllm_ext.samplers.steering import SteeringOptions, SteeringRule

LARGE = 8192  # tokens of a row whose temporaries had better stay in a CPU's cache


class DolaOptions(SteeringOptions):
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
    among: int | None = Field(
        default=128,
        ge=2,
        le=4096,
        description="choose the layer by so many of the likeliest tokens alone, as if there were no others, at a "
        "fraction of the cost; null: by all, as in the paper",
    )
    norm: bool = Field(default=False, description="whether early hidden states pass the final norm")


class DolaParams(RuleParams):
    """Of a request; what it leaves out is the server's."""

    dola: bool = Field(default=True, description="whether the request is under the rule")
    dola_alpha: float | None = Field(default=None, gt=0.0, le=1.0)


class DolaRule(SteeringRule):
    """Contrast with an early layer."""

    name = "dola"
    summary = "what the last layer says more than an early one"
    paper = "arXiv 2309.03883"
    reads_tokens = False
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
        options, numbers = self.options, self.layer_numbers
        among = options.among if len(numbers) > 1 else None
        of = plausible(logits, self.values(rows, "alpha", logits), among or 1)
        if len(numbers) > 1 and among is None:  # all of the vocabulary, for the choice
            of = Plausible(None, logits, plausible_mask(logits, self.values(rows, "alpha", logits)))
        every = self.aux_logits.layers(numbers, options.norm, of.ids)
        farthest = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        if len(numbers) > 1:
            final, of_layers = of.logits, every
            if among is not None and of.ids is None:
                ids = logits.topk(min(among, logits.shape[1]), 1).indices
                final, of_layers = logits.gather(1, ids), every.gather(2, ids.expand(len(every), *ids.shape))
            # More ids may have been looked up than the choice is to be among.
            farthest = divergence(final[:, :among], of_layers[:, :, :among]).argmax(0)
        early = every[farthest, torch.arange(len(logits), device=logits.device)]
        # Up to what is the same of all tokens: the logarithms of both normalizers.
        leave(logits, of, of.logits - early)


def divergence(final: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
    """Jensen-Shannon divergence in nats, ``[num_layers, num_rows]``.

    ``(sum q log q + sum r log r - sum (q + r) log((q + r) / 2)) / 2``, with one logarithm a token and layer: those of
    ``q`` and ``r`` are their logits, less their normalizers'. Row by row on a CPU, whose caches then hold them.

    Args:
        final: ``[num_rows, vocab]`` logits; a token at minus infinity is ruled out in all layers.
        early: ``[num_layers, num_rows, vocab]``.
    """
    if final.is_cpu and final.shape[1] > LARGE and early[..., 0].numel() > 1:
        rows = [
            torch.stack([_divergence(row, layer) for layer in layers])
            for row, layers in zip(final, early.transpose(0, 1), strict=True)
        ]
        return torch.stack(rows, 1)
    return _divergence(final, early)


def _divergence(final: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
    q, q_entropy = _distribution(final)
    r, r_entropy = _distribution(torch.where(final > -torch.inf, early, -torch.inf))
    both = q + r
    mixed = (both * both.clamp_min(torch.finfo(both.dtype).tiny).log_()).sum(-1)
    return (2 * math.log(2) - q_entropy - r_entropy - mixed) / 2


def _distribution(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and their entropy in nats."""
    p = logits.softmax(-1)
    most = logits.amax(-1)
    total = most - p.amax(-1).log()  # of the exponentials, their logarithm
    return p, total - (p * logits.clamp_min(torch.finfo(p.dtype).min)).sum(-1)
