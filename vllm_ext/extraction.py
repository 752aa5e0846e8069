# SPDX-License-Identifier: Apache-2.0
"""The likeliest span of a passage, by an ``LLM``: `samplers/exact_extract.py` with vLLM's answers of one token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_ext.kernels.sparse import Float64, Int32
from vllm_ext.samplers import exact_extract
from vllm_ext.samplers.extract import ExtractRule
from vllm_ext.vocabulary import ModelVocabulary


class Extraction(NamedTuple):
    """What was found."""

    text: str
    tokens: tuple[int, ...]  # without the end token
    log_probability: float  # natural, the end token's included
    rows: int  # prefixes that the model was asked about


def likeliest_span(
    llm: Any, prompt: Sequence[int], passage: str, max_tokens: int = 32, width: int = 16
) -> Extraction:
    """The span of a passage that the model is most likely to answer with, of all its spans.

    Greedy decoding under rule `extract` takes the likeliest token at each step, which need not lead there.

    Args:
        llm: vLLM's ``LLM``, with or without speculation. Its prefix cache makes a prompt cost once.
        prompt: token ids, with the passage in it; ``llm.get_tokenizer().apply_chat_template(...)`` makes them.
        passage: what the answer is a span of.
        max_tokens: most of a span.
        width: prefixes to ask about at a time.

    Raises:
        ValueError: the passage has no tokens, or ``max_tokens`` or ``width`` is less than 1.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS

    model_config = llm.llm_engine.model_config
    vocabulary = ModelVocabulary.of(model_config)
    tokens = ExtractRule(vocabulary).passage(passage)
    if not len(tokens.tokens) or max_tokens < 1 or width < 1:
        raise ValueError(
            f"passage={passage!r} of {len(tokens.tokens)} tokens, max_tokens={max_tokens} and width={width}: each must "
            "be at least 1"
        )
    end = llm.get_tokenizer().eos_token_id

    def score(prefixes: Sequence[tuple[int, ...]], ids: Sequence[Int32]) -> list[Float64]:
        prompts, params = [], []
        for prefix, its in zip(prefixes, ids, strict=True):
            for begin in range(0, len(its), MAX_LOGPROB_TOKEN_IDS):
                part = its[begin : begin + MAX_LOGPROB_TOKEN_IDS].tolist()
                prompts.append({"prompt_token_ids": [*prompt, *prefix]})
                params.append(SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=part))
        known: dict[tuple[int, ...], dict[int, Any]] = {}
        for asked, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            prefix = tuple(asked["prompt_token_ids"][len(prompt) :])
            known.setdefault(prefix, {}).update(output.outputs[0].logprobs[0])
        return [
            np.array([known[prefix][token].logprob for token in its.tolist()])
            for prefix, its in zip(prefixes, ids, strict=True)
        ]

    found = exact_extract.likeliest(tokens, end, max_tokens, score, width)
    return Extraction(llm.get_tokenizer().decode(found.tokens), *found)
