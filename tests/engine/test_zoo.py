# SPDX-License-Identifier: Apache-2.0
"""The architectures that people serve, as small checkpoints of random weights: trees or chains, and plain's tokens.

Prompts are shorter and longer than windows and chunks; requests are greedy and seeded, come again with their prefix in
the cache, and lose their blocks.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import zoo
from conftest import engine
from helpers import assert_same_outputs, preemptions
from v2_requests import counters, generate, sampling, tokens

pytestmark = pytest.mark.engine
METHODS: dict[str, dict[str, Any]] = {
    "token_recycling": {},
    "hybrid": {"drafters": ["token_recycling", "suffix_tree"]},
}
QUICK = {"gpt_oss": "hybrid"}
OPTIONS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 1024,
    "block_size": 32,
}
NODES = 12
# Three groups of layers with windows or chunks have blocks of their own.
BLOCKS = {"gemma3": 70, "llama4": 65}
TIMES = {"llama4": 2}  # that each prompt is sent at once: of chunks little is held
FEW_BLOCKS = 34


def prompts() -> list[list[int]]:
    return [random.Random(n).choices(range(3, zoo.LIKELY), k=n) for n in (12, 40, 100, 300, 350)]


KINDS = [
    sampling(max_tokens=60),
    sampling(max_tokens=80, temperature=0.8, seed=3),
    sampling(max_tokens=60, temperature=1.2, seed=4, repetition_penalty=1.1),
    sampling(max_tokens=70),
    sampling(max_tokens=80, temperature=0.6, seed=5, logprobs=1),
]


@pytest.fixture(scope="module")
def models(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a model by its name, and what plain vLLM answers."""
    made: dict[str, tuple[str, list[list[int]]]] = {}

    def of(name: str) -> tuple[str, list[list[int]]]:
        if name not in made:
            folder = zoo.write(name, Path(model_dir), tmp_path_factory.mktemp(name))
            for llm in engine(folder, **OPTIONS):
                made[name] = folder, tokens(generate(llm, prompts(), KINDS))
        return made[name]

    return of


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=[pytest.mark.slow] * (QUICK.get(name) != method))
        for name in zoo.MODELS
        for method in METHODS
    ],
)
def test_trees_of_a_model(models: Any, name: str, method: str) -> None:
    folder, expected = models(name)
    options = {"method": method, "num_speculative_tokens": NODES, "budget": "fixed", **METHODS[method]}
    # Too few blocks for all of them: some are preempted.
    times = TIMES.get(name, 1)
    given = OPTIONS | {
        "max_num_seqs": times * OPTIONS["max_num_seqs"],
        "num_gpu_blocks_override": BLOCKS.get(name, FEW_BLOCKS),
    }
    for llm in engine(folder, options, **given):
        for _ in range(2):  # the second time with prefixes in the cache
            assert_same_outputs(expected * times, tokens(generate(llm, prompts() * times, KINDS * times)))
        assert name not in TIMES or preemptions(llm) > 0
        totals = counters(llm)
        assert totals["fallbacks:model_chain"] == totals["fallbacks:proposer_error"] == 0
        assert totals["spec_accepted_tokens"] > 0.3 * totals["spec_steps"]
        print(name, method, totals["spec_accepted_tokens"], totals["spec_steps"])
