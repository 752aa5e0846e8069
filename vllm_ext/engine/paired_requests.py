# SPDX-License-Identifier: Apache-2.0
"""Paired requests: the same answer behind another prompt, for rules that make ``p`` of both.

A pair is a request of vLLM's own: its KV blocks, its cached prefixes, its rows in the steps of its primary. It is never
heard of outside the engine. Three places know of it: the process that takes requests in makes its prompt (here), the
scheduler adds it and ends it (`scheduler.paired`), and the worker gives it its primary's tokens (`steering_runner`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_ext.config import rules
from vllm_ext.data.model_files import ModelVocabulary
from vllm_ext.samplers.prompt_parts import PairedPrompt, Prompt

# Keys of SamplingParams.extra_args; a request that brings them is refused.
PROMPT, PAIR, PRIMARY, TRUNK = rules.ENGINE_KEYS


def prepare(processor: Any, request: Any) -> None:
    """Give a request that is under a rule with pairs its pair's prompt.

    Args:
        processor: vLLM's InputProcessor.
        request: vLLM's EngineCoreRequest, its parameters its own.

    Raises:
        VLLMValidationError: there is no such prompt, or the request asks for what does not go with pairs.
    """
    params, vllm_config = request.sampling_params, processor.vllm_config
    if params is None or not params.extra_args or (ruled := rules.of_vllm_config(vllm_config)) is None:
        return
    vocabulary = ModelVocabulary.of(vllm_config.model_config)
    own, features = request.prompt_token_ids or (), request.mm_features or ()
    known = load_pieces(vllm_config)  # an image's tokens may be above them
    pieces = [known[token] if token < len(known) else b"" for token in own]
    for feature in features:  # what an image's tokens say is no text of the user's
        place = feature.mm_position
        pieces[place.offset : place.offset + place.length] = [b""] * place.length

    def encode_prompt(text: str) -> list[int]:
        special = processor.renderer.default_cmpl_tok_params.add_special_tokens
        return _loaded(vocabulary).encode(text, special)

    prompt = Prompt(own, pieces, _loaded(vocabulary).encode, encode_prompt)
    try:
        if (pair := ruled.paired_prompt(params, prompt)) is None:
            return
        _check(vllm_config, request, pair)
        offsets = offsets_of([feature.mm_position for feature in features], pair)
    except ValueError as error:
        raise VLLMValidationError(f"vllm_xargs: {error}.", parameter="vllm_xargs") from None
    params.max_tokens = min(params.max_tokens, vllm_config.model_config.max_model_len - len(pair.tokens))
    params.extra_args = {**params.extra_args, PROMPT: [pair.tokens, offsets]}


def _check(vllm_config: Any, request: Any, pair: PairedPrompt) -> None:
    """Refuse what does not go with pairs, or what vLLM would not take of the pair itself.

    Raises:
        ValueError: naming it, what is allowed, and the way out.
    """
    params, model = request.sampling_params, vllm_config.model_config
    multimodal = getattr(model, "multimodal_config", None)
    refusals = {
        "prompt_logprobs": params.prompt_logprobs is not None,
        "encoder-decoder models": bool(model.is_encoder_decoder),
        "images, audio or video out of --mm-processor-cache-type shm": bool(request.mm_features)
        and getattr(multimodal, "mm_processor_cache_type", None) == "shm",
        "prompt_embeds": request.prompt_embeds is not None,
        "streamed input": request.resumable,
    }
    if refused := [what for what, is_given in refusals.items() if is_given]:
        raise ValueError(
            f"{refused[0]} do not go with a rule that reads another prompt beside the request's. Leave one of them out"
        )
    own, size = request.prompt_token_ids, model.get_vocab_size()
    if strangers := [token for token in pair.tokens if token >= size and token not in own]:
        raise ValueError(
            f"{pair.field} has token {strangers[0]}, which the model does not have; allowed: below {size}. Leave out "
            "what stands for it"
        )
    stays = Counter(token for token, place in zip(own, pair.places, strict=True) if place >= 0)
    if bare := [token for token in _of_media(model) if pair.tokens.count(token) > stays[token]]:
        raise ValueError(
            f"{pair.field} has token {bare[0]}, which stands for an image, audio or video; allowed: text alone. Leave "
            "out what stands for it"
        )
    length, most = len(pair.tokens), model.max_model_len
    full, room = most - len(own), most - length
    # A request for as many tokens as there is room for, vLLM's default, gets those that the pair has room for.
    if room < (max(params.min_tokens, 1) if params.max_tokens >= full else params.max_tokens):
        raise ValueError(
            f"{pair.field} makes a prompt of {length} tokens, which with max_tokens={params.max_tokens} is more than "
            f"max_model_len={most}; allowed: max_tokens and min_tokens up to {max(room, 0)}. Lower them, or shorten "
            f"{pair.field}"
        )


def _of_media(model: Any) -> list[int]:
    """Tokens that a model has images, audio and video stand for: none may be without one."""
    config = getattr(model, "hf_config", None)
    names = [f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")]
    return [token for name in names if isinstance(token := getattr(config, name, None), int)]


def offsets_of(ranges: Sequence[Any], pair: PairedPrompt) -> list[int]:
    """Where each image, clip or sound of a request begins in its pair's prompt; -1: it is not there.

    Args:
        ranges: vLLM's PlaceholderRange of each, in the request's own prompt.
        pair: the other one.

    Raises:
        ValueError: a part of one is there; or a prompt ends with one. Its last token is read again for as long as the
            other request of the pair is not so far, and would hold the encoder's cache from that.
    """
    found = []
    for each in ranges:
        places = pair.places[each.offset : each.offset + each.length]
        offset = places[0]
        if len(pair.places) == each.offset + each.length or 0 <= offset == len(pair.tokens) - each.length:
            raise ValueError(
                f"{pair.field} does not go with a prompt that ends with an image; put text behind it, or leave "
                f"{pair.field} out"
            )
        if places != [offset if offset < 0 else offset + i for i in range(each.length)]:
            raise ValueError(f"{pair.field} would leave a part of an image in the other prompt; leave it out")
        found.append(offset)
    return found


def features_of(features: Sequence[Any], offsets: Sequence[int]) -> list[Any]:
    """A pair's of its primary's MultiModalFeatureSpecs; see `offsets_of`.

    Their data and hashes are the same, so vLLM encodes each once for both, and counts who still needs it.
    """
    return [
        replace(each, mm_position=replace(each.mm_position, offset=offset))
        for each, offset in zip(features, offsets, strict=True)
        if offset >= 0
    ]


def load_pieces(vllm_config: Any) -> Sequence[bytes]:
    """By token id, what it adds to the text. The first call takes a second: at start-up, not of a request."""
    return _loaded(ModelVocabulary.of(vllm_config.model_config)).pieces


@functools.cache
def _loaded(vocabulary: ModelVocabulary) -> ModelVocabulary:
    """The first of those that are equal, which keeps what it has loaded."""
    return vocabulary


def primary_of(params: Any) -> str | None:
    """Whose pair a request is, by request id; None where it is none."""
    return _given(params).get(PRIMARY)


def pair_of(params: Any) -> str | None:
    """The request id of a request's pair, which the scheduler has given it; None where it has none."""
    return _given(params).get(PAIR)


def _given(params: Any) -> Mapping[str, Any]:
    return (params is not None and params.extra_args) or {}
