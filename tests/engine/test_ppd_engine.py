# SPDX-License-Identifier: Apache-2.0
"""Prompt tokens in the target's tree: where their rows stand, that nothing sees them, and that output is plain's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_prompts
import torch
from conftest import engine
from distribution import BLOCK_SIZE
from engine_heads import assert_cycle
from helpers import assert_same_outputs, generate, long_and_short_prompts, preemptions
from v2_requests import counters
from vllm import SamplingParams

pytestmark = pytest.mark.engine
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "block_size": 32}
KINDS = [
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=80, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=4, max_tokens=60, repetition_penalty=1.1, ignore_eos=True),
    SamplingParams(
        temperature=0, max_tokens=70, presence_penalty=0.5, frequency_penalty=0.2, ignore_eos=True
    ),
    SamplingParams(temperature=0.6, seed=5, max_tokens=80, logprobs=1, ignore_eos=True),
]


def ppd(model: str, nodes: int = 12, budget: str = "fixed", **more: Any) -> dict[str, Any]:
    return {"method": "ppd", "model": model, "num_speculative_tokens": nodes, "budget": budget, **more}


@pytest.fixture(scope="module")
def cycle(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, torch.Tensor]:
    return tiny_prompts.reading(tmp_path_factory.mktemp("cycle"), Path(model_dir))


@pytest.mark.parametrize("far", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_prompt_tokens_that_know_everything(
    cycle: tuple[str, torch.Tensor], tmp_path: Path, far: int
) -> None:
    """All that they guess is accepted; a place further from what they stand below, and nothing is."""
    folder, after = cycle
    model = tiny_prompts.knowing(tmp_path / "prompts", far)
    prompts = [[3], list(range(5, 60)), [9] * 130, [700, 20]]
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    for llm in engine(folder, ppd(model), **OPTIONS, max_num_batched_tokens=64):
        answers = generate(llm, prompts, [params] * 4)
        totals = counters(llm)
        counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    assert_cycle(prompts, answers, after)
    drafted, accepted, steps = (
        totals[f"spec_{name}"] for name in ("draft_tokens", "accepted_tokens", "steps")
    )
    assert totals["fallbacks:proposer_error"] == 0
    assert counted["vllm:spec_decode_num_draft_tokens"] == drafted > 0
    assert counted["vllm:spec_decode_num_accepted_tokens"] == accepted
    if far:
        assert accepted == 0
    else:
        # The prompt's token, one of the step that asks first, then four a step.
        assert (accepted, steps) == (4 * 36, 4 * 14)


@pytest.fixture(scope="module")
def drafting(slice_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = tiny_prompts.random(tmp_path_factory.mktemp("prompts"), Path(slice_dir))
    yield from engine(slice_dir, ppd(model), block_size=BLOCK_SIZE, num_gpu_blocks_override=40)


def other_embeddings(worker: Any) -> int:
    """Give the prompt tokens rows that make of whatever sees them something else; how many rows there are."""
    table = worker.model_runner.model.model.embed_tokens.weight
    first = worker.model_runner.model_config.get_vocab_size()
    table.data[first : first + tiny_prompts.COUNT] = 50.0 * torch.randn(
        tiny_prompts.COUNT, table.shape[1], generator=torch.Generator().manual_seed(1)
    ).to(table)
    return int(table.shape[0]) - int(first)


def test_greedy_and_seeded_output_is_plains(plain_slice_llm: Any, drafting: Any) -> None:
    """Through preemption and chunks, over cached prefixes, and whatever the embeddings are."""
    inputs = long_and_short_prompts(plain_slice_llm, 10)
    params = [SamplingParams(temperature=0, max_tokens=60 + 9 * i, ignore_eos=True) for i in range(10)]
    wanted = generate(plain_slice_llm, inputs, params)
    singles = [generate(plain_slice_llm, [p], [kind]) for p, kind in zip(inputs, KINDS, strict=False)]
    before = preemptions(drafting)
    for again in range(2):
        count = 4 if again else 10
        assert_same_outputs(wanted[:count], generate(drafting, inputs[:count], params[:count]))
        for prompt, kind, single in zip(inputs, KINDS, singles, strict=False):
            # One at a time: plain vLLM stops at a seeded request whose prompt comes in chunks.
            assert_same_outputs(single, generate(drafting, [prompt], [kind]))
        if not again:
            assert drafting.collective_rpc(other_embeddings) == [64]
    assert preemptions(drafting) > before
    totals = counters(drafting)
    assert totals["spec_accepted_tokens"] > 20
    assert totals["fallbacks:proposer_error"] == 0
