# SPDX-License-Identifier: Apache-2.0
"""Twin requests: the same answer behind another prompt, for rules that make ``p`` of both.

A twin is a request of vLLM's own: its KV blocks, its cached prefixes, its rows in the same steps as its owner's. It is
never heard of outside the engine. Three places know of it: the process that takes requests in makes its prompt (here),
the scheduler adds it and ends it (`v1_twin_scheduler`), and the worker gives it its owner's tokens (`v1_beside`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_ext import rules
from vllm_ext.vocabulary import ModelVocabulary

# Keys of SamplingParams.extra_args; a request that brings them is refused.
PROMPT, TWIN, OWNER, TRUNK = rules.ENGINE_KEYS


def prepare(vllm_config: Any, request: Any) -> None:
    """Give a request that is under a rule with twins its twin's prompt.

    Args:
        vllm_config: the engine's.
        request: vLLM's EngineCoreRequest, its parameters its own.

    Raises:
        VLLMValidationError: there is no such prompt, or the request asks for what does not go with twins.
    """
    params = request.sampling_params
    if params is None or not params.extra_args or (ruled := rules.of_vllm_config(vllm_config)) is None:
        return
    try:
        prompt = ruled.twin_prompt(params, request.prompt_token_ids or (), pieces_of(vllm_config))
    except ValueError as error:
        raise VLLMValidationError(f"vllm_xargs: {error}.", parameter="vllm_xargs") from None
    if prompt is None:
        return
    refusals = {
        "prompt_logprobs": params.prompt_logprobs is not None,
        "images, audio or video": bool(request.mm_features),
        "prompt_embeds": request.prompt_embeds is not None,
        "streamed input": request.resumable,
    }
    if refused := [what for what, is_given in refusals.items() if is_given]:
        raise VLLMValidationError(
            f"vllm_xargs: {refused[0]} do not go with a rule that reads the prompt without a part of it. Leave one of "
            "them out.",
            parameter="vllm_xargs",
        )
    params.extra_args = {**params.extra_args, PROMPT: prompt}


def pieces_of(vllm_config: Any) -> Sequence[bytes]:
    """By token id, what it adds to the text. The first call takes a second: at start-up, not of a request."""
    return _pieces(ModelVocabulary.of(vllm_config.model_config))


@functools.cache
def _pieces(vocabulary: ModelVocabulary) -> Sequence[bytes]:
    return vocabulary.pieces


def owner_of(params: Any) -> str | None:
    """Whose twin a request is, by request id; None where it is none."""
    return _given(params).get(OWNER)


def twin_of(params: Any) -> str | None:
    """The request id of a request's twin, which the scheduler has given it; None where it has none."""
    return _given(params).get(TWIN)


def _given(params: Any) -> Mapping[str, Any]:
    return (params is not None and params.extra_args) or {}
