# SPDX-License-Identifier: Apache-2.0
"""Trees of recurrent layers on the V2 runner, where the host does not know what was accepted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zoo
from conftest import V2_HOST_METHOD, V2_METHOD, v2_attention, v2_engine
from helpers import assert_same_outputs, first_gaps
from v2_requests import counters, generate, sampling, tokens
from vllm.distributed import parallel_state

pytestmark = pytest.mark.v2
OPTIONS: dict[str, Any] = {"logits_processors": None, "reasoning_config": None, **zoo.RECURRENT}


@pytest.fixture(scope="module", autouse=True)
def attention() -> Iterator[None]:
    with v2_attention("CPU_ATTN"):
        yield


@pytest.mark.parametrize("name", ["mamba2", "granite4", "falcon_h1"])
def test_trees_of_layers_with_a_state(
    name: str, model_dir: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = zoo.write(name, Path(model_dir), tmp_path_factory.mktemp(name))
    # More than a step has tokens for, so that prompts come in parts, beside requests that decode.
    texts = [random.Random(n).choices(range(3, zoo.LIKELY), k=n) for n in (70, 150, 12, 13, 1, 40)]
    kinds = [
        sampling(max_tokens=30),
        sampling(max_tokens=30, temperature=0.8, seed=3),
        sampling(max_tokens=20, temperature=0.6, seed=5, repetition_penalty=1.1),
        sampling(max_tokens=24),
        sampling(max_tokens=9),
        sampling(max_tokens=30, temperature=0.7, seed=6),
    ]
    expected = tokens(generate(v2_engine(folder, **OPTIONS), texts, kinds))
    for method in (V2_METHOD, V2_HOST_METHOD):
        llm = v2_engine(folder, method, **OPTIONS)
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        assert runner.speculator.chain_reason is None
        for _ in range(2):  # the second time in blocks that others had
            assert_same_outputs(expected, tokens(generate(llm, texts, kinds)))
        assert counters(llm)["spec_accepted_tokens"] > 30


def test_gated_delta_nets(
    model_dir: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, as vLLM's kernels for CPUs have no other: answers part from plain's at near ties."""
    if parallel_state._TP is not None and parallel_state._EP is None:
        # vLLM makes the ranks' groups once a process, and one of experts only where the first model has some.
        monkeypatch.setattr(parallel_state, "_EP", parallel_state._TP)
    folder = zoo.write("qwen3_next", Path(model_dir), tmp_path_factory.mktemp("qwen3_next"))
    texts = [random.Random(n).choices(range(3, zoo.LIKELY), k=n) for n in (70, 150, 12, 1)]
    asked = sampling(max_tokens=30, logprobs=20)
    options = {**OPTIONS, "dtype": "bfloat16"}
    expected = generate(v2_engine(folder, **options), texts, asked)
    for method in (V2_METHOD, V2_HOST_METHOD):
        llm = v2_engine(folder, method, **options)
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        assert runner.speculator.chain_reason is None
        for _ in range(2):
            gaps = first_gaps(expected, generate(llm, texts, asked))
            print("gaps", gaps)
            assert max(gaps, default=0) < 0.25
        assert counters(llm)["spec_accepted_tokens"] > 30
