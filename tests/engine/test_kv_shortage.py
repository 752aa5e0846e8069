# SPDX-License-Identifier: Apache-2.0
"""A KV cache that plain decoding has just room enough in: drafts cause no preemption, and change no token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import engine
from helpers import assert_same_outputs, generate, long_and_short_prompts, preemptions
from vllm import SamplingParams

pytestmark = pytest.mark.engine

NODES = 16
REQUESTS, LENGTH, BLOCK = 8, 96, 32
# All texts fit to their ends, and no draft behind the last one; one block is vLLM's.
FEW_BLOCKS: dict[str, Any] = {
    "block_size": BLOCK,
    "num_gpu_blocks_override": 1 + REQUESTS * LENGTH // BLOCK,
    "max_num_seqs": REQUESTS,
    "max_model_len": 512,
}


@pytest.fixture(scope="module")
def short_plain(model_dir: str) -> Iterator[Any]:
    yield from engine(model_dir, **FEW_BLOCKS)


@pytest.fixture(scope="module")
def short_llm(model_dir: str, tested_method: dict[str, Any]) -> Iterator[Any]:
    yield from engine(model_dir, {**tested_method, "num_speculative_tokens": NODES}, **FEW_BLOCKS)


def run(llm: Any) -> tuple[list[list[int]], int]:
    """Tokens, and how often requests were preempted; all blocks are free at the end."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    llm.reset_prefix_cache()
    free, before = pool.get_num_free_blocks(), preemptions(llm)
    inputs = [tokens[:40] for tokens in long_and_short_prompts(llm, REQUESTS)]
    lengths = [LENGTH - len(tokens) for tokens in inputs]
    params = [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True) for most in lengths]
    answers = generate(llm, inputs, params)
    assert pool.get_num_free_blocks() == free
    return answers, preemptions(llm) - before


def test_drafts_give_way_before_requests(
    short_plain: Any, short_llm: Any, enough: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, plain = run(short_plain)
    answers, ours = run(short_llm)
    assert_same_outputs(expected, answers)
    (totals,) = short_llm.collective_rpc("vllm_ext_counters")
    assert totals["spec_accepted_tokens"] > 100 // enough
    assert totals["fallbacks:proposer_error"] == 0
    # vLLM's own way costs some.
    scheduler = short_llm.llm_engine.engine_core.engine_core.scheduler
    monkeypatch.setattr(scheduler, "_is_known", False)
    answers, mutated = run(short_llm)
    assert_same_outputs(expected, answers)
    print(f"preempted: plain {plain}, drafts that give way {ours}, vLLM's way {mutated}")
    assert plain == ours == 0 < mutated
