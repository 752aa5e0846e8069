# SPDX-License-Identifier: Apache-2.0
"""EAGLE heads beside the target: which rows they read, what they may say, and that output stays the target's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_eagle
import tiny_heads
from conftest import engine
from distribution import BLOCK_SIZE, SAMPLES, distort, expected, least_p_value, p_value, sample
from helpers import assert_same_outputs, generate, long_and_short_prompts, preemptions
from tiny_heads import KINDS, OPTIONS
from v2_requests import counters
from vllm import SamplingParams

pytestmark = pytest.mark.engine


def eagle(model: str, nodes: int = 12, **options: Any) -> dict[str, Any]:
    return {
        "method": "eagle_tree",
        "model": model,
        "num_speculative_tokens": nodes,
        "budget": "fixed",
        **options,
    }


@pytest.fixture(scope="module")
def cycle(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    return tiny_heads.successors(tmp_path_factory.mktemp("cycle"), Path(model_dir))


@pytest.mark.parametrize(
    ("by", "method", "late"),
    [
        ("token", "eagle_tree", 0),
        ("feature", "eagle_tree", 0),
        ("token", "hybrid", 0),
        ("feature", "eagle_tree", 1),
        ("first", "eagle_tree", 0),
    ],
)
def test_a_head_that_knows_everything(
    cycle: tuple[str, Any], tmp_path: Path, by: str, method: str, late: int
) -> None:
    """All that it drafts is accepted, fused or alone; a row or a token beside it, and nothing is."""
    folder, after = cycle
    if by == "first":
        head = tiny_eagle.first(tmp_path / "head", Path(folder))
    else:
        head = tiny_eagle.knowing(tmp_path / "head", Path(folder), after, by, late)
    nodes = 1 if by == "feature" else 4
    prompts = [[3], list(range(5, 60)), [9] * 130, [700, 20]]
    params = SamplingParams(temperature=0, max_tokens=101, ignore_eos=True)
    config = eagle(head, nodes)
    if method == "hybrid":
        config = eagle("", nodes) | {"method": method, "drafters": [{"method": "eagle_tree", "model": head}]}
        del config["model"]
    for llm in engine(folder, config, **OPTIONS, max_num_batched_tokens=64):
        answers = generate(llm, prompts, [params] * 4)
        totals = counters(llm)
    for prompt, answer in zip(prompts, answers, strict=True):
        token = prompt[-1]
        for each in answer:
            token = int(after[token])
            assert each == token
    drafted, accepted, steps = (
        totals[f"spec_{name}"] for name in ("draft_tokens", "accepted_tokens", "steps")
    )
    assert totals["fallbacks:proposer_error"] == totals["fallbacks:hidden_states_missing"] == 0
    if late:
        assert accepted == 0 < drafted
    else:
        assert drafted == accepted == 4 * (100 - 100 // (nodes + 1))
        assert steps == 4 * (1 + 100 // (nodes + 1))


@pytest.fixture(scope="module")
def drafting(slice_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    head = tiny_eagle.random(tmp_path_factory.mktemp("head"), Path(slice_dir))
    yield from engine(slice_dir, eagle(head), block_size=BLOCK_SIZE, num_gpu_blocks_override=40)


def test_greedy_and_seeded_output_is_plains(plain_slice_llm: Any, drafting: Any) -> None:
    """Through preemption and chunks; then again over cached prefixes."""
    inputs = long_and_short_prompts(plain_slice_llm, 10)
    params = [SamplingParams(temperature=0, max_tokens=60 + 9 * i, ignore_eos=True) for i in range(10)]
    wanted = generate(plain_slice_llm, inputs, params)
    before = preemptions(drafting)
    for _ in range(2):
        assert_same_outputs(wanted, generate(drafting, inputs, params))
    assert preemptions(drafting) > before
    for prompt, kind in zip(inputs, KINDS, strict=False):
        # One at a time: plain vLLM stops at a seeded request whose prompt comes in chunks.
        assert_same_outputs(generate(plain_slice_llm, [prompt], [kind]), generate(drafting, [prompt], [kind]))
    totals = counters(drafting)
    assert totals["spec_draft_tokens"] > 500
    assert totals["fallbacks:proposer_error"] == totals["fallbacks:hidden_states_missing"] == 0


@pytest.mark.slow
def test_drawn_trees_have_plains_distribution(plain_slice_llm: Any, drafting: Any) -> None:
    before = counters(drafting)["spec_accepted_tokens"]
    assert least_p_value(plain_slice_llm, drafting) > 1e-4
    totals = counters(drafting)
    assert totals["fallbacks:proposer_error"] == 0
    assert totals["spec_accepted_tokens"] > before + 100
    # The mutation: children that were drawn are verified as if the draft were another.
    drafting.collective_rpc(distort)
    biased = sample(drafting, SAMPLES)
    assert min(p_value(a, b) for a, b in zip(expected(plain_slice_llm), biased, strict=True)) < 1e-6
