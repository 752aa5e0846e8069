# SPDX-License-Identifier: Apache-2.0
"""What a captured CUDA graph would read: there is no capturing here, but where things lie can be looked at."""

from __future__ import annotations

from typing import Any

import pytest
from v2_requests import generate, prompts, sampling

from vllm_ext.engine.attention import tree_backend
from vllm_ext.engine.v2.model_state import TreeState

pytestmark = [pytest.mark.v2, pytest.mark.quick]
PARTS = ("first_row", "num_rows", "num_past", "context_len", "parents", "ancestor_bits", "row_start")


def addresses(metadata: dict[str, Any]) -> dict[str, int]:
    """Where the tensors of one layer's trees are."""
    rows = getattr(next(iter(metadata.values())), tree_backend.TREES).rows
    return {name: getattr(rows, name).data_ptr() for name in PARTS}


def test_a_graph_reads_what_a_step_writes(v2_trees: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture

    runner = v2_trees.llm_engine.model_executor.driver_worker.worker.model_runner

    def prepare(requests: int, tokens: int, full: bool = True) -> Any:
        # vLLM's own, by which it captures: found was a graph of chains, as it passes another mode than expected.
        state = prepare_inputs_to_capture(
            requests,
            tokens,
            runner.model_state,
            runner.input_buffers,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
            full_cudagraph=full,
        )
        return state.attn_metadata

    captured = addresses(prepare(2, 14))
    rows = runner.speculator.layout
    assert rows.num_rows[:3].tolist() == [7, 7, 0]
    # Not of steps without drafts, nor of mixed ones, nor of graphs that attention is no part of.
    for requests, tokens, full in ((2, 2, True), (2, 9, True), (2, 14, False)):
        other = prepare(requests, tokens, full)
        assert not hasattr(next(iter(other.values())), tree_backend.TREES)

    seen: list[tuple[dict[str, int], int, list[int]]] = []
    honest = TreeState.prepare_attn

    def watching(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = honest(self, input_batch, *args, **kwargs)
        if input_batch.num_draft_tokens and not input_batch.has_prefill:
            where = input_batch.positions.data_ptr()
            seen.append((addresses(metadata), where, runner.speculator.layout.num_rows.tolist()))
        return metadata

    monkeypatch.setattr(TreeState, "prepare_attn", watching)
    generate(v2_trees, prompts(1, seed=30), sampling(max_tokens=5))
    assert seen
    for step, positions, num_rows in seen:
        assert step == captured
        assert positions == runner.input_buffers.positions.data_ptr()
        assert num_rows == [7, 0, 0, 0]  # of requests that fill a graph up: none


def test_a_graph_for_any_query_lengths(v2_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its requests have trees, at least a root, and steps without drafts say where these are."""
    from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture

    runner = v2_host.llm_engine.model_executor.driver_worker.worker.model_runner
    monkeypatch.setattr(runner.speculator, "varlen", True)
    layout = runner.speculator.layout
    for requests, tokens, rows in ((4, 4, [1, 1, 1, 1]), (4, 9, [2, 2, 2, 3]), (2, 14, [7, 7, 0, 0])):
        state = prepare_inputs_to_capture(
            requests,
            tokens,
            runner.model_state,
            runner.input_buffers,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
            full_cudagraph=True,
            max_query_len=7,
        )
        trees = getattr(next(iter(state.attn_metadata.values())), tree_backend.TREES)
        assert trees.stock is None
        assert (len(trees.rows.num_rows), len(trees.rows.parents), trees.rows.max_rows) == (
            requests,
            tokens,
            7,
        )
        assert trees.rows.num_rows.data_ptr() == layout.num_rows.data_ptr()
        assert layout.num_rows.tolist() == rows

    seen: list[list[int]] = []
    honest = TreeState.prepare_attn

    def watching(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not input_batch.num_draft_tokens and not input_batch.has_prefill:
            seen.append(layout.num_rows.tolist())
            assert layout.first_row[: input_batch.num_reqs].tolist() == list(range(input_batch.num_reqs))
        return honest(self, input_batch, *args, **kwargs)

    monkeypatch.setattr(TreeState, "prepare_attn", watching)
    scheduler = v2_host.llm_engine.engine_core.engine_core.scheduler
    monkeypatch.setattr(scheduler, "dynamic_sd_lookup", [0] * 5)
    layout.num_rows.fill_(9)
    generate(v2_host, prompts(2, seed=31), sampling(max_tokens=4))
    assert seen
    assert all(rows == [1, 1, 0, 0] for rows in seen)
