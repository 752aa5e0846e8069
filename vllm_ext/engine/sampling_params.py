# SPDX-License-Identifier: Apache-2.0
"""What drafting needs to know of vLLM's SamplingParams."""

from __future__ import annotations

from typing import Any

from vllm_ext.proposers.base import Sampling


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
