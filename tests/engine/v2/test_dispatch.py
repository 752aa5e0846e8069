# SPDX-License-Identifier: Apache-2.0
"""Which steps of decoding find a captured graph: vLLM's own dispatch, asked about each batch size and level.

A step that finds none runs its layers one launch at a time, which on a GPU can take several times as long.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vllm_ext.engine import step_extras
from vllm_ext.engine.v2.shares import cut
from vllm_ext.proposers.level_budget import DEFAULT_NODES, LevelBudget, by_batch_size, levels_of

MOST_REQUESTS = 64
# vLLM's own for so many requests with trees of 15 nodes: up to twice the rows of all of them, and to 512.
CAPTURED = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


def manager(nodes: int, varlen: bool = False) -> Any:
    """vLLM's, as an engine with our schedule has it, whose graphs have all been captured.

    Args:
        nodes: of a tree.
        varlen: what vLLM makes where `TreeSpeculator.enable_adaptive_verification`.
    """
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
        varlen_decode=varlen,
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


def a_step(requests: int, nodes: int, level: int) -> Any:
    """Of decoding, as the scheduler makes it where nodes are shared; what of it is looked at."""
    names = [str(number) for number in range(requests)]
    made = SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(names, 1 + nodes),
        total_num_scheduled_tokens=requests * (1 + nodes),
        scheduled_spec_decode_tokens={name: [-1] * nodes for name in names},
    )
    step_extras.set_of(made).level = level
    return made


def some_chances(requests: int, nodes: int) -> dict[str, Any]:
    """Descending, more of some trees than of others, and of every seventh request none."""
    rng = np.random.default_rng(requests)
    return {
        str(number): np.sort(rng.random(nodes).astype(np.float32) ** rng.integers(1, 9))[::-1]
        for number in range(requests)
        if number % 7 != 3
    }


@pytest.mark.parametrize("nodes", [DEFAULT_NODES, 7, 16])
def test_any_query_lengths_have_a_graph_where_graphs_are_for_any(nodes: int) -> None:
    """No larger than that of as many nodes for each, whatever the shares are.

    Of 16 nodes too, which have holes otherwise; but graphs of one length are of multiples of 17 rows there.
    """
    graphs, alike = manager(nodes, varlen=True), manager(nodes)
    budget = LevelBudget(levels_of(nodes), max(CAPTURED))
    differing = 0
    for requests in range(1, 1 + MOST_REQUESTS):
        chances = some_chances(requests, nodes)
        for level in budget.levels:
            if not budget.fits(level, requests):
                continue
            lengths = [1] * requests
            if level:
                made = cut(a_step(requests, nodes, level), chances, graphs)
                lengths = list(made.num_scheduled_tokens.values())
            rows = sum(lengths)
            assert rows <= requests * (1 + level)
            uniform = lengths[0] if len(set(lengths)) == 1 else None
            differing += uniform is None
            found = graphs.dispatch(requests, rows, uniform, 0, max(lengths))
            assert found.cg_mode == CUDAGraphMode.FULL
            assert found.num_reqs >= requests
            own = alike.dispatch(requests, requests * (1 + level), 1 + level, 0, 1 + level)
            if nodes != 16:
                assert own.cg_mode == CUDAGraphMode.FULL
                assert found.num_tokens <= own.num_tokens
    assert differing > 100


def test_graphs_for_any_query_lengths_take_no_prompts() -> None:
    """vLLM then says that the longest is not known."""
    graphs = manager(DEFAULT_NODES, varlen=True)
    assert graphs.dispatch(2, 20, None, 0, None).cg_mode == CUDAGraphMode.NONE
    assert graphs.dispatch(2, 20, None, 0, 17).cg_mode == CUDAGraphMode.NONE
    assert graphs.dispatch(2, 20, None, 0, 16).cg_mode == CUDAGraphMode.FULL


@pytest.mark.parametrize("nodes", [DEFAULT_NODES, 7])
def test_where_graphs_are_of_one_length_all_have_as_many_nodes(nodes: int) -> None:
    """vLLM's usual ones: shares would cost a step its graph."""
    graphs, budget = manager(nodes), LevelBudget(levels_of(nodes), max(CAPTURED))
    for requests in range(2, 1 + MOST_REQUESTS):
        for level in budget.levels[1:]:
            if budget.fits(level, requests):
                made = cut(a_step(requests, nodes, level), some_chances(requests, nodes), graphs)
                assert set(made.num_scheduled_tokens.values()) == {1 + level}
