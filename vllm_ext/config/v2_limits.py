# SPDX-License-Identifier: Apache-2.0
"""Requests that vLLM's V2 runner has no room for: it says so in the worker only, where that ends the engine."""

from __future__ import annotations

from typing import Any


def check_request(vllm_config: Any, request: Any) -> None:
    """Refuse a request with a longer list than the V2 runner keeps of one.

    Args:
        vllm_config: the engine's; it runs on V2.
        request: vLLM's EngineCoreRequest, which vLLM has nothing against.

    Raises:
        VLLMValidationError: naming the parameter, its length and the limit.
    """
    params = request.sampling_params
    if params is None or not vllm_config.use_v2_model_runner:
        return
    bad_words = params.bad_words_token_ids or ()
    lengths = {
        "allowed_token_ids": len(params.allowed_token_ids or ()),
        "logit_bias": len(params.logit_bias or ()),
        "stop_token_ids": len(params.all_stop_token_ids) if params.min_tokens > 0 else 0,
        "bad_words": len(bad_words),
        "bad_words in tokens": sum(map(len, bad_words)),
    }
    if not any(lengths.values()):
        return
    import vllm.envs as envs
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.worker.gpu.sample import logit_bias

    limits = {
        "allowed_token_ids": logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS,
        "logit_bias": logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS,
        "stop_token_ids": logit_bias.MAX_NUM_STOP_TOKEN_IDS,
        "bad_words": envs.VLLM_MAX_NUM_BAD_WORDS,
        "bad_words in tokens": envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
    }
    for name, length in lengths.items():
        if length > limits[name]:
            beside = " next to min_tokens" if name == "stop_token_ids" else ""
            raise VLLMValidationError(
                f"{name} has {length} entries{beside}; allowed on vLLM's V2 model runner: {limits[name]} at most. "
                "Send fewer, or serve with VLLM_USE_V2_MODEL_RUNNER=0.",
                parameter=name.partition(" ")[0],
                value=length,
            )
