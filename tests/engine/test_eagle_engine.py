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
from distribution import BLOCK_SIZE
from engine_heads import assert_cycle, assert_plains, assert_plains_distribution
from helpers import generate
from tiny_heads import OPTIONS
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
    assert_cycle(prompts, answers, after)
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
    assert_plains(plain_slice_llm, drafting)
    totals = counters(drafting)
    assert totals["spec_draft_tokens"] > 500
    assert totals["fallbacks:proposer_error"] == totals["fallbacks:hidden_states_missing"] == 0


@pytest.mark.slow
def test_drawn_trees_have_plains_distribution(plain_slice_llm: Any, drafting: Any) -> None:
    assert_plains_distribution(plain_slice_llm, drafting)
