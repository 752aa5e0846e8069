# SPDX-License-Identifier: Apache-2.0
"""Rule adadec: greedy decoding of code that looks ahead where it is not sure.

Where the entropy of ``p`` is above a threshold, each of the likeliest tokens is continued greedily for some tokens,
up to the end of the line, and the one is taken whose token and continuation have the highest mean log-probability.
What was looked at ahead is thrown away.

Source: "AdaDec: Towards Improving LLM Code Generation via Adaptive Decoding", arXiv 2506.08980, section 3, with its
greedy beam of one. Its thresholds are learnt for a model each, from 0.6 to 1.3 nats; the default here is not, and
``vllm-ext adadec learn`` learns one (`adadec_threshold`). A row pauses (`LookaheadRule`): continuations are requests of
the engine's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field

from vllm_ext.samplers.base import Asked, Row, RuleParams, Vocabulary
from vllm_ext.samplers.steering import Candidate, Deferral, LookaheadRule, SteeringOptions


def entropy_of(log_p: torch.Tensor) -> torch.Tensor:
    """In nats, ``[num_rows]``: of rows of log-probabilities ``[num_rows, vocab_size]``."""
    entropy: torch.Tensor = torch.special.entr(log_p.exp()).sum(1)
    return entropy


class AdadecOptions(SteeringOptions):
    threshold: float = Field(
        default=1.0, ge=0.0, description="entropy, in nats, above which a token is chosen so"
    )
    candidates: int = Field(default=3, ge=1, le=16, description="how many of the likeliest tokens are tried")
    lookahead: int = Field(default=5, ge=0, le=64, description="most tokens that each is continued by")
    line: bool = Field(default=True, description="whether going on ends with the line")


class AdadecParams(RuleParams):
    """Of a request; what it leaves out is the server's."""

    adadec: bool = Field(default=True, description="whether the request is under the rule")
    adadec_threshold: float | None = Field(default=None, ge=0.0)
    adadec_candidates: int | None = Field(default=None, ge=1, le=16)
    adadec_lookahead: int | None = Field(default=None, ge=0, le=64)


class AdadecRule(LookaheadRule):
    """Greedy, with a look ahead."""

    name = "adadec"
    summary = "greedy decoding that looks ahead where it is not sure"
    paper = "arXiv 2506.08980"
    why_v1 = "puts tokens off, to look ahead"
    Options = AdadecOptions
    Params = AdadecParams
    alone = True

    @classmethod
    def from_options(cls, options: AdadecOptions, vocabulary: Vocabulary) -> AdadecRule:
        rule = cls(options)
        if options.line:
            rule.stops = [number for number, piece in enumerate(vocabulary.pieces) if b"\n" in piece]
        return rule

    @classmethod
    def problem(cls, options: AdadecOptions, params: Any, asked: Asked) -> str | None:
        """See the base class: what is looked at ahead is plain greedy text."""
        given = {
            f"temperature={asked.temperature}": asked.temperature > 0.0,
            "structured_outputs (response_format)": asked.structured,
            "allowed_token_ids or bad_words": asked.lists_tokens,
            "penalties or logit_bias": asked.penalizes,
        }
        if refused := [what for what, is_given in given.items() if is_given]:
            return (
                f"{refused[0]} does not go with adadec, which looks ahead in the model's greedy text. Set "
                "temperature=0, and leave out the rest, or what begins with adadec"
            )
        return None

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        self.deferrals = {}
        log_p = logits.log_softmax(1)
        unsure = (entropy_of(log_p)[:, None] > self.values(rows, "threshold", logits))[:, 0].tolist()
        for place, row in enumerate(rows):
            at = len(row.output)
            if at in row.kept:
                chosen = int(row.kept[at])
                value = logits[place, chosen].clone()
                logits[place] = -torch.inf
                logits[place, chosen] = value
            elif unsure[place]:
                found = log_p[place].topk(min(self.value(row, "candidates"), logits.shape[1]))
                tried = zip(found.indices.tolist(), found.values.tolist(), strict=True)
                self.deferrals[place] = Deferral(
                    at, [Candidate(*each) for each in tried], self.value(row, "lookahead")
                )
