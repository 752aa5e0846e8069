# SPDX-License-Identifier: Apache-2.0
"""Trees of models with M-RoPE, behind images: a node's place is counted on from the prompt's positions, not its tokens.

Prompts with one image, with two and with none, of several sizes; greedy and seeded requests, that come again with their
prefix in the cache and lose their blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_qwen_vl
from conftest import engine
from helpers import assert_same_outputs, preemptions
from tiny_qwen_vl import image, prompt
from v2_requests import counters, sampling

pytestmark = pytest.mark.engine
METHODS: dict[str, dict[str, Any]] = {
    "token_recycling": {},
    "hybrid": {"drafters": ["token_recycling", "suffix_tree"]},
}
QUICK = ("qwen3_vl", "hybrid")
OPTIONS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 1024,
    "block_size": 32,
    "limit_mm_per_prompt": {"image": 2, "video": 0},
}
NODES = 12
FEW_BLOCKS = 20
KINDS = [
    sampling(max_tokens=60),
    sampling(max_tokens=80, temperature=0.8, seed=3),
    sampling(max_tokens=60, temperature=1.2, seed=4, repetition_penalty=1.1),
    sampling(max_tokens=70),
    sampling(max_tokens=80, temperature=0.6, seed=5, logprobs=1),
]


def prompts(llm: Any) -> list[dict[str, Any]]:
    tokenizer = llm.get_tokenizer()
    return [
        prompt(tokenizer, 10, {3: image(1, 48, 48)}, 1),
        prompt(tokenizer, 60, {0: image(2, 16, 24), 40: image(3, 64, 32)}, 2),
        prompt(tokenizer, 100, {}, 3),
        prompt(tokenizer, 200, {150: image(1, 48, 48)}, 4),
        prompt(tokenizer, 12, {5: image(4, 30, 70), 11: image(5, 90, 50)}, 5),
    ]


def answers(llm: Any, given: list[dict[str, Any]]) -> list[list[int]]:
    outputs = llm.generate(given, KINDS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def models(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a model by its name, the prompts, and what plain vLLM answers."""
    made: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in made:
            folder = tiny_qwen_vl.write(name, Path(model_dir), tmp_path_factory.mktemp(name))
            for llm in engine(folder, environment=tiny_qwen_vl.ENVIRONMENT, **OPTIONS):
                made[name] = folder, prompts(llm), answers(llm, prompts(llm))
        return made[name]

    return of


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=[pytest.mark.slow] * ((name, method) != QUICK))
        for name in tiny_qwen_vl.NAMES
        for method in METHODS
    ],
)
def test_trees_behind_images(models: Any, name: str, method: str) -> None:
    folder, given, expected = models(name)
    options = {"method": method, "num_speculative_tokens": NODES, "budget": "fixed", **METHODS[method]}
    # Too few blocks for all of them: some are preempted.
    for llm in engine(
        folder, options, environment=tiny_qwen_vl.ENVIRONMENT, **OPTIONS, num_gpu_blocks_override=FEW_BLOCKS
    ):
        for _ in range(2):  # the second time with prefixes in the cache
            assert_same_outputs(expected, answers(llm, given))
        assert preemptions(llm)
        totals = counters(llm)
        assert totals["fallbacks:model_chain"] == totals["fallbacks:proposer_error"] == 0
        assert totals["spec_accepted_tokens"] > 0.3 * totals["spec_steps"]
        print(name, method, totals["spec_accepted_tokens"], totals["spec_steps"])
