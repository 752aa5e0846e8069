# SPDX-License-Identifier: Apache-2.0
"""Whatever vLLM's V1 sampler keeps of a request, next to trees it is that request's, and nobody else's: plain's output.

The table of what that is, is docs/request-states.md.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers import assert_same_logprobs, assert_same_outputs
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

pytestmark = pytest.mark.engine

GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 11}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
START, END = 8, [10, 198]  # of conftest.THINKING
# Neither the answer's end nor, but where it is forced, thought's.
NOTHING: dict[str, Any] = {**GREEDY, "logit_bias": {2: -100.0, END[0]: -100.0}}
# Each keeps something else of a request.
STATES: dict[str, dict[str, Any]] = {
    "free": {**GREEDY},
    "budget 5": {**NOTHING, "thinking_token_budget": 5},
    "budget 0": {**NOTHING, "thinking_token_budget": 0},
    "budget 20": {**NOTHING, "thinking_token_budget": 20},
    "budget of all": {**NOTHING, "thinking_token_budget": 200},
    "budget, seeded": {**NOTHING, **SEEDED, "thinking_token_budget": 9},
    # It begins to think, again and again, in what it puts out.
    "budget, later": {**SEEDED, "logit_bias": {START: 14.0, 2: -100.0}, "thinking_token_budget": 3},
    "budget, penalties": {**NOTHING, "thinking_token_budget": 7, "repetition_penalty": 1.3, "min_tokens": 12},
    "budget, logprobs": {**NOTHING, "thinking_token_budget": 4, "logprobs": 2},
    "min_tokens": {**GREEDY, "min_tokens": 20, "stop_token_ids": [28, 30, 198]},
    "min_p": {**SEEDED, "min_p": 0.1},
    "penalties": {**SEEDED, "frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.1},
    "bad words": {**GREEDY, "bad_words": [" the", " of the"]},
    "allowed ids": {**GREEDY, "allowed_token_ids": [*range(0, 20000, 2), 1, 28, 30]},
    "schema": {**GREEDY, "structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    "logprobs": {**SEEDED, "logprobs": 3, "top_k": 30, "top_p": 0.9},
    "prompt logprobs": {**GREEDY, "prompt_logprobs": 2, "logprobs": 0},
    "n": {**SEEDED, "n": 3},
    "stop": {**GREEDY, "stop": ["the", "."]},
    "repetition": {
        **GREEDY,
        "logit_bias": {28: 30.0},
        "repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_count=7),
    },
}
WORDS = ["mill", "ship", "clock", "river", "house"]


def ask(llm: Any, names: list[str]) -> list[Any]:
    """All at once; each begins to think with its prompt's last token."""
    texts = [
        f"<|im_start|>user\nDescribe a {WORDS[i % len(WORDS)]}.<|im_end|>\n<|im_start|>assistant\n<issue_start>"
        for i in range(len(names))
    ]
    params = [SamplingParams(max_tokens=24, skip_special_tokens=False, **STATES[name]) for name in names]
    outputs: list[Any] = llm.generate(texts, params, use_tqdm=False)
    return outputs


def compare(names: list[str], expected: list[Any], actual: list[Any]) -> None:
    for name, left, right in zip(names, expected, actual, strict=True):
        for a, b in zip(left.outputs, right.outputs, strict=True):
            try:
                assert_same_outputs([a.token_ids], [b.token_ids])
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
            assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason), name
            assert_same_logprobs(a.logprobs, b.logprobs)
        assert_same_logprobs(left.prompt_logprobs, right.prompt_logprobs)


def counters(llm: Any) -> dict[str, int]:
    (totals,) = llm.collective_rpc("vllm_ext_counters")
    result: dict[str, int] = totals
    return result


@pytest.mark.parametrize("fixture", ["tested_llm", pytest.param("hybrid_llm", marks=pytest.mark.slow)])
def test_all_states_in_one_batch(
    plain_llm: Any, fixture: str, enough: int, request: pytest.FixtureRequest
) -> None:
    """More requests than places: they come, go and move in the batch. Found: budgets counted by drafts, on row 0."""
    llm = request.getfixturevalue(fixture)
    names = [*STATES, "budget 5"]
    expected = ask(plain_llm, names)
    tokens = {name: list(output.outputs[0].token_ids) for name, output in zip(names, expected, strict=True)}
    for name, budget in (("budget 5", 5), ("budget 0", 0), ("budget 20", 20), ("budget, penalties", 7)):
        assert tokens[name][budget : budget + 2] == END
        assert END[0] not in tokens[name][:budget]
    assert END[0] not in tokens["budget of all"]
    assert tokens["budget, later"].count(START) > 1
    assert expected[names.index("repetition")].outputs[0].finish_reason == "repetition"
    before = counters(llm)
    compare(names, expected, ask(llm, names))
    after = counters(llm)
    assert after["spec_accepted_tokens"] - before["spec_accepted_tokens"] > 50 // enough
    assert after["fallbacks:proposer_error"] == 0


def test_a_budget_ends_its_own_requests_thinking_alone(plain_llm: Any, tested_llm: Any) -> None:
    """Found: the end forced onto the first row, whoever's that was."""
    for names in (["free", "budget 5"], ["budget 20", "budget 20", "free", "budget 0"]):
        compare(names, ask(plain_llm, names), ask(tested_llm, names))


def test_scores_of_given_tokens(plain_llm: Any, tested_llm: Any) -> None:
    """Found: one that asks for them took the drafts from all others."""
    ids = [[30, 28, 253], [198]]
    names = ["free", "budget 5", "penalties", "free", "min_tokens"]

    def run(llm: Any) -> list[Any]:
        params = [SamplingParams(max_tokens=24, **STATES[name]) for name in names]
        params += [SamplingParams(max_tokens=24, temperature=0, logprob_token_ids=each) for each in ids]
        texts = [f"Describe a {WORDS[i % len(WORDS)]}. It is a {WORDS[i % 3]}, a" for i in range(len(params))]
        outputs: list[Any] = llm.generate(texts, params, use_tqdm=False)
        return outputs

    expected = run(plain_llm)
    run(tested_llm)
    before = counters(tested_llm)
    actual = run(tested_llm)
    after = counters(tested_llm)
    compare([*names, "scores", "scores"], expected, actual)
    for given, output in zip(ids, actual[-2:], strict=True):
        assert all({*given} <= {*row} for row in output.outputs[0].logprobs)
    assert after["spec_accepted_tokens"] - before["spec_accepted_tokens"] > 10
