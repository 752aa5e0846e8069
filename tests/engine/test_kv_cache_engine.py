# SPDX-License-Identifier: Apache-2.0
"""An encoded KV cache in a real engine: answers do not depend on what runs beside them, or on what is cached.

Of one method, that of ``--kv``; ``scripts/kv_matrix.sh`` goes through them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import engine
from helpers import assert_same_outputs, generate, long_and_short_prompts, preemptions
from vllm import SamplingParams

from vllm_ext.config import kv_cache

pytestmark = pytest.mark.engine

BLOCK_SIZE, NUM_PROMPTS = 64, 6


@pytest.fixture(scope="module")
def kv(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.config.getoption("--kv"))
    return found


def encoded(slice_dir: str, kv: dict[str, Any], method: Any = None, **options: Any) -> Iterator[Any]:
    given = {"additional_config": {"vllm_ext": {"kv": kv}}, "block_size": BLOCK_SIZE, **options}
    yield from engine(slice_dir, method, **given)


def blocks(kv: dict[str, Any], num: int, num_drafts: int = 0) -> int:
    """So many, and those that a request has behind its own."""
    return num + kv_cache.parse(kv).codec(BLOCK_SIZE, 64).format.tail_blocks(4, BLOCK_SIZE + num_drafts)


@pytest.fixture(scope="module")
def plenty(slice_dir: str, kv: dict[str, Any]) -> Iterator[Any]:
    """With room for all, whole prompts in a step, and nothing cached."""
    yield from encoded(slice_dir, kv, enable_prefix_caching=False, max_num_batched_tokens=4096)


@pytest.fixture(scope="module")
def scarce(slice_dir: str, kv: dict[str, Any], plenty: Any) -> Iterator[Any]:
    """Room for little, prompts in small parts, cached prefixes. The engine made last is the one with metrics."""
    yield from encoded(slice_dir, kv, max_num_batched_tokens=48, num_gpu_blocks_override=blocks(kv, 19))


@pytest.fixture(scope="module")
def drafting(slice_dir: str, kv: dict[str, Any], tested_method: dict[str, Any], plenty: Any) -> Iterator[Any]:
    """The same, with trees. What has room at first and not in the end depends on what each request takes."""
    num = {("streaming_llm", None): 12, ("kivi", 2): 22}.get((kv["method"], kv.get("bits")), 19)
    scarcity = blocks(kv, num, tested_method["num_speculative_tokens"])
    yield from encoded(
        slice_dir, kv, tested_method, max_num_batched_tokens=64, num_gpu_blocks_override=scarcity
    )


# Greedy: vLLM on a CPU fails on seeded requests whose prompt comes in parts.
ASKED = [SamplingParams(max_tokens=300, ignore_eos=True, temperature=0)] * NUM_PROMPTS


def test_chunks_caches_and_preemptions_change_nothing(plenty: Any, scarce: Any) -> None:
    prompts = long_and_short_prompts(plenty, NUM_PROMPTS)
    expected = generate(plenty, prompts, ASKED)
    before = preemptions(scarce)
    assert_same_outputs(expected, generate(scarce, prompts, ASKED))
    assert preemptions(scarce) > before
    # Some of which are in the cache, one of them long.
    assert_same_outputs(expected[2:5], generate(scarce, prompts[2:5], ASKED[2:5]))
    assert_same_outputs(expected[:1], generate(plenty, prompts[:1], ASKED[:1]))


def test_cached_prefixes_are_found(kv: dict[str, Any], scarce: Any) -> None:
    """Of a prompt of 300 tokens all full blocks, the second time; none where blocks do not stay as they are."""
    prompt = [token % 4000 + 50 for token in range(300)]
    asked = SamplingParams(temperature=0, max_tokens=2)
    outputs = [scarce.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)[0] for _ in range(2)]
    assert outputs[1].num_cached_tokens == (256 if kv_cache.parse(kv).caches_prefixes else 0)
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_answers_are_of_what_is_encoded(kv: dict[str, Any], plenty: Any, plain_slice_llm: Any) -> None:
    """Behind the first block log-probabilities are others, and not by much for a model of two layers."""
    prompts = long_and_short_prompts(plenty, NUM_PROMPTS)
    own, found = (
        llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
            use_tqdm=False,
        )
        for llm in (plain_slice_llm, plenty)
    )
    for a, b in zip(own, found, strict=True):
        changes = [
            abs(x[token].logprob - y[token].logprob)
            for token, x, y in zip(
                a.prompt_token_ids[1:], a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True
            )
        ]
        assert max(changes[:60]) < 1e-3  # the first block is read as it is
        if len(changes) > 100:
            assert 1e-4 < sum(changes[64:]) / len(changes[64:]) < (2 if kv.get("bits") == 2 else 1)


def test_more_tokens_in_the_same_memory(plenty: Any, plain_slice_llm: Any) -> None:
    """By vLLM's own account, with room for what is not encoded yet."""
    own, found = (
        llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens for llm in (plain_slice_llm, plenty)
    )
    assert found > 1.5 * own


def test_aborted_requests_leave_nothing(scarce: Any) -> None:
    prompts = long_and_short_prompts(scarce, NUM_PROMPTS)
    for i, prompt in enumerate(prompts):
        scarce.llm_engine.add_request(f"aborted-{i}", {"prompt_token_ids": prompt}, ASKED[0])
    for _ in range(9):
        scarce.llm_engine.step()
    scarce.llm_engine.abort_request([f"aborted-{i}" for i in range(NUM_PROMPTS)])
    while scarce.llm_engine.has_unfinished_requests():
        scarce.llm_engine.step()
    # Most of the room there is: it would wait forever if much of it were lost.
    longest = [token % 4000 + 50 for token in range(15 * 64)]
    asked = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    (output,) = scarce.generate([{"prompt_token_ids": longest}], asked, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 10


def test_trees_change_nothing(plenty: Any, drafting: Any) -> None:
    """Greedy and seeded, also where a request is preempted and begins again; and drafts are accepted."""
    prompts = long_and_short_prompts(plenty, NUM_PROMPTS)
    for sampling in ({"temperature": 0}, {"temperature": 0.9, "seed": 3}):
        asked = [SamplingParams(max_tokens=200, ignore_eos=True, **sampling)] * NUM_PROMPTS
        expected = generate(plenty, prompts, asked)
        before = preemptions(drafting)
        assert_same_outputs(expected, generate(drafting, prompts, asked))
        assert preemptions(drafting) > before
        assert_same_outputs(expected[2:5], generate(drafting, prompts[2:5], asked[2:5]))
    (counters,) = drafting.collective_rpc("vllm_ext_counters")
    assert counters["spec_accepted_tokens"] > 0.1 * counters["spec_steps"]
    assert counters["fallbacks:proposer_error"] == 0


def test_aborts_beside_trees_change_nothing(plenty: Any, drafting: Any) -> None:
    """Requests that end in the middle, of their prompts and of their answers, and others that go on."""
    prompts = long_and_short_prompts(plenty, NUM_PROMPTS)
    asked = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0)
    expected = generate(plenty, prompts, [asked] * NUM_PROMPTS)
    engine, found = drafting.llm_engine, {}
    for i, prompt in enumerate(prompts):
        engine.add_request(f"kept-{i}", {"prompt_token_ids": prompt}, asked)
        engine.add_request(f"ended-{i}", {"prompt_token_ids": prompt}, asked)
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if steps % 7 == 0:
            engine.abort_request([f"ended-{steps // 7}"])
    assert_same_outputs(expected, [found[f"kept-{i}"] for i in range(NUM_PROMPTS)])
