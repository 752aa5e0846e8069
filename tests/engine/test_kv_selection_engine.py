# SPDX-License-Identifier: Apache-2.0
"""Blocks that are forgotten by what has attended to them, in a real engine: the choice is of the request alone.

The other methods that read less: ``scripts/kv_matrix.sh``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import engine
from helpers import assert_same_outputs, generate, long_and_short_prompts, preemptions
from vllm import SamplingParams

from vllm_ext.config import kv_cache

pytestmark = pytest.mark.engine

BLOCK_SIZE, NUM_PROMPTS = 64, 6
CRITIC = {"method": "critic", "budget": 256, "watched": 16}
GREEDY = SamplingParams(max_tokens=280, ignore_eos=True, temperature=0)


def selecting(slice_dir: str, method: Any = None, **options: Any) -> Iterator[Any]:
    given = {"additional_config": {"vllm_ext": {"kv": CRITIC}}, "block_size": BLOCK_SIZE, **options}
    yield from engine(slice_dir, method, **given)


@pytest.fixture(scope="module")
def plenty(slice_dir: str) -> Iterator[Any]:
    """With room for all, whole prompts in a step, nothing cached, no drafts."""
    yield from selecting(slice_dir, enable_prefix_caching=False, max_num_batched_tokens=4096)


@pytest.fixture(scope="module")
def scarce(slice_dir: str, tested_method: dict[str, Any], plenty: Any) -> Iterator[Any]:
    """With trees, prompts in small parts, cached prefixes, and room for the longest request and little more."""
    codec = kv_cache.parse(CRITIC).codec(BLOCK_SIZE, 64)
    tail = codec.format.tail_blocks(4, BLOCK_SIZE + tested_method["num_speculative_tokens"])
    yield from selecting(
        slice_dir, tested_method, max_num_batched_tokens=64, num_gpu_blocks_override=19 + tail
    )


def in_use(llm: Any) -> float:
    """The part of the blocks that requests have."""
    return float(sum(each.value for each in llm.get_metrics() if each.name == "vllm:kv_cache_usage_perc"))


def test_trees_parts_caches_preemptions_and_aborts_change_nothing(plenty: Any, scarce: Any) -> None:
    prompts = long_and_short_prompts(plenty, NUM_PROMPTS)
    expected = generate(plenty, prompts, [GREEDY] * NUM_PROMPTS)
    before = preemptions(scarce)
    for turn in range(2):
        for i, prompt in enumerate(prompts):
            scarce.llm_engine.add_request(f"aborted-{turn}-{i}", {"prompt_token_ids": prompt}, GREEDY)
        for _ in range(9 + 40 * turn):
            scarce.llm_engine.step()
        scarce.llm_engine.abort_request([f"aborted-{turn}-{i}" for i in range(NUM_PROMPTS)])
        assert_same_outputs(expected, generate(scarce, prompts, [GREEDY] * NUM_PROMPTS))
    assert preemptions(scarce) > before
    (counters,) = scarce.collective_rpc("vllm_ext_counters")
    assert counters["spec_accepted_tokens"] > 0.1 * counters["spec_steps"]
    assert counters["fallbacks:proposer_error"] == 0


def test_an_answer_takes_no_more_than_the_budget(scarce: Any) -> None:
    """Sixteen blocks of text, of which at the end four are there, and those that fill up."""
    asked = SamplingParams(max_tokens=900, ignore_eos=True, temperature=0)
    scarce.llm_engine.add_request("long", {"prompt_token_ids": [*range(100, 200)]}, asked)
    most = last = 0.0
    while scarce.llm_engine.has_unfinished_requests():
        (output,) = scarce.llm_engine.step() or [None]
        if output is not None and not output.finished:
            last = in_use(scarce)
            most = max(most, last)
    codec = kv_cache.parse(CRITIC).codec(BLOCK_SIZE, 64)
    tail = codec.format.tail_blocks(4, BLOCK_SIZE + 12)
    assert 0 < most <= (4 + 2 + tail) / (19 + tail - 1) + 1e-6
