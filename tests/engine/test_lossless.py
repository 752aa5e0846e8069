# SPDX-License-Identifier: Apache-2.0
"""Greedy float32 output is token-identical with a method on and off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from helpers import MAX_MODEL_LEN, assert_same_outputs, own_prompts, shared_prompts
from vllm import SamplingParams

pytestmark = pytest.mark.engine


def chat(llm: Any, prompts: Sequence[str], batch_size: int, **sampling: Any) -> list[list[int]]:
    """Answers through the chat template, ``batch_size`` at a time."""
    params = SamplingParams(temperature=0, **sampling)
    answers: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        batch = [[{"role": "user", "content": prompt}] for prompt in prompts[start : start + batch_size]]
        answers += [list(o.outputs[0].token_ids) for o in llm.chat(batch, params, use_tqdm=False)]
    return answers


def complete(llm: Any, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
    """Completions of token ids, all at once."""
    params = SamplingParams(temperature=0, **sampling)
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [list(o.outputs[0].token_ids) for o in llm.generate(inputs, params, use_tqdm=False)]


def counters(llm: Any) -> dict[str, int]:
    """The worker's own totals: [drafted, accepted, emitted, steps]."""
    (totals,) = llm.collective_rpc("vllm_ext_counters")
    result: dict[str, int] = totals
    return result


@pytest.mark.parametrize("number", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_mixed_prompts_at_batch_1_and_4(plain_llm: Any, tested_llm: Any, enough: int, number: int) -> None:
    prompts = shared_prompts(number)
    before = counters(tested_llm)
    expected = chat(plain_llm, prompts, 4, max_tokens=24)
    assert_same_outputs(expected, chat(tested_llm, prompts, 1, max_tokens=24))
    assert_same_outputs(expected, chat(tested_llm, prompts, 4, max_tokens=24))
    after = counters(tested_llm)
    # The comparison means something only if drafts were really verified, and some of them accepted.
    assert after["spec_accepted_tokens"] - before["spec_accepted_tokens"] > 500 * number // 40 // enough
    assert after["fallbacks:proposer_error"] == 0


@pytest.mark.parametrize("fixture", ["tested_llm", pytest.param("hybrid_llm", marks=pytest.mark.slow)])
def test_own_prompts_at_batch_4(plain_llm: Any, fixture: str, request: pytest.FixtureRequest) -> None:
    llm = request.getfixturevalue(fixture)
    before = counters(llm)
    expected = chat(plain_llm, own_prompts(), 4, max_tokens=40)
    assert_same_outputs(expected, chat(llm, own_prompts(), 4, max_tokens=40))
    after = counters(llm)
    assert after["spec_accepted_tokens"] > before["spec_accepted_tokens"]
    assert after["fallbacks:proposer_error"] == 0


def test_counters_add_up(tested_llm: Any) -> None:
    before = counters(tested_llm)
    (answer,) = chat(tested_llm, ["List the days of the week, three times."], 1, max_tokens=60)
    new = {name: total - before[name] for name, total in counters(tested_llm).items()}
    assert new["spec_emitted_tokens"] == len(answer)
    assert new["spec_emitted_tokens"] == new["spec_steps"] + new["spec_accepted_tokens"]
    assert new["spec_accepted_tokens"] <= new["spec_draft_tokens"] <= 12 * new["spec_steps"]


def test_one_token_prompts(plain_llm: Any, tested_llm: Any) -> None:
    prompts = [[1], [504], [2683], [28]]
    expected = complete(plain_llm, prompts, max_tokens=20)
    assert_same_outputs(expected, complete(tested_llm, prompts, max_tokens=20))


def test_up_to_max_model_len(plain_llm: Any, tested_llm: Any) -> None:
    """The last positions of the context: no draft may reach past them, and no request may lose any."""
    words = plain_llm.get_tokenizer().encode("one two three four five six seven eight nine ten ")
    text = (words * MAX_MODEL_LEN)[: MAX_MODEL_LEN - 1]
    # Room for 1, 2, 4 and 17 tokens, next to a request that has all the room.
    prompts = [text, text[:-1], text[:-3], text[:-16], words]
    expected = complete(plain_llm, prompts, max_tokens=40, ignore_eos=True)
    assert [len(tokens) for tokens in expected] == [1, 2, 4, 17, 40]
    assert_same_outputs(expected, complete(tested_llm, prompts, max_tokens=40, ignore_eos=True))
    assert counters(tested_llm)["fallbacks:proposer_error"] == 0
