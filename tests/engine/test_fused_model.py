# SPDX-License-Identifier: Apache-2.0
"""A draft model in a hybrid, below what the other drafters say: what it reads, and that output stays the target's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import engine
from distribution import BLOCK_SIZE, least_p_value
from engine_heads import assert_knows_everything, assert_plains, beside_tables, fused
from v2_requests import counters

pytestmark = pytest.mark.engine


def drafted_by(model: str, nodes: int, **options: Any) -> dict[str, Any]:
    return {
        "method": "dyspec",
        "model": model,
        "num_speculative_tokens": nodes,
        "budget": "fixed",
        **options,
    }


def test_a_model_that_knows_everything(cycle: tuple[str, Any]) -> None:
    """The target's own layers, which add nothing: all is accepted; of a row or a token beside it nothing would be."""
    folder, after = cycle
    assert_knows_everything(folder, after, fused(drafted_by("self", 4)), 4, 0)


@pytest.fixture(scope="module")
def drafting(slice_dir: str) -> Iterator[Any]:
    method = beside_tables(drafted_by("self", 12))
    yield from engine(slice_dir, method, block_size=BLOCK_SIZE, num_gpu_blocks_override=40)


def test_greedy_and_seeded_output_is_plains(plain_slice_llm: Any, drafting: Any) -> None:
    assert_plains(plain_slice_llm, drafting)
    totals = counters(drafting)
    assert totals["spec_draft_tokens"] > 500
    assert totals["fallbacks:proposer_error"] == 0


@pytest.mark.slow
def test_sampled_output_has_plains_distribution(plain_slice_llm: Any, drafting: Any) -> None:
    assert least_p_value(plain_slice_llm, drafting) > 1e-4
    assert counters(drafting)["fallbacks:proposer_error"] == 0
