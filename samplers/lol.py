# SPDX-License-Identifier: Apache-2.0
"""Rule lol: contrasts with an amateur at the last layer and at a lower one, added up.

``F_N = (1 + beta) log p_e - beta log p_a`` of the two models' last layers, ``F_j`` the same of a lower layer of each;
``p`` is the softmax of ``F_N + omega F_j`` over the expert's plausible tokens. The amateur is meant to be the model
itself, taught to hallucinate; any companion will do that the contrast is wanted with. With ``omega = 0`` this is
induced contrastive decoding.

With an instruction to be truthful in the prompt, which the request names, comes the truthfulness refocus: all of that
is of the same prompt without the instruction (a pair of the request), and ``mu log p_e`` with it is added.

Source: "Lower Layers Matter" (LOL), arXiv 2408.08769. The paper's coefficients are its own; the defaults here are not
tuned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field

from vllm_ext.samplers.base import Row, RuleParams
from vllm_ext.samplers.plausible import leave, plausible
from vllm_ext.samplers.prompt_parts import PairedPrompt, Prompt, without
from vllm_ext.samplers.steering import CompanionOptions, SteeringRule


class LolOptions(CompanionOptions):
    beta: float = Field(default=1.0, ge=0.0, le=10.0, description="strength of the last layers' contrast")
    low_beta: float = Field(
        default=1.0, ge=0.0, le=10.0, description="strength of the lower layers' contrast"
    )
    omega: float = Field(default=0.3, ge=0.0, le=10.0, description="weight of the lower layers")
    alpha: float = Field(
        default=0.1,
        gt=0.0,
        le=1.0,
        description="plausible tokens have this part of the likeliest one's probability",
    )
    mu: float = Field(
        default=0.5,
        ge=0.0,
        le=10.0,
        description="weight of the model behind an instruction, where there is one",
    )
    layer: int | None = Field(
        default=None, ge=0, description="how many of the expert's layers are the lower one; none: half"
    )
    amateur_layer: int | None = Field(
        default=None, ge=0, description="how many of the companion's; none: half"
    )


class LolParams(RuleParams):
    """Of a request; what it leaves out is the server's."""

    lol: bool = Field(default=True, description="whether the request is under the rule")
    lol_beta: float | None = Field(default=None, ge=0.0, le=10.0)
    lol_omega: float | None = Field(default=None, ge=0.0, le=10.0)
    lol_mu: float | None = Field(default=None, ge=0.0, le=10.0)
    lol_instruction: str | None = Field(
        default=None,
        pattern=r"\S",
        max_length=100_000,
        description="a part of the prompt, word for word, that asks for the truth",
    )
    lol_alpha: float | None = Field(default=None, gt=0.0, le=1.0)


class LolRule(SteeringRule):
    """Contrasts of two layers with a companion's."""

    name = "lol"
    summary = "contrasts with a weaker model at two layers"
    paper = "arXiv 2408.08769"
    reads_tokens = False
    Options = LolOptions
    Params = LolParams
    has_pairs = True

    @classmethod
    def layers(cls, options: LolOptions, num_layers: int) -> Sequence[int]:
        return _lower("layer", options.layer, num_layers)

    @classmethod
    def companion_layers(cls, options: LolOptions, num_layers: int) -> Sequence[int]:
        return _lower("amateur_layer", options.amateur_layer, num_layers)

    @classmethod
    def paired_prompt(cls, params: LolParams, prompt: Prompt) -> PairedPrompt | None:
        if params.lol_instruction is None:
            return None
        return without(prompt, params.lol_instruction, "lol_instruction")

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        aux_logits, expert = self.aux_logits, logits
        instructed = [row.params.lol_instruction is not None for row in rows]
        if any(instructed):
            aux_logits = aux_logits.of_pairs(instructed)
            which = torch.tensor(instructed).to(logits.device, non_blocking=True)[:, None]
            # What rules before this one have forbidden stays so.
            expert = torch.where(which & (logits > -torch.inf), aux_logits.target(), logits)
        of = plausible(expert, self.values(rows, "alpha", logits))
        amateur = aux_logits.companion(of.ids)
        low = aux_logits.layers(self.layer_numbers, True, of.ids)[0]
        low_amateur = aux_logits.companion_layers(self.companion_layer_numbers, True, of.ids)[0]
        # Up to what is the same of all tokens: the logarithms of the normalizers.
        beta, low_beta = self.values(rows, "beta", logits), self.options.low_beta
        scores = (1.0 + beta) * of.logits - beta * amateur
        scores += self.values(rows, "omega", logits) * ((1.0 + low_beta) * low - low_beta * low_amateur)
        if any(instructed):
            behind = logits if of.ids is None else logits.gather(1, of.ids)
            added = self.values(rows, "mu", logits) * behind
            scores = torch.where(which, scores + added, scores)
        leave(logits, of, torch.where(amateur > -torch.inf, scores, -torch.inf))


def _lower(field: str, layer: int | None, num_layers: int) -> list[int]:
    if layer is None:
        return [num_layers // 2]
    if layer >= num_layers:
        raise ValueError(f"{field}={layer} is not allowed; allowed: 0 to {num_layers - 1}")
    return [layer]
