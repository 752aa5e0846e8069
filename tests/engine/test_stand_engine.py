# SPDX-License-Identifier: Apache-2.0
"""STAND's drawn trees in the engine: the target's law without seeds, plain's tokens with them and greedily."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import engine
from distribution import BLOCK_SIZE, SAMPLES, expected, least_p_value, p_value, sample
from helpers import assert_same_outputs, generate, long_and_short_prompts, seen
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def drawing(slice_dir: str) -> Iterator[Any]:
    method = {"method": "stand", "branches": "drawn", "num_speculative_tokens": 9, "budget": "fixed"}
    yield from engine(slice_dir, method, block_size=BLOCK_SIZE)


def watch(worker: Any) -> None:
    """Count the requests whose trees the steps verify by what they were drawn from."""
    drafter = worker.model_runner.drafter
    worker.seen = {"drawn": 0, "chosen": 0}
    inner = drafter.step

    def step(runner: Any, trees: Any, num_draft_tokens: int, sampled: Any) -> Any:
        for request in range(len(trees.query_row)):
            if len(trees.parents[trees.rows(request)]) > 1:
                worker.seen["drawn" if request in trees.drawn else "chosen"] += 1
        return inner(runner, trees, num_draft_tokens, sampled)

    drafter.step = step


def test_greedy_and_seeded_tokens_are_plains(plain_slice_llm: Any, drawing: Any) -> None:
    """Beside requests whose trees are drawn, in the same batch."""
    drawing.collective_rpc(watch)
    inputs = long_and_short_prompts(plain_slice_llm, 8)
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        if i % 2
        else SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=40, ignore_eos=True)
        for i in range(8)
    ]
    wanted = [
        generate(plain_slice_llm, [prompt], [each])[0] for prompt, each in zip(inputs, params, strict=True)
    ]
    free = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    for _ in range(2):  # of a table that knows nothing, and the answers
        found = generate(drawing, [*inputs, *inputs[:2]], [*params, free, free])
        assert_same_outputs(wanted, found[:8])
    (counts,) = drawing.collective_rpc(seen)
    assert counts["drawn"] > 20
    assert counts["chosen"] > 100


def test_a_grammar_has_trees_that_are_not_drawn(drawing: Any) -> None:
    drawing.collective_rpc(watch)
    schema = {"type": "object", "properties": {"n": {"enum": ["ab", "cd"]}}, "required": ["n"]}
    params = SamplingParams(
        temperature=1.0, n=8, max_tokens=60, structured_outputs=StructuredOutputsParams(json=schema)
    )
    (output,) = drawing.chat([[{"role": "user", "content": "JSON, please"}]], params, use_tqdm=False)
    for completion in output.outputs:
        if completion.finish_reason == "stop":
            assert json.loads(completion.text)["n"] in ("ab", "cd")
    (counts,) = drawing.collective_rpc(seen)
    assert counts["drawn"] == 0
    assert counts["chosen"] > 8


def repeat(worker: Any) -> None:
    """Every tree has the noise of the first."""
    drawn = worker.model_runner.drafter.proposer._drawn
    first = int(drawn._noise.integers(1 << 63))
    drawn._noise = SimpleNamespace(integers=lambda _: first)


@pytest.mark.slow
def test_drawn_trees_have_plains_distribution(plain_slice_llm: Any, drawing: Any) -> None:
    assert least_p_value(plain_slice_llm, drawing) > 1e-4
    (totals,) = drawing.collective_rpc("vllm_ext_counters")
    assert totals["fallbacks:proposer_error"] == 0
    assert totals["spec_accepted_tokens"] > 100
    # The mutation: trees are not drawn again. That all is accepted would not be found: the table knows the law.
    drawing.collective_rpc(repeat)
    biased = sample(drawing, SAMPLES)
    assert min(p_value(a, b) for a, b in zip(expected(plain_slice_llm), biased, strict=True)) < 1e-6
