# SPDX-License-Identifier: Apache-2.0
"""A small KV cache, small steps and many requests: preemption, chunked prefill, joining, leaving, aborts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import engine
from helpers import assert_same_outputs, generate, long_and_short_prompts, preemptions
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.engine

BLOCK_TOKENS = 128  # vLLM's on the CPU


@pytest.fixture(scope="module")
def small_llm(model_dir: str, tested_method: dict[str, Any]) -> Iterator[Any]:
    """Sixteen requests share seventeen blocks; a step has at most 192 tokens."""
    yield from engine(
        model_dir,
        {**tested_method, "num_speculative_tokens": 8},
        num_gpu_blocks_override=17,
        max_num_batched_tokens=192,
    )


def test_preemption_chunked_prefill_joining_and_leaving(plain_llm: Any, small_llm: Any, enough: int) -> None:
    inputs = long_and_short_prompts(plain_llm, 16)
    # Different lengths, so that requests leave and waiting ones join all the time; longer ones where few drafts are
    # right, and requests grow side by side.
    shortest = 40 if enough == 1 else 100
    params = [
        SamplingParams(temperature=0, max_tokens=shortest + 15 * (i % 7), ignore_eos=True) for i in range(16)
    ]
    before = preemptions(small_llm)
    assert_same_outputs(generate(plain_llm, inputs, params), generate(small_llm, inputs, params))
    assert preemptions(small_llm) > before
    (totals,) = small_llm.collective_rpc("vllm_ext_counters")
    assert totals["spec_accepted_tokens"] > 100 // enough
    assert totals["fallbacks:proposer_error"] == 0


@pytest.mark.slow
def test_penalties_survive_preemption(plain_llm: Any, small_llm: Any) -> None:
    """Penalties count a path's own tokens, also of a request that was computed again.

    No seeds here: vLLM on the CPU stops at a seeded request whose prompt comes in chunks, with or without us.
    """
    inputs = long_and_short_prompts(plain_llm, 16)
    params = [
        SamplingParams(temperature=0, max_tokens=80 + i, ignore_eos=True, repetition_penalty=1.1, logprobs=1)
        for i in range(16)
    ]
    small_llm.reset_prefix_cache()
    before = preemptions(small_llm)
    assert_same_outputs(generate(plain_llm, inputs, params), generate(small_llm, inputs, params))
    assert preemptions(small_llm) > before


@pytest.mark.slow
def test_grammars_survive_preemption(plain_llm: Any, small_llm: Any) -> None:
    """Also of requests whose grammar is behind tokens that are computed again."""
    inputs = long_and_short_prompts(plain_llm, 16)
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=80 + i,
            structured_outputs=StructuredOutputsParams(regex=r"([a-z]{1,9} ){40,60}") if i % 2 else None,
            ignore_eos=True,
        )
        for i in range(16)
    ]
    small_llm.reset_prefix_cache()
    before = preemptions(small_llm)
    assert_same_outputs(generate(plain_llm, inputs, params), generate(small_llm, inputs, params))
    assert preemptions(small_llm) > before


def test_aborts_hurt_nobody(plain_llm: Any, small_llm: Any) -> None:
    inputs = long_and_short_prompts(plain_llm, 8)
    params = [SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)] * 8
    expected = generate(plain_llm, inputs, params)
    engine = small_llm.llm_engine
    for number, tokens in enumerate(inputs):
        engine.add_request(f"r{number}", {"prompt_token_ids": tokens}, params[number])
    finished: dict[str, list[int]] = {}
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if steps == 8:
            engine.abort_request(["r1", "r6"])
        if steps == 12:
            engine.abort_request(["r2"])
    kept = [0, 3, 4, 5, 7]
    assert_same_outputs([expected[i] for i in kept], [finished[f"r{i}"] for i in kept])
