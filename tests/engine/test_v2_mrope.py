# SPDX-License-Identifier: Apache-2.0
"""Trees of models with M-RoPE on the V2 runner, behind images: as the zoo does it on V1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_qwen_vl
from conftest import V2_HOST_METHOD, V2_METHOD, v2_attention, v2_engine
from helpers import assert_same_outputs, preemptions
from tiny_qwen_vl import image, prompt
from v2_requests import counters, sampling

pytestmark = pytest.mark.v2
OPTIONS: dict[str, Any] = {
    "logits_processors": None,
    "reasoning_config": None,
    "max_num_batched_tokens": 64,  # an image in two chunks
    "limit_mm_per_prompt": {"image": 2, "video": 0},
}
FEW_BLOCKS = 9
KINDS = [
    sampling(max_tokens=30),
    sampling(max_tokens=40, temperature=0.8, seed=3),
    sampling(max_tokens=30, temperature=0.6, seed=5, repetition_penalty=1.1),
    sampling(max_tokens=30),
]


def answers(llm: Any) -> list[list[int]]:
    tokenizer = llm.get_tokenizer()
    given = [
        prompt(tokenizer, 10, {3: image(1, 48, 48)}, 1),
        prompt(tokenizer, 40, {0: image(2, 16, 24), 30: image(3, 64, 32)}, 2),
        prompt(tokenizer, 50, {}, 3),
        prompt(tokenizer, 90, {70: image(1, 48, 48)}, 4),
    ]
    outputs = llm.generate(given, KINDS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", tiny_qwen_vl.NAMES)
def test_trees_behind_images(
    name: str, model_dir: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in tiny_qwen_vl.ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    folder = tiny_qwen_vl.write(name, Path(model_dir), tmp_path_factory.mktemp(name))
    with v2_attention("CPU_ATTN"):
        expected = answers(v2_engine(folder, **OPTIONS))
        for method in (V2_METHOD, V2_HOST_METHOD):
            llm = v2_engine(folder, method, **OPTIONS, num_gpu_blocks_override=FEW_BLOCKS)
            for _ in range(2):  # the second time with prefixes in the cache
                assert_same_outputs(expected, answers(llm))
            assert preemptions(llm)
            totals = counters(llm)
            assert totals["fallbacks:model_chain"] == totals["fallbacks:proposer_error"] == 0
            assert totals["spec_accepted_tokens"] > 0.3 * totals["spec_steps"]
            print(name, method["method"], totals["spec_accepted_tokens"], totals["spec_steps"])
