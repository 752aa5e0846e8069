# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters next to trees on V2: requests of two adapters and of none in one batch, token for token as plain V2."""

from __future__ import annotations

from typing import Any

import lora_adapters
import pytest
from conftest import V2_HOST_METHOD, V2_METHOD, v2_engine
from helpers import assert_same_outputs
from v2_requests import counters, prompts, sampling, tokens

pytestmark = pytest.mark.v2


@pytest.fixture(scope="module")
def adapters(v2_dir: str, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """None, and two."""
    return lora_adapters.none_and_two(v2_dir, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def plain(v2_dir: str, v2_plain: Any) -> Any:
    """Without speculation."""
    return v2_engine(v2_dir, **lora_adapters.OPTIONS)


def ask(llm: Any, adapters: list[Any], texts: list[list[int]], **values: Any) -> list[list[int]]:
    given = [{"prompt_token_ids": text} for text in texts]
    chosen = [adapters[i % len(adapters)] for i in range(len(texts))]
    answers = llm.generate(given, sampling(**values), lora_request=chosen, use_tqdm=False)
    return tokens([answer.outputs[0] for answer in answers])


@pytest.mark.parametrize("method", [V2_METHOD, V2_HOST_METHOD], ids=["device", "host"])
def test_adapters_are_lossless(v2_dir: str, plain: Any, adapters: list[Any], method: dict[str, Any]) -> None:
    trees = v2_engine(v2_dir, method, **lora_adapters.OPTIONS)
    texts = [text for text in prompts(2) for _ in adapters]
    for values in ({}, {"temperature": 0.9, "seed": 5}, {"repetition_penalty": 1.2, "logprobs": 1}):
        expected = ask(plain, adapters, texts, **values)
        assert lora_adapters.all_differ(expected, len(adapters))
        assert_same_outputs(expected, ask(trees, adapters, texts, **values))
    totals = counters(trees)
    assert totals["spec_accepted_tokens"] > 0
    assert totals["fallbacks:proposer_error"] == 0
