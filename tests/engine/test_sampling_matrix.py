# SPDX-License-Identifier: Apache-2.0
"""Every sampling option gives, next to trees, the tokens it gives without speculation (float32)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from helpers import assert_same_outputs, own_prompts
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.engine

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 11}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "temperature": SEEDED,
    "hot": {"temperature": 1.5, "seed": 4},
    "top_p-top_k": {**SEEDED, "top_p": 0.9, "top_k": 40},
    "min_p": {**SEEDED, "min_p": 0.1},
    "logit_bias": {**GREEDY, "logit_bias": {28: -4.0, 30: 3.0, 253: -100.0}},
    "logit_bias-seeded": {**SEEDED, "logit_bias": {28: -4.0, 30: 3.0}, "min_p": 0.05},
    "repetition_penalty": {**GREEDY, "repetition_penalty": 1.3},
    "frequency_penalty": {**GREEDY, "frequency_penalty": 0.7},
    "presence_penalty-seeded": {**SEEDED, "presence_penalty": 0.7, "frequency_penalty": 0.3},
    "bad_words": {**GREEDY, "bad_words": [" the", " of the", " and a"]},
    "min_tokens": {**GREEDY, "min_tokens": 20, "stop_token_ids": [28, 30, 198]},
    "allowed_token_ids": {**GREEDY, "allowed_token_ids": [*range(0, 20000, 2), 1, 28, 30]},
    "logprobs": {**GREEDY, "logprobs": 3},
    "logprobs-seeded": {**SEEDED, "logprobs": 2, "top_k": 20},
    "stop": {**GREEDY, "stop": ["the", "."]},
    "n": {**SEEDED, "n": 3},
}


def chat(
    llm: Any,
    prompts: Sequence[str],
    batch_size: int,
    sampling: Sequence[dict[str, Any]],
    max_tokens: int = 32,
) -> list[Any]:
    """Completions (with all they carry) of each prompt, ``batch_size`` at a time; options by prompt, cyclic."""
    result = []
    for start in range(0, len(prompts), batch_size):
        chunk = range(start, min(start + batch_size, len(prompts)))
        params = [SamplingParams(max_tokens=max_tokens, **sampling[i % len(sampling)]) for i in chunk]
        messages = [[{"role": "user", "content": prompts[i]}] for i in chunk]
        result += [output for o in llm.chat(messages, params, use_tqdm=False) for output in o.outputs]
    return result


def assert_same_logprobs(expected: Any, actual: Any) -> None:
    """The same values to 1e-4 for every token both list; of two equal candidates either may be listed."""
    assert len(expected.logprobs) == len(actual.logprobs) == len(expected.token_ids)
    for token, left, right in zip(expected.token_ids, expected.logprobs, actual.logprobs, strict=True):
        assert len(left) == len(right)
        assert left[token].logprob == pytest.approx(right[token].logprob, abs=1e-4)
        assert left[token].rank == right[token].rank
        values = [sorted((entry.logprob for entry in side.values()), reverse=True) for side in (left, right)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)


def compare(expected: Sequence[Any], actual: Sequence[Any]) -> None:
    assert_same_outputs([o.token_ids for o in expected], [o.token_ids for o in actual])
    for left, right in zip(expected, actual, strict=True):
        assert left.text == right.text
        assert left.finish_reason == right.finish_reason
        if left.logprobs is not None:
            assert_same_logprobs(left, right)


# The others are in one batch below.
ALONE = {"hot", "stop", "logprobs-seeded", "n"}


@pytest.mark.parametrize(
    "name", [name if name in ALONE else pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS]
)
def test_option(plain_llm: Any, tested_llm: Any, name: str) -> None:
    prompts = own_prompts()[:4]
    expected = chat(plain_llm, prompts, 4, [OPTIONS[name]], 24)
    compare(expected, chat(tested_llm, prompts, 4, [OPTIONS[name]], 24))
    # One request alone, in steps of another shape.
    per_prompt = OPTIONS[name].get("n", 1)
    compare(expected[:per_prompt], chat(tested_llm, prompts[:1], 1, [OPTIONS[name]], 24))


@pytest.mark.parametrize("fixture", ["tested_llm", pytest.param("hybrid_llm", marks=pytest.mark.slow)])
def test_all_options_in_one_batch(
    plain_llm: Any, fixture: str, enough: int, request: pytest.FixtureRequest
) -> None:
    """Requests with different options share steps, and none changes another's output."""
    llm = request.getfixturevalue(fixture)
    names = [name for name in OPTIONS if name != "n"]
    prompts = [own_prompts()[i % 8] for i in range(len(names))]
    options = [OPTIONS[name] for name in names]
    before = counters(llm)
    compare(chat(plain_llm, prompts, 16, options), chat(llm, prompts, 16, options))
    after = counters(llm)
    assert after["spec_accepted_tokens"] - before["spec_accepted_tokens"] > 100 // enough
    assert after["fallbacks:proposer_error"] == 0


def test_json_schema_among_free_requests(plain_llm: Any, tested_llm: Any, drafts_by_model: bool) -> None:
    structured = {
        **GREEDY,
        "structured_outputs": StructuredOutputsParams(json=json.dumps(SCHEMA)),
    }
    prompts = [
        "Describe a person as JSON with name and age.",
        own_prompts()[0],
        "Invent a pirate, as JSON with name and age.",
        own_prompts()[1],
    ]
    options = [structured, GREEDY, {**structured, **SEEDED}, SEEDED]
    expected = chat(plain_llm, prompts, 4, options, 48)
    before = counters(tested_llm)
    actual = chat(tested_llm, prompts, 4, options, 48)
    compare(expected, actual)
    for output in (actual[0], actual[2]):
        if output.finish_reason == "stop":
            assert set(json.loads(output.text)) == {"name", "age"}
    # Where structured requests drafted as chains they said so.
    chains = "fallbacks:structured_output_chain"
    assert (counters(tested_llm)[chains] > before[chains]) == drafts_by_model


def test_second_turn_on_blocks_that_trees_wrote(plain_llm: Any, tested_llm: Any) -> None:
    """The first turn fills whole KV blocks with accepted paths; the second reads them from the prefix cache."""
    tokens = plain_llm.get_tokenizer().encode("Count from one to a hundred in words: one, two, three, four,")
    results = []
    for llm in (plain_llm, tested_llm):
        params = SamplingParams(**GREEDY, max_tokens=160, ignore_eos=True)
        first = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)[0]
        longer = [*tokens, *first.outputs[0].token_ids, *tokens]
        params = SamplingParams(**GREEDY, max_tokens=24, ignore_eos=True)
        second = llm.generate({"prompt_token_ids": longer}, params, use_tqdm=False)[0]
        assert second.num_cached_tokens == 128  # a block, of which the first turn's prompt is a small part
        results.append([first.outputs[0], second.outputs[0]])
    compare(*results)


def counters(llm: Any) -> dict[str, int]:
    (totals,) = llm.collective_rpc("vllm_ext_counters")
    result: dict[str, int] = totals
    return result
