# SPDX-License-Identifier: Apache-2.0
"""What drafting needs to know of vLLM's SamplingParams, and which of them vLLM lets through."""

from __future__ import annotations

import copy
from typing import Any

from vllm_ext.config import speculative
from vllm_ext.proposers.base import Sampling


def allowing_all(processor: Any, params: Any) -> Any:
    """What is to validate a request: next to a method of ours, one that allows ``min_p`` and ``logit_bias``.

    vLLM refuses them next to any speculation, because its rejection sampler does not apply them to draft rows. Ours
    verifies with the stock sampler, which does. A copy that knows of no speculation lets them through; it lives for
    one request, so other threads, and engines with methods of vLLM's own, keep vLLM's check.

    Args:
        processor: vLLM's InputProcessor.
        params: of the request, vLLM's SamplingParams or PoolingParams.
    """
    if not (getattr(params, "min_p", 0) or getattr(params, "logit_bias", None)):
        return processor
    if speculative.SPECULATION not in speculative.ours(processor.vllm_config):
        return processor
    if params.trace_decode_token_ids is not None:  # vLLM refuses that next to speculation, and rightly
        return processor
    validating = copy.copy(processor)
    validating.speculative_config = None
    return validating


def sampling_of(params: Any) -> Sampling:
    """How a request samples, as proposers are told."""
    return Sampling(params.temperature, params.top_p, params.top_k, params.min_p, params.seed)


def ends_of(params: Any) -> set[int | None]:
    """Tokens that end a request."""
    return {params.eos_token_id, *(params.stop_token_ids or ())}


def num_kept(params: Any, tokens: list[int]) -> int:
    """How many of a step's tokens reach the output: none after an end or stop token."""
    ends = ends_of(params)
    return next((count for count, token in enumerate(tokens, 1) if token in ends), len(tokens))


def tokens_left(params: Any, num_tokens: int, num_output: int, max_model_len: int) -> int:
    """How many tokens a request may still put out, unless one that ends it comes before.

    Args:
        params: vLLM's.
        num_tokens: of its prompt and output.
        num_output: of its output alone.
        max_model_len: the engine's.
    """
    left = max_model_len - num_tokens
    return left if params.max_tokens is None else min(left, params.max_tokens - num_output)
