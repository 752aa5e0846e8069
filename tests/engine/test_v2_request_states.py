# SPDX-License-Identifier: Apache-2.0
"""Whatever vLLM's V2 sampler keeps of a request, next to trees it is that request's, and nobody else's: plain's output.

The table of what that is, is docs/request-states.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers import assert_same_logprobs, assert_same_outputs
from v2_requests import counters, generate, prompts, sampling, tokens
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

pytestmark = pytest.mark.v2

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
START, END = 8, [10, 198]  # of conftest.THINKING
NOTHING: dict[str, Any] = {"logit_bias": {END[0]: -100.0}}  # the end of thought, but where it is forced
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 11}
STATES: dict[str, dict[str, Any]] = {
    "budget 5": {**NOTHING, "thinking_token_budget": 5},
    "free": {},
    "budget 0": {**NOTHING, "thinking_token_budget": 0},
    "budget 12, seeded": {**NOTHING, **SEEDED, "thinking_token_budget": 12},
    # It begins to think, again and again, in what it puts out.
    "budget, later": {
        "temperature": 2.0,
        "seed": 1,
        "allowed_token_ids": [START, 9, 11, 12],
        "thinking_token_budget": 2,
    },
    "budget, penalties": {
        **NOTHING,
        "thinking_token_budget": 4,
        "frequency_penalty": 0.5,
        "bad_words": ["the"],
    },
    "min_tokens": {"min_tokens": 12, "stop_token_ids": [*range(100, 200)]},
    "min_p": {**SEEDED, "min_p": 0.05},
    "penalties": {**SEEDED, "frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.1},
    "bad words": {"bad_words": ["the", "of the"]},
    "allowed ids": {"allowed_token_ids": [*range(20, 1000, 2)]},
    "schema": {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "ignore_eos": False},
    "logprobs": {**SEEDED, "logprobs": 3, "top_k": 30, "top_p": 0.9},
    "prompt logprobs": {"prompt_logprobs": 2},
    "scores": {"logprob_token_ids": [30, 28, 253]},
    "scores, seeded": {**SEEDED, "logprob_token_ids": [198]},
    "repetition": {
        "logit_bias": {28: 60.0},
        "repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_count=7),
    },
    "own processor": {"extra_args": {"no_echo": True}},
    "own processor, seeded": {**SEEDED, "extra_args": {"no_echo": True}, "top_k": 40},
}


def check_same(plain: Any, trees: Any, names: list[str], **more: Any) -> list[Any]:
    """Plain's outputs, which are those with trees; each prompt ends where thinking begins."""
    texts = [[*text[-8:], START] for text in prompts(len(names), seed=31)]
    params = [sampling(**STATES[name], **more) for name in names]
    inputs = [{"prompt_token_ids": text} for text in texts]
    expected, actual = (
        llm.generate(inputs, [each.clone() for each in params], use_tqdm=False) for llm in (plain, trees)
    )
    for name, left, right in zip(names, expected, actual, strict=True):
        try:
            assert_same_outputs(tokens(left.outputs), tokens(right.outputs))
            assert_same_logprobs(left.outputs[0].logprobs, right.outputs[0].logprobs)
            assert_same_logprobs(left.prompt_logprobs, right.prompt_logprobs)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
        assert left.outputs[0].finish_reason == right.outputs[0].finish_reason
    result: list[Any] = expected
    return result


FEW = ["budget 5", "free", "scores", "own processor", "budget 0", "penalties"]


@pytest.mark.quick
def test_a_few_in_one_batch(v2_plain: Any, v2_trees: Any) -> None:
    """Found: logprob token ids left out with drafts."""
    check_same(v2_plain, v2_trees, FEW, max_tokens=9)


def test_all_states_in_one_batch(
    v2_plain: Any,
    v2_either: Any,
    monkeypatch: pytest.MonkeyPatch,
    accepted_at_least: Callable[[int], int],
) -> None:
    """More requests than places: they come, go and change places. Found: all requests with a temperature under a
    processor that none of them uses.
    """
    runner = v2_either.llm_engine.model_executor.driver_worker.worker.model_runner
    admit, dependent = runner.speculator.admit, []

    def watching(slot: int, request: Any, path_dependent: bool) -> None:
        dependent.append(path_dependent)
        admit(slot, request, path_dependent)

    monkeypatch.setattr(runner.speculator, "admit", watching)
    names = [*STATES, "free", "budget 5"]
    before = counters(v2_either)["spec_accepted_tokens"]
    expected = check_same(v2_plain, v2_either, names)
    answers = {name: list(output.outputs[0].token_ids) for name, output in zip(names, expected, strict=True)}
    for name, budget in (("budget 5", 5), ("budget 0", 0), ("budget 12, seeded", 12)):
        assert answers[name][budget : budget + 2] == END
        assert END[0] not in answers[name][:budget]
    assert answers["budget, later"].count(START) > 1
    assert expected[names.index("repetition")].outputs[0].finish_reason == "repetition"
    assert counters(v2_either)["spec_accepted_tokens"] >= before + accepted_at_least(21)
    # Sampled depth by depth are those that have to be; a processor that a request does not use is none of its business.
    assert sum(dependent) == sum(("budget" in name) + ("own" in name) for name in names)


def test_a_processor_of_the_users_own_sees_each_path(v2_plain: Any, v2_either: Any) -> None:
    """Of text that repeats itself, so that drafts are what it forbids."""
    texts = [text * 2 for text in prompts(4, seed=7)]
    params = [sampling(extra_args={"no_echo": True}), sampling(), sampling(temperature=0.7, seed=3)]
    params.append(sampling(temperature=0.7, seed=3, extra_args={"no_echo": True}))
    expected = tokens(generate(v2_plain, texts, params))
    for answer in (expected[0], expected[3]):
        assert all(token not in answer[max(0, i - 2) : i] for i, token in enumerate(answer))
    assert_same_outputs(expected, tokens(generate(v2_either, texts, params)))
