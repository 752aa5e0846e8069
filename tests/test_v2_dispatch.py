# SPDX-License-Identifier: Apache-2.0
"""Which steps of decoding find a captured graph: vLLM's own dispatch, asked about each batch size and level.

A step that finds none runs its layers one launch at a time, which on a GPU can take several times as long.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vllm_ext.proposers.level_budget import DEFAULT_NODES, LevelBudget, by_batch_size, levels_of

MOST_REQUESTS = 64
# vLLM's own for so many requests with trees of 15 nodes: up to twice the rows of all of them, and to 512.
CAPTURED = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


def manager(nodes: int) -> Any:
    """vLLM's, as an engine with our schedule has it, whose graphs have all been captured."""
    made: Any = object.__new__(CudaGraphManager)
    schedule = by_batch_size(nodes, MOST_REQUESTS)
    speculation = SimpleNamespace(
        uses_dynamic_speculative_decoding=lambda: True, num_speculative_tokens_per_batch_size=schedule
    )
    vars(made).update(
        max_num_reqs=MOST_REQUESTS,
        vllm_config=SimpleNamespace(
            speculative_config=speculation,
            num_speculative_tokens=nodes,
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
        ),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=CAPTURED, max_cudagraph_capture_size=max(CAPTURED)
        ),
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
        decode_query_len=1 + nodes,
        varlen_decode=False,
        ubatch_runner=None,
        lora_capture_cases=[0],
        _lora_dispatch_map={},
        _max_lora_case=0,
        _candidates={},
        _capture_descs={},
        _graphs_captured=True,
    )
    made._init_candidates()
    return made


def without_graph(nodes: int) -> list[tuple[int, int]]:
    """Batch sizes and levels, of those that the budget may choose."""
    graphs, budget = manager(nodes), LevelBudget(levels_of(nodes), max(CAPTURED))
    return [
        (requests, level)
        for requests in range(1, 1 + MOST_REQUESTS)
        for level in budget.levels
        if budget.fits(level, requests)
        and graphs.dispatch(requests, requests * (1 + level), 1 + level, 0, 1 + level).cg_mode
        != CUDAGraphMode.FULL
    ]


@pytest.mark.parametrize("nodes", [DEFAULT_NODES, 7, 31])
def test_each_step_that_the_budget_may_choose_has_a_graph(nodes: int) -> None:
    assert without_graph(nodes) == []


def test_other_sizes_have_holes() -> None:
    """Found: graphs of other query lengths stand in the way. 16 nodes was the default."""
    holes = without_graph(16)
    assert len(holes) > 50
    assert {level for _, level in holes} >= {0, 4, 8}
