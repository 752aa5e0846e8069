# SPDX-License-Identifier: Apache-2.0
"""Typical acceptance in the engine: lossy for the requests that ask for it, and for nobody beside them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import engine
from distribution import BLOCK_SIZE, SAMPLES, expected, least_p_value, p_value, sample
from helpers import assert_same_outputs, counted, generate, long_and_short_prompts, seen
from slices import VOCABULARY
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.engine

TYPICAL = {"verify": "typical"}
# Whatever has a probability passes; nothing does.
CREDULOUS = {**TYPICAL, "verify_threshold": 1e-12, "verify_alpha": 1e-6}
INCREDULOUS = {**TYPICAL, "verify_threshold": 1.0, "verify_alpha": 1e6}


@pytest.fixture(scope="module")
def recycling(slice_dir: str) -> Iterator[Any]:
    """A server that says nothing of verification."""
    method = {"method": "token_recycling", "num_speculative_tokens": 9, "budget": "fixed"}
    yield from engine(slice_dir, method, block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def drawing(slice_dir: str) -> Iterator[Any]:
    """A lossy server, with trees that are drawn."""
    method = {"method": "dyspec", "model": "self", "self_layers": 1, "num_speculative_tokens": 6}
    yield from engine(slice_dir, {**method, "budget": "fixed", **TYPICAL}, block_size=BLOCK_SIZE)


def free(xargs: dict[str, Any] | None, **params: Any) -> SamplingParams:
    """A request that samples without a seed."""
    return SamplingParams(
        **{"temperature": 1.0, "max_tokens": 40, "ignore_eos": True, **params}, extra_args=xargs
    )


def test_neighbours_have_plains_tokens(plain_slice_llm: Any, recycling: Any) -> None:
    inputs = long_and_short_prompts(plain_slice_llm, 8)
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, extra_args=TYPICAL if i == 2 else None)
        if i % 2 == 0
        else SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=40, ignore_eos=True)
        for i in range(8)
    ]
    wanted = generate(plain_slice_llm, inputs, params)
    for beside in (TYPICAL, CREDULOUS):
        found, counts = counted(recycling, [*inputs, *inputs[:4]], [*params, *[free(beside)] * 4])
        assert_same_outputs(wanted, found[:8])
        assert counts["spec_typical_tokens"] > 20


def test_more_tokens_a_step_and_none_for_who_does_not_ask(recycling: Any) -> None:
    inputs = long_and_short_prompts(recycling, 8) * 2
    rates = []
    for xargs in (None, INCREDULOUS, TYPICAL, CREDULOUS):
        _, counts = counted(recycling, inputs, [free(xargs)] * len(inputs))
        rates.append(counts["spec_emitted_tokens"] / counts["spec_steps"])
        assert (counts["spec_typical_tokens"] > 0) == (xargs in (TYPICAL, CREDULOUS))
        assert counts["spec_typical_tokens"] <= counts["spec_accepted_tokens"]
        assert counts["fallbacks:proposer_error"] == 0
    exact, _, typical, credulous = rates
    assert 1.1 * exact < typical < credulous


@pytest.mark.slow
def test_where_nothing_passes_the_law_is_plains(plain_slice_llm: Any, recycling: Any) -> None:
    assert least_p_value(plain_slice_llm, recycling, INCREDULOUS) > 1e-4
    # The mutation is the method: what it keeps has another law.
    biased = sample(recycling, SAMPLES, xargs=TYPICAL)
    assert min(p_value(a, b) for a, b in zip(expected(plain_slice_llm), biased, strict=True)) < 1e-6


def watch(worker: Any) -> None:
    """Count the drafts of the steps that are odd token ids."""
    drafter = worker.model_runner.drafter
    worker.seen = {"odd": 0}
    inner = drafter.step

    def step(runner: Any, trees: Any, *more: Any) -> Any:
        worker.seen["odd"] += int(((trees.parents >= 0) & (trees.tokens % 2 == 1)).sum())
        return inner(runner, trees, *more)

    drafter.step = step


def test_what_is_forbidden_is_not_kept(recycling: Any) -> None:
    """Drafts have it: others have said it before, and said it goes on to be said."""
    inputs = long_and_short_prompts(recycling, 16)
    generate(recycling, inputs, [free(None)] * 16)
    recycling.collective_rpc(watch)
    even = list(range(2, VOCABULARY, 2))
    found, counts = counted(recycling, inputs, [free(CREDULOUS, allowed_token_ids=even)] * 16)
    assert all(token % 2 == 0 for tokens in found for token in tokens)
    assert counts["spec_typical_tokens"] > 4
    (drafts,) = recycling.collective_rpc(seen)
    assert drafts["odd"] > 8


def test_a_grammar_holds(recycling: Any) -> None:
    pattern = "(ab|cd|[0-9]{2}){16}"
    params = free(
        CREDULOUS,
        n=8,
        max_tokens=60,
        ignore_eos=False,
        structured_outputs=StructuredOutputsParams(regex=pattern),
    )
    (before,) = recycling.collective_rpc("vllm_ext_counters")
    for _ in range(2):
        (output,) = recycling.chat([[{"role": "user", "content": "Letters"}]], params, use_tqdm=False)
        assert all(re.fullmatch(pattern, each.text) for each in output.outputs)
    (after,) = recycling.collective_rpc("vllm_ext_counters")
    assert after["spec_typical_tokens"] > before["spec_typical_tokens"] + 8


def test_a_penalty_counts_the_path_that_was_kept(recycling: Any) -> None:
    """With `top_k` 1 the likeliest token has all of the probability: what is kept is what is greedily right."""
    inputs = long_and_short_prompts(recycling, 4)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, frequency_penalty=2.0)
    sure = free(TYPICAL, top_k=1, frequency_penalty=2.0)
    found, counts = counted(recycling, inputs, [sure] * 4)
    assert_same_outputs(generate(recycling, inputs, [greedy] * 4), found)
    assert counts["spec_typical_tokens"] > 4


def test_a_lossy_server(plain_slice_llm: Any, drawing: Any) -> None:
    """Requests are lossy without asking, unless they ask for exact answers, have a seed or are greedy."""
    inputs = long_and_short_prompts(plain_slice_llm, 4)
    _, counts = counted(drawing, inputs, [free(None)] * 4)
    assert counts["spec_typical_tokens"] > 20
    exact = [
        free({"verify": "exact"}),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.2, top_k=9, seed=4, max_tokens=40, ignore_eos=True),
    ]
    found, counts = counted(drawing, inputs, exact)
    assert counts["spec_typical_tokens"] == 0
    assert_same_outputs(generate(plain_slice_llm, inputs[1:], exact[1:]), found[1:])


def test_a_seed_and_a_lossy_answer_are_refused_together(recycling: Any) -> None:
    params = SamplingParams(temperature=1.0, seed=1, extra_args=TYPICAL)
    with pytest.raises(VLLMValidationError, match="seed=1 does not go with verify"):
        recycling.generate(["x"], params, use_tqdm=False)
