# SPDX-License-Identifier: Apache-2.0
"""Rule momentum: greedy decoding that meets resistance where it would go round in a circle.

Tokens are the nodes of a graph that the text walks through. Of the ``k`` likeliest tokens the one is taken with the
highest ``p(v) - alpha f(l)``, where ``l`` is the length of the longest stretch, ``v`` last, that the text would then
have twice: 0 where ``v`` is new, 1 where only ``v`` itself was there before.

Source: "Momentum Decoding: Open-ended Text Generation as Graph Exploration", arXiv 2212.02175, section 3. ``f`` is the
authors' table for GPT2-XL, ``f(l) = l`` up to 5, where with their alpha of 0.2 any token new to the text is better. As
theirs, the prompt is part of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from vllm_ext.kernels.sparse import Int32
from vllm_ext.samplers.base import Asked, Row, RuleParams
from vllm_ext.samplers.steering import SteeringOptions, SteeringRule


class MomentumOptions(SteeringOptions):
    k: int = Field(default=5, ge=1, le=1024, description="how many of the likeliest tokens are looked at")
    alpha: float = Field(default=0.2, ge=0.0, le=10.0, description="strength of the resistance")
    resistance: list[Annotated[float, Field(ge=0.0, le=1000.0)]] = Field(
        default=[0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        min_length=2,
        max_length=32,
        description="f(l) of a repeated stretch of l tokens, from l = 0; longer ones have the last",
    )


class MomentumParams(RuleParams):
    """Of a request; what it leaves out is the server's."""

    momentum: bool = Field(default=True, description="whether the request is under the rule")
    momentum_k: int | None = Field(default=None, ge=1, le=1024)
    momentum_alpha: float | None = Field(default=None, ge=0.0, le=10.0)


class MomentumRule(SteeringRule):
    """Greedy, with resistance."""

    name = "momentum"
    summary = "greedy decoding that meets resistance where it repeats"
    paper = "arXiv 2212.02175"
    Options = MomentumOptions
    Params = MomentumParams

    @classmethod
    def problem(cls, options: MomentumOptions, params: MomentumParams, asked: Asked) -> str | None:
        """See the base class: it is no distribution to sample from."""
        if asked.temperature > 0.0:
            return (
                f"temperature={asked.temperature} does not go with momentum, which takes the best token; set "
                "temperature=0, or turn it off with momentum=false"
            )
        return None

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """See the base class; leaves the candidates with their scores."""
        # In float32 a sum over a vocabulary is off by 2e-5 on CPUs with short vectors.
        p = logits.softmax(1, dtype=torch.float64)
        resistance = np.array(self.options.resistance)
        for place, row in enumerate(rows):
            best, ids = p[place].topk(min(self.value(row, "k"), p.shape[1]))
            kept = best > 0.0
            ids, scores = ids[kept], best[kept]
            text = np.array([*row.prompt, *row.output], dtype=np.int32)
            lengths = repeated(text, ids.cpu().numpy(), len(resistance) - 1)
            scores -= torch.from_numpy(self.value(row, "alpha") * resistance[lengths]).to(scores.device)
            logits[place] = -torch.inf
            logits[place, ids] = scores.float()


def repeated(text: Int32, candidates: Int32, longest: int) -> Int32:
    """How long a stretch, each candidate last, there would be twice: int32 ``[num_candidates]``, up to ``longest``.

    Args:
        text: ``[num_tokens]``.
        candidates: ``[num_candidates]`` next tokens.
        longest: at which to stop.
    """
    lengths = np.zeros(len(candidates), dtype=np.int32)
    if not len(text):
        return lengths
    places = np.flatnonzero(np.isin(text, candidates))  # where a candidate stood before
    for length in range(1, longest + 1):
        if length > 1:  # what stood so far before it is what the text ends with
            places = places[places >= length - 1]
            places = places[text[places - (length - 1)] == text[len(text) - (length - 1)]]
        if not len(places):
            break
        lengths[np.isin(candidates, text[places])] = length
    return lengths
