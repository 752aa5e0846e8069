# SPDX-License-Identifier: Apache-2.0
"""The most probable span of a passage in a script, by vLLM's own ``LLM``.

One request of one token for each beginning of a span that the search opens; the prefix cache has read the rest. It
needs no rule on the server, and works next to all methods.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS

from vllm_ext.data.model_files import ModelVocabulary
from vllm_ext.samplers.base import text_of
from vllm_ext.samplers.exact_extract import Question, Search
from vllm_ext.samplers.passage import Passages


@dataclass(frozen=True)
class Extracted:
    """An answer."""

    text: str  # a part of the passage, without spaces around it
    token_ids: list[int]
    logprob: float  # of these and the end token
    score: float  # the same, or with `normalize` divided by their number


def extract(
    llm: Any,
    prompts: Sequence[str | Sequence[int]],
    passages: Sequence[str],
    max_tokens: int = 64,
    normalize: bool = False,
    width: int = 8,
) -> list[Extracted | None]:
    """The most probable span of each passage behind its prompt, end token included.

    Args:
        llm: vLLM's ``LLM``, best with the prefix cache, which is its default.
        prompts: texts, or token ids; of a chat what its template makes of it.
        passages: as many; each is where that prompt's answer is to be found.
        max_tokens: of the longest span.
        normalize: the best log-probability per token, which favours longer spans, and not that of the whole.
        width: requests of a prompt at a time.

    Returns:
        As many; None where a passage has no tokens, or none of its spans has a chance.

    Raises:
        ValueError: an argument cannot be served; the message says which, and the way out.
    """
    if len(prompts) != len(passages):
        raise ValueError(
            f"there are {len(prompts)} prompts and {len(passages)} passages; give as many of each"
        )
    for name, value in (("max_tokens", max_tokens), ("width", width)):
        if value < 1:
            raise ValueError(f"{name}={value} is not allowed; allowed: 1 or more")
    if "logits" in (mode := llm.model_config.logprobs_mode):
        raise ValueError(f"logprobs_mode={mode!r} gives no probabilities; make the LLM with 'raw_logprobs'")
    tokenizer = llm.get_tokenizer()
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError("the tokenizer has no end token (eos_token), and a span is as probable as its end")
    read = _passages(_vocabulary(llm))
    ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    searches = [Search(read.of(text, end), end, max_tokens, normalize, width) for text in passages]
    while asked := {number: q for number, one in enumerate(searches) if (q := one.ask())}:
        behind = [(ids[number], question) for number, questions in asked.items() for question in questions]
        answers = iter(_look_up(llm, behind))
        for number, questions in asked.items():
            searches[number].tell(questions, [next(answers) for _ in questions])
    return [
        one.found
        and Extracted(
            text_of(read.vocabulary, one.found.tokens).decode(errors="replace").strip(),
            list(one.found.tokens),
            one.found.logprob,
            one.found.score,
        )
        for one in searches
    ]


def _look_up(llm: Any, behind: Sequence[tuple[list[int], Question]]) -> list[list[float]]:
    """The log-probabilities that are asked for behind each prompt; of many tokens in several requests."""
    prompts, params, owners = [], [], []
    for number, (prompt, question) in enumerate(behind):
        wanted = question.wanted.tolist()
        for first in range(0, len(wanted), MAX_LOGPROB_TOKEN_IDS):
            prompts.append({"prompt_token_ids": [*prompt, *question.tokens]})
            some = wanted[first : first + MAX_LOGPROB_TOKEN_IDS]
            params.append(
                SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=some, detokenize=False)
            )
            owners.append(number)
    answers: list[list[float]] = [[] for _ in behind]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for number, asked, output in zip(owners, params, outputs, strict=True):
        (position,) = output.outputs[0].logprobs
        answers[number] += [position[token].logprob for token in asked.logprob_token_ids]
    return answers


def _vocabulary(llm: Any) -> ModelVocabulary:
    return ModelVocabulary.of(llm.model_config)


@functools.lru_cache(4)
def _passages(vocabulary: ModelVocabulary) -> Passages:
    return Passages(vocabulary)
