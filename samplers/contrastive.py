# SPDX-License-Identifier: Apache-2.0
"""Rule contrastive: what the target, the expert, says more than a weaker amateur, among what it finds plausible.

With ``z_e`` and ``z_a`` the two models' logits behind the same tokens, ``p`` is the softmax of

- ``scaled``: ``(1 + beta) z_e - beta z_a`` (arXiv 2309.09117, section 2)
- ``ratio``: ``log p_e - log p_a``, the amateur at its own temperature (arXiv 2210.15097, section 3)

over tokens with ``p_e >= alpha max p_e``. A request's temperature and truncation come after it. Both papers decode
greedily or with beams; here ``p`` can also be sampled from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field

from vllm_ext.samplers.base import Row, RuleParams
from vllm_ext.samplers.plausible import leave, plausible
from vllm_ext.samplers.steering import CompanionOptions, SteeringRule

Form = Literal["scaled", "ratio"]


class ContrastiveOptions(CompanionOptions):
    beta: float = Field(
        default=0.5, ge=0.0, le=10.0, description="strength of the contrast, of the scaled form"
    )
    alpha: float = Field(
        default=0.1,
        gt=0.0,
        le=1.0,
        description="plausible tokens have this part of the likeliest one's probability",
    )
    form: Form = Field(
        default="scaled", description="(1 + beta) expert - beta amateur, or log of expert / amateur"
    )
    amateur_temperature: float = Field(
        default=1.0, gt=0.0, le=10.0, description="of the amateur, of the ratio form"
    )


class ContrastiveParams(RuleParams):
    """Of a request; what it leaves out is the server's."""

    contrastive: bool = Field(default=True, description="whether the request is under the rule")
    contrastive_beta: float | None = Field(default=None, ge=0.0, le=10.0)
    contrastive_alpha: float | None = Field(default=None, gt=0.0, le=1.0)
    contrastive_form: Form | None = None
    contrastive_amateur_temperature: float | None = Field(default=None, gt=0.0, le=10.0)


class ContrastiveRule(SteeringRule):
    """Contrast with a companion model."""

    name = "contrastive"
    summary = "what the model says more than a weaker one"
    paper = "arXiv 2210.15097, 2309.09117"
    reads_tokens = False
    Options = ContrastiveOptions
    Params = ContrastiveParams

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        of = plausible(logits, self.values(rows, "alpha", logits))
        amateur = self.aux_logits.companion(of.ids)
        beta = self.values(rows, "beta", logits)
        scores = (1.0 + beta) * of.logits - beta * amateur
        ratio = [place for place, row in enumerate(rows) if self.value(row, "form") == "ratio"]
        if ratio:  # up to what is the same of all tokens: the logarithms of both normalizers
            heat = self.values([rows[place] for place in ratio], "amateur_temperature", logits)
            scores[ratio] = of.logits[ratio] - amateur[ratio] / heat
        leave(logits, of, torch.where(amateur > -torch.inf, scores, -torch.inf))
