# SPDX-License-Identifier: Apache-2.0
"""The attention backend that trees have on CUDA, under the V2 runner: masks and slots come from device buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import V2_HOST_METHOD, V2_METHOD, v2_attention, v2_engine
from helpers import assert_same_outputs
from v2_requests import counters, generate, prompts, sampling, tokens

pytestmark = pytest.mark.v2


@pytest.fixture(scope="module")
def llms(v2_dir: str) -> Iterator[tuple[Any, ...]]:
    with v2_attention("TRITON_ATTN"):
        yield tuple(v2_engine(v2_dir, method) for method in (None, V2_METHOD, V2_HOST_METHOD))


@pytest.mark.parametrize("drafts", ["device", "host"])
def test_trees_in_triton(llms: tuple[Any, ...], drafts: str) -> None:
    """Found: of the host's trees the ancestors of the step before, which backends of CPUs do not read."""
    plain, trees = llms[0], llms[1 + (drafts == "host")]
    runner = trees.llm_engine.model_executor.driver_worker.worker.model_runner
    assert runner.attn_groups[0][0].backend.__module__ == "vllm_ext.engine.attention.triton_captured"
    assert runner.speculator.chain_reason is None
    kinds = [
        sampling(max_tokens=12),
        sampling(temperature=0.8, seed=15, max_tokens=12),
        sampling(max_tokens=6),
    ]
    texts = prompts(len(kinds), seed=7)
    expected = tokens(generate(plain, texts, kinds))
    assert_same_outputs(expected, tokens(generate(trees, texts, kinds)))
    assert counters(trees)["spec_accepted_tokens"] > 5
