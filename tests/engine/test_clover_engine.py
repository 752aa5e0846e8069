# SPDX-License-Identifier: Apache-2.0
"""Clover's heads beside the target: which row and token they read, what they may say, and whose the output stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_clover
from conftest import engine
from distribution import BLOCK_SIZE
from engine_heads import assert_knows_everything, assert_plains, assert_plains_distribution, fused
from v2_requests import counters

pytestmark = pytest.mark.engine


def clover(model: str, nodes: int = 12) -> dict[str, Any]:
    return {"method": "clover_tree", "model": model, "num_speculative_tokens": nodes, "budget": "fixed"}


@pytest.mark.parametrize(
    ("by", "method", "late"),
    [
        ("token", "clover_tree", 0),
        pytest.param("hidden", "clover_tree", 0, marks=pytest.mark.slow),
        pytest.param("token", "hybrid", 0, marks=pytest.mark.slow),
        pytest.param("token", "clover_tree", 1, marks=pytest.mark.slow),
    ],
)
def test_heads_that_know_everything(
    cycle: tuple[str, Any], tmp_path: Path, by: str, method: str, late: int
) -> None:
    """All that they draft is accepted, fused or alone; a row, a depth or a token beside it, and nothing is."""
    folder, after = cycle
    heads = tiny_clover.knowing(tmp_path / "heads", Path(folder), after, by, late)
    nodes = 1 if by == "hidden" else 4
    config = clover(heads, nodes)
    if method == "hybrid":
        config = fused(config, "suffix_tree")
    assert_knows_everything(folder, after, config, nodes, late)


@pytest.fixture(scope="module")
def drafting(slice_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    heads = tiny_clover.random(tmp_path_factory.mktemp("heads"), Path(slice_dir))
    yield from engine(slice_dir, clover(heads), block_size=BLOCK_SIZE, num_gpu_blocks_override=40)


def test_greedy_and_seeded_output_is_plains(plain_slice_llm: Any, drafting: Any) -> None:
    assert_plains(plain_slice_llm, drafting)
    totals = counters(drafting)
    assert totals["spec_accepted_tokens"] > 20
    assert totals["fallbacks:proposer_error"] == 0


@pytest.mark.slow
def test_drawn_trees_have_plains_distribution(plain_slice_llm: Any, drafting: Any) -> None:
    assert_plains_distribution(plain_slice_llm, drafting)
