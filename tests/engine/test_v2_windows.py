# SPDX-License-Identifier: Apache-2.0
"""Trees of models with windows, chunks and soft-caps on the V2 runner, whose KV lies in groups of several kinds.

Not of gpt-oss, for its sinks, and of Llama 4 without experts: vLLM makes process groups for these with the first engine
of a process.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zoo
from conftest import V2_HOST_METHOD, V2_METHOD, v2_attention, v2_engine
from helpers import assert_same_outputs
from v2_requests import counters, generate, sampling, tokens

pytestmark = pytest.mark.v2
# Blocks: windowed layers have some of their own.
OPTIONS: dict[str, Any] = {
    "logits_processors": None,
    "reasoning_config": None,
    "num_gpu_blocks_override": 200,
}
CHANGED: dict[str, dict[str, Any]] = {"llama4": {"interleave_moe_layer_step": 1000}}


@pytest.fixture(scope="module", params=["CPU_ATTN", "TRITON_ATTN"])
def attention(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of CPUs, and of GPUs in the interpreter."""
    with v2_attention(request.param):
        yield request.param


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "llama4"])
def test_trees_of_layers_with_windows_and_chunks(
    attention: str,
    name: str,
    model_dir: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Found: trees of chunks went by a block table with a row for each chunk, and read behind its end."""
    folder = zoo.write(name, Path(model_dir), tmp_path_factory.mktemp(name), **CHANGED.get(name, {}))
    in_interpreter = attention == "TRITON_ATTN"
    texts = [random.Random(n).choices(range(3, zoo.LIKELY), k=n) for n in (122, 60, 12)]
    most = 10 if in_interpreter else 30
    kinds = [
        sampling(max_tokens=most),
        sampling(max_tokens=most, temperature=0.8, seed=3),
        sampling(max_tokens=20, temperature=0.6, seed=5, repetition_penalty=1.1),
    ]
    if in_interpreter:  # which takes minutes
        texts, kinds = texts[:1] * 2, kinds[:2]
    expected = tokens(generate(v2_engine(folder, **OPTIONS), texts, kinds))
    for method in (V2_METHOD, V2_HOST_METHOD)[: 1 if in_interpreter else 2]:
        llm = v2_engine(folder, method, **OPTIONS)
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        assert runner.speculator.chain_reason is None
        assert_same_outputs(expected, tokens(generate(llm, texts, kinds)))
        assert counters(llm)["spec_accepted_tokens"] > (3 if in_interpreter else 10)
