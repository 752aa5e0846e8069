# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters next to trees: requests of two adapters and of none in one batch, token for token as plain vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lora_adapters
import pytest
from conftest import engine
from helpers import assert_same_outputs, own_prompts
from vllm import SamplingParams

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def adapters(slice_dir: str, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """None, and two."""
    return lora_adapters.none_and_two(slice_dir, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def plain(slice_dir: str) -> Iterator[Any]:
    """Without speculation."""
    yield from engine(slice_dir, **lora_adapters.OPTIONS)


@pytest.fixture(scope="module")
def trees(slice_dir: str, tested_method: dict[str, Any], plain: Any) -> Iterator[Any]:
    """With trees."""
    yield from engine(slice_dir, tested_method, **lora_adapters.OPTIONS)


@pytest.mark.parametrize("values", [{}, {"temperature": 0.9, "seed": 5}, {"repetition_penalty": 1.2}])
def test_adapters_are_lossless(plain: Any, trees: Any, adapters: list[Any], values: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 40, "ignore_eos": True, **values})
    texts = [text for text in own_prompts()[:4] for _ in adapters]
    chosen = adapters * 4
    answers = []
    for llm in (plain, trees):
        outputs = llm.generate(texts, params, lora_request=chosen, use_tqdm=False)
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
    assert lora_adapters.all_differ(answers[0], len(adapters))
    assert_same_outputs(*answers)
    (totals,) = trees.collective_rpc("vllm_ext_counters")
    assert totals["spec_accepted_tokens"] > 0
    assert totals["fallbacks:proposer_error"] == 0
