# SPDX-License-Identifier: Apache-2.0
"""Medusa's heads beside the target: which row they read, what they may say, and that output stays the target's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_heads
from conftest import engine
from distribution import BLOCK_SIZE
from engine_heads import assert_knows_everything, assert_plains, assert_plains_distribution, fused
from v2_requests import counters

pytestmark = pytest.mark.engine


def medusa(model: str, nodes: int = 12, budget: str = "fixed") -> dict[str, Any]:
    return {"method": "medusa_tree", "model": model, "num_speculative_tokens": nodes, "budget": budget}


@pytest.mark.parametrize(
    ("method", "late"),
    [
        ("medusa_tree", 0),
        pytest.param("hybrid", 0, marks=pytest.mark.slow),
        pytest.param("medusa_tree", 1, marks=pytest.mark.slow),
    ],
)
def test_heads_that_know_everything(cycle: tuple[str, Any], tmp_path: Path, method: str, late: int) -> None:
    """All that they draft is accepted, fused or alone; a row, a depth or a token beside it, and nothing is."""
    folder, after = cycle
    heads = tiny_heads.knowing(tmp_path / "heads", Path(folder), after, late=late)
    config = medusa(heads, 4)
    if method == "hybrid":
        config = fused(config, "suffix_tree")
    assert_knows_everything(folder, after, config, 4, late)


@pytest.fixture(scope="module")
def drafting(slice_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    heads = tiny_heads.random(tmp_path_factory.mktemp("heads"), Path(slice_dir))
    yield from engine(slice_dir, medusa(heads), block_size=BLOCK_SIZE, num_gpu_blocks_override=40)


def test_greedy_and_seeded_output_is_plains(plain_slice_llm: Any, drafting: Any) -> None:
    assert_plains(plain_slice_llm, drafting)
    totals = counters(drafting)
    assert totals["spec_accepted_tokens"] > 20
    assert totals["fallbacks:proposer_error"] == 0


@pytest.mark.slow
def test_drawn_trees_have_plains_distribution(plain_slice_llm: Any, drafting: Any) -> None:
    assert_plains_distribution(plain_slice_llm, drafting)
