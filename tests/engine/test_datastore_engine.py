# SPDX-License-Identifier: Apache-2.0
"""Method rest in a real engine, with a store of what the model itself has said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import engine
from helpers import assert_same_outputs, own_prompts
from vllm import SamplingParams

pytestmark = pytest.mark.engine

MAX_TOKENS = 40


def chat(llm: Any, batch_size: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    chats = [[{"role": "user", "content": prompt}] for prompt in own_prompts()]
    outputs = [
        output
        for start in range(0, len(chats), batch_size)
        for output in llm.chat(chats[start : start + batch_size], params, use_tqdm=False)
    ]
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def answers(plain_llm: Any) -> list[list[int]]:
    return chat(plain_llm, 4)


@pytest.fixture(scope="module")
def rest_llm(
    model_dir: str, plain_llm: Any, answers: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    from vllm_ext.data.datastore_build import build

    folder = tmp_path_factory.mktemp("rest")
    for number, answer in enumerate(answers[::2]):  # the other half is news to it
        (folder / f"{number}.txt").write_text(plain_llm.get_tokenizer().decode(answer))
    store = folder / "store"
    build(sorted(folder.glob("*.txt")), store, model_dir, "text", False, lambda *_: None)
    method = {"method": "rest", "datastore": str(store), "num_speculative_tokens": 12, "budget": "fixed"}
    yield from engine(model_dir, method)


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_known_and_unknown_answers_are_the_same(
    answers: list[list[int]], rest_llm: Any, batch_size: int
) -> None:
    (before,) = rest_llm.collective_rpc("vllm_ext_counters")
    assert_same_outputs(answers, chat(rest_llm, batch_size))
    (after,) = rest_llm.collective_rpc("vllm_ext_counters")
    new = {name: after[name] - before[name] for name in after}
    assert new["fallbacks:proposer_error"] == 0
    # Half of the answers stand in the store: most of their tokens come from there.
    known = sum(len(answer) for answer in answers[::2])
    assert new["spec_accepted_tokens"] > known // 2
