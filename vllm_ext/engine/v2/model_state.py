# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model state, taught trees: rotary positions before the forward pass, attention metadata that knows them.

What a captured graph reads lies in the buffers of `speculators`: positions are changed in place, in vLLM's own buffer
and after it has computed the slots from them. With M-RoPE the model reads others, which vLLM computes behind that: they
are moved by as much, alike in each dimension, since a draft is text.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_ext.engine import tree_layers
from vllm_ext.engine.attention import tree_backend
from vllm_ext.engine.recurrent.device_rows import DeviceSteps, to_device
from vllm_ext.engine.recurrent.rows import as_rows
from vllm_ext.engine.tree_layout import offsets, starts
from vllm_ext.engine.v2.speculators.base import TreeSpeculator
from vllm_ext.kernels.tree_attention import TreeRows


class TreeState(ABC):
    """Mixin in front of vLLM's model state class, an ABC: only of another can its instances be made."""

    speculator: TreeSpeculator
    recurrent: DeviceSteps
    rope_state: Any = None  # vLLM's, of models with M-RoPE
    slot_mappings: torch.Tensor | None = None  # int64 [KV groups, query rows], of the step that runs
    _moved: torch.Tensor | None = None  # int64 [query rows] by how much rows were moved, until M-RoPE's are

    def preprocess_state(self, input_batch: Any, *args: Any, **kwargs: Any) -> None:
        """vLLM's last word before the metadata: slots are computed, by the flat positions."""
        super().preprocess_state(input_batch, *args, **kwargs)  # type: ignore[misc]
        # Graphs for any query lengths read where each request's root is, of steps without drafts too.
        if input_batch.num_draft_tokens or (self.speculator.varlen and not input_batch.has_prefill):
            flat = None if self.rope_state is None else input_batch.positions.clone()
            self.lay_out(input_batch)
            self._moved = None if flat is None else input_batch.positions - flat

    def lay_out(self, input_batch: Any) -> None:
        """The step's trees, as rows."""
        self.speculator.lay_out(input_batch)

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """vLLM's inputs, with M-RoPE's positions of tree nodes."""
        inputs: dict[str, Any] = super().prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        if self._moved is not None:
            inputs["positions"] += self._moved
            self._moved = None
        return inputs

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: Any,
        slot_mappings: torch.Tensor,
        attn_groups: Any,
        kv_cache_config: Any,
        for_capture: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """vLLM's metadata, marked with the step's trees."""
        stock: Any = super()
        arguments = attn_groups, kv_cache_config
        metadata: dict[str, Any] = stock.prepare_attn(
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            *arguments,
            for_capture=for_capture,
            **kwargs,
        )
        self.slot_mappings = slot_mappings

        def stock_of(requests: Any) -> tuple[dict[str, Any], Any]:
            """vLLM's metadata of some requests, and their query rows."""
            batch, places, rows = _part(input_batch, requests)
            tables = tuple(table[places] for table in block_tables)
            own: dict[str, Any] = stock.prepare_attn(
                batch, CUDAGraphMode.NONE, tables, slot_mappings[:, rows], *arguments, **kwargs
            )
            return own, rows

        if not for_capture:
            parents = self.speculator.layout.parents if input_batch.num_draft_tokens else None
            self.recurrent.mark(input_batch, parents, metadata, block_tables, stock_of)
        replayed = cudagraph_mode == CUDAGraphMode.FULL and not for_capture
        if self.speculator.chain_reason is not None or replayed:
            return metadata  # a graph that is replayed reads the layout
        # By `for_capture` alone: while vLLM captures a FULL graph it passes mode NONE.
        num_trees, num_rows = self._capture_trees(input_batch) if for_capture else _trees(input_batch)
        if not num_trees:
            return metadata
        others, other_rows = None, None
        if num_trees < input_batch.num_reqs:
            # Requests with drafts come first.
            others, other_rows = stock_of(np.arange(num_trees, input_batch.num_reqs))
        if for_capture:
            most = (
                input_batch.max_query_len
                if self.speculator.varlen
                else input_batch.num_scheduled_tokens.max()
            )
        else:
            most = 1 + input_batch.num_draft_tokens_per_req.max()
        # Of metadata in chunks, the table has a row for each chunk.
        for table, groups in zip(block_tables, attn_groups, strict=True):
            rows = self._rows(table[:num_trees], num_trees, num_rows, int(most))
            for group in groups:
                if tree_layers.is_recurrent(group.backend):
                    continue
                name = group.layer_names[0]
                marked = tree_backend.TreeMetadata(rows, others and others[name], other_rows)
                setattr(metadata[name], tree_backend.TREES, marked)
        return metadata

    def _rows(self, block_table: torch.Tensor, num_trees: int, num_rows: int, most: int) -> TreeRows:
        """The layout as the kernels take it; what they would work out on the host is there already.

        Args:
            block_table: of the trees' requests.
            num_trees: how many these are.
            num_rows: of all trees.
            most: of one tree.
        """
        layout = self.speculator.layout
        rows = TreeRows(
            block_table=block_table,
            first_row=layout.first_row[:num_trees],
            num_rows=layout.num_rows[:num_trees],
            num_past=self.speculator.no_past[:num_trees],
            context_len=layout.context[:num_trees],
            parents=layout.parents[:num_rows],
            max_rows=most,
        )
        vars(rows).update(ancestor_bits=layout.bits[:num_rows], row_start=layout.row_start[: num_trees + 1])
        return rows

    def _capture_trees(self, input_batch: Any) -> tuple[int, int]:
        """Of a made-up batch: trees if each request has the same number of rows, and more than one.

        Where graphs are for any query lengths all requests have trees, some of a root alone.
        """
        lengths = input_batch.num_scheduled_tokens
        if not self.speculator.varlen and (lengths.min() == 1 or lengths.min() != lengths.max()):
            return 0, 0
        if lengths.max() > 1 + self.speculator.num_nodes:
            return 0, 0
        self.speculator.lay_out(replace(input_batch, cu_num_logits=input_batch.query_start_loc))
        return input_batch.num_reqs, input_batch.num_tokens


