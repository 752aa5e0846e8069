# SPDX-License-Identifier: Apache-2.0
"""What vLLM's SamplingParams say besides ``vllm_xargs``, as rules are told."""

from __future__ import annotations

import json
import re
from typing import Any

from vllm_ext.config import json_whitespace
from vllm_ext.config.json_whitespace import ANY_OBJECT
from vllm_ext.samplers.base import Asked, Kind


def asked_of(params: Any) -> Asked:
    """What vLLM's SamplingParams say besides ``vllm_xargs``."""
    return Asked(
        structured=params.structured_outputs is not None,
        grammar=_grammar_of(params.structured_outputs),
        max_tokens=params.max_tokens,
        ignores_end=bool(params.ignore_eos),
        min_tokens=params.min_tokens,
        lists_tokens=bool(params.allowed_token_ids or params.bad_words),
        temperature=params.temperature,
        seed=params.seed,
        truncates=params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0,
        penalizes=bool(
            params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
            or params.logit_bias
        ),
        num_answers=params.n,
    )


def _grammar_of(given: Any) -> tuple[Kind, str] | None:
    """Of vLLM's StructuredOutputsParams, what xgrammar compiles for them."""
    if given is None or (given._backend or "xgrammar") != "xgrammar":
        return None
    if given.json is not None:
        return "json", given.json if isinstance(given.json, str) else json.dumps(given.json)
    if given.json_object:
        return "json", ANY_OBJECT
    if given.choice is not None:
        return "regex", "|".join(map(re.escape, given.choice))
    if given.structural_tag is not None and json_whitespace.lone_schema(given.structural_tag):
        return "structural_tag", given.structural_tag
    return next(
        ((kind, source) for kind in ("regex", "grammar") if (source := getattr(given, kind)) is not None),
        None,
    )
