# SPDX-License-Identifier: Apache-2.0
"""The rows of a step over an encoded KV cache, and where drafts' keys and values lie in it. No vLLM in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_ext.codecs.base import KVCodec
from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.kernels.encoded_attention import EncodedRows
from vllm_ext.proposers.tree import Int32


class EncodedMetadata:
    """Attention metadata of a step, instead of vLLM's: prompts' parts and rows that decode alike.

    Args:
        query_start: int32 ``[num_requests + 1]``.
        seq_lens: int32 ``[num_requests]``, tokens at the end of the step.
        block_table: int32 ``[num_requests, max_blocks]``.
        codec: of the cache.
        dtype: of keys and values as they are.
    """

    def __init__(
        self,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        codec: KVCodec,
        dtype: torch.dtype,
    ) -> None:
        num_rows = query_start.diff()
        self.codec, self.dtype, self.num_actual_tokens = codec, dtype, int(query_start[-1])
        # Each row's parent is the one before it.
        offsets = torch.arange(self.num_actual_tokens) - query_start[:-1].long().repeat_interleave(num_rows)
        self.rows = EncodedRows(
            block_table=block_table,
            first_row=query_start[:-1].contiguous(),
            num_rows=num_rows,
            num_settled=num_rows,
            context_len=seq_lens - num_rows,
            parents=(offsets - 1).to(torch.int32),
        )

    def mark(self, trees: StepTrees) -> None:
        """Learn which rows are drafts': all but the first of the requests that decode."""
        drafting = [i for i in trees.decoding if trees.row_start[i + 1] - trees.row_start[i] > 1]
        if not drafting:
            return
        settled, parents = self.rows.num_settled.clone(), self.rows.parents.clone()
        settled[drafting] = 1
        for i in drafting:
            start, of_request = int(trees.query_row[i]), trees.parents[trees.rows(i)]
            parents[start : start + len(of_request)] = torch.from_numpy(of_request)
        self.rows = replace(self.rows, num_settled=settled, parents=parents)

    def raw_slots(self, query_rows: Int32) -> torch.Tensor:
        """Where rows' keys and values are as they are, int64 ``[num]``.

        A block times `BlockFormat.raw_tokens_per_block`, plus the token's place among these.
        """
        rows, codec = self.rows, self.codec
        per_block = codec.format.raw_tokens_per_block(self.dtype.itemsize)
        request = np.searchsorted(rows.first_row.numpy(), query_rows, "right") - 1
        context = rows.context_len.numpy()[request]
        place = context % codec.block_size + query_rows - rows.first_row.numpy()[request]
        blocks = rows.block_table.numpy()[request, context // codec.block_size + 1 + place // per_block]
        return torch.from_numpy(blocks.astype(np.int64) * per_block + place % per_block)


def raw_mover(
    caches: Sequence[torch.Tensor], codec: KVCodec, dtype: torch.dtype
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """What copies keys and values between slots of `EncodedMetadata.raw_slots`, in each of some layers' caches.

    Args:
        caches: uint8 ``[num_blocks, num_kv_heads, block_size, codec.bytes_per_token]`` each.
        codec: of the caches.
        dtype: of keys and values as they are.
    """
    per_block = codec.format.raw_tokens_per_block(dtype.itemsize)
    width = codec.RAW_VECTORS * codec.head_size * dtype.itemsize
    views: list[Any] = []
    for cache in caches:
        raw = cache.flatten(2)[:, :, : per_block * width]
        views.append(raw.view(*raw.shape[:2], per_block, width))

    def move(source: torch.Tensor, target: torch.Tensor) -> None:
        from_block, from_place = source // per_block, source % per_block
        to_block, to_place = target // per_block, target % per_block
        for view in views:
            view[to_block, :, to_place] = view[from_block, :, from_place]  # the right side is a copy

    return move
