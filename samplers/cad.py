# SPDX-License-Identifier: Apache-2.0
"""Rule cad, context-aware decoding: what the target says more with a context in its prompt than without it.

Source: "Trusting Your Evidence: Hallucinate Less with Context-aware Decoding", arXiv 2305.14739, equation 3: with ``z``
the logits behind the whole prompt and ``z_0`` those behind the prompt without the context, ``p`` is the softmax of
``(1 + alpha) z - alpha z_0``. A request's temperature and truncation come after it.

With a negative prompt instead of that one it is classifier-free guidance, "Stay on topic with Classifier-Free
Guidance", arXiv 2306.17806: its ``log p_0 + gamma (log p - log p_0)`` is the same with ``gamma = 1 + alpha``, up to
what is the same of all tokens. Where there is no other prompt at all, the paper has the own one's last token alone.

Deviation: `plausible` can leave only tokens that are plausible with the context, as contrastive decoding does; 0, the
default, leaves all, as the paper does. The tokens before a row are the same on both sides, drafts too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field

from vllm_ext.samplers.base import Asked, Row, RuleOptions, RuleParams
from vllm_ext.samplers.messages import quoted
from vllm_ext.samplers.plausible import plausible_mask
from vllm_ext.samplers.prompt_parts import PairedPrompt, Prompt, another, without
from vllm_ext.samplers.steering import SteeringRule


class CadOptions(RuleOptions):
    """Of the server. Fields are what a request gets that does not say otherwise."""

    alpha: float = Field(default=0.5, ge=0.0, le=10.0, description="strength; 0: nothing changes")
    plausible: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="tokens are left that have this part of the likeliest one's probability; 0: all",
    )


class CadParams(RuleParams):
    """Of a request; what it leaves out is the server's."""

    cad: bool = Field(default=True, description="whether the request is under the rule")
    cad_context: str | None = Field(
        default=None,
        max_length=1_000_000,
        description="a part of the prompt, word for word: what the answer is to be faithful to",
    )
    cad_negative: str | None = Field(
        default=None,
        max_length=1_000_000,
        description="what is to stand instead of that part in the prompt that the answer is to be unlike; without "
        "cad_context all of that prompt, word for word; '': the prompt's last token alone",
    )
    cad_alpha: float | None = Field(default=None, ge=0.0, le=10.0)
    cad_plausible: float | None = Field(default=None, ge=0.0, le=1.0)


class CadRule(SteeringRule):
    """Contrast with the same request without a part of its prompt, or behind another one."""

    name = "cad"
    summary = "what the prompt changes against another one, amplified"
    paper = "arXiv 2305.14739, 2306.17806"
    reads_tokens = False
    Options = CadOptions
    Params = CadParams
    has_pairs = True

    @classmethod
    def problem(cls, options: Any, params: Any, asked: Asked) -> str | None:
        context = params.cad_context
        if context is None and params.cad_negative is None:
            return (
                "cad_context=None does not go with cad: it must be a part of the prompt, or cad_negative another "
                "prompt; give one of them, or leave out what begins with cad"
            )
        if context is not None and not context.strip():
            return (
                f"cad_context={quoted(context)} does not go with cad: it must be a part of the prompt; give it, or "
                "leave it out; cad_negative alone is a prompt of its own"
            )
        return None

    @classmethod
    def paired_prompt(cls, params: Any, prompt: Prompt) -> PairedPrompt:
        if params.cad_context is None:
            return another(prompt, params.cad_negative, "cad_negative")
        return without(prompt, params.cad_context, "cad_context", params.cad_negative or "", "cad_negative")

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        alpha, least = self.values(rows, "alpha", logits), self.values(rows, "plausible", logits)
        # A mask of 0 leaves all: its logarithm is minus infinity.
        kept = plausible_mask(logits, least)
        without_it = self.aux_logits.of_pairs([True] * len(rows)).target()
        scores = (1.0 + alpha) * logits - alpha * without_it
        logits.copy_(torch.where(kept, scores, -torch.inf))