def _trees(input_batch: Any) -> tuple[int, int]:
    """How many requests have drafts, and how many rows these are verified in."""
    drafts = input_batch.num_draft_tokens_per_req
    if drafts is None or not input_batch.num_draft_tokens:
        return 0, 0
    number = int((drafts > 0).sum())
    assert drafts[:number].all()  # vLLM sorts a step's requests
    return number, int(input_batch.cu_num_logits_np[number])


def _part(input_batch: Any, requests: Any) -> tuple[Any, Any, Any]:
    """The batch of some requests, what vLLM's metadata is made of; and on the device their places and query rows.

    Args:
        input_batch: vLLM's.
        requests: int ``[requests]``, on the host: their places in the batch, ascending.
    """
    first = input_batch.query_start_loc_np[requests]
    lengths = input_batch.query_start_loc_np[requests + 1] - first
    device = input_batch.query_start_loc.device

    def index(array: Any) -> torch.Tensor:
        return to_device(array, torch.int64, device)

    places, rows = as_rows(requests, index), as_rows(np.repeat(first, lengths) + offsets(lengths), index)
    start, num_reqs, num_tokens = starts(lengths), len(requests), int(lengths.sum())

    def cut(values: Any) -> Any:
        return None if values is None else values[requests]

    batch = replace(
        input_batch,
        req_ids=[input_batch.req_ids[place] for place in requests],
        num_reqs=num_reqs,
        num_reqs_after_padding=num_reqs,
        idx_mapping=input_batch.idx_mapping[places],
        idx_mapping_np=input_batch.idx_mapping_np[requests],
        num_scheduled_tokens=input_batch.num_scheduled_tokens[requests],
        num_tokens=num_tokens,
        num_tokens_after_padding=num_tokens,
        query_start_loc=to_device(start, torch.int32, device),
        query_start_loc_np=start,
        seq_lens=input_batch.seq_lens[places],
        seq_lens_cpu_upper_bound=input_batch.seq_lens_cpu_upper_bound[requests],
        is_prefilling_np=input_batch.is_prefilling_np[requests],
        positions=input_batch.positions[rows],
        num_draft_tokens_per_req=cut(input_batch.num_draft_tokens_per_req),
        prompt_lens=None if input_batch.prompt_lens is None else input_batch.prompt_lens[places],
        prefill_runs_as_decode_np=cut(input_batch.prefill_runs_as_decode_np),
    )
    return batch, places, rows
