# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""`kept_blocks` on CUDA: one program for each part, or request."""

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.device_trees import RowLayout
from vllm_ext.kernels.kept_blocks import KeptLists, KeptParts, Window


def keep_blocks_triton(
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    part_start: torch.Tensor,
    request: torch.Tensor | None,
    behind: torch.Tensor | None,
    window: Window,
    kept: KeptParts,
    lists: KeptLists | None,
    slots: torch.Tensor | None,
) -> None:
    """See `vllm_ext.kernels.kept_blocks.keep_blocks`."""
    parts, width = len(part_start) - 1, kept.table.shape[1]
    if parts == 0:
        return
    with torch.cuda.device_of(seq_lens):
        _keep[(parts,)](
            table,
            seq_lens,
            part_start,
            request,
            behind,
            slots,
            *((None,) * len(KeptLists._fields) if lists is None else lists),
            *kept,
            0 if lists is None else lists.blocks.stride(0),
            table.stride(0),
            table.shape[1],
            width,
            *window,
            COLUMNS=min(triton.next_power_of_2(width), 1024),
        )


def end_with_block_triton(layout: RowLayout, positions: torch.Tensor, window: Window) -> None:
    """See `vllm_ext.kernels.kept_blocks.end_with_block`."""
    requests, most = len(layout.num_rows), len(layout.parents) // len(layout.num_rows)
    with torch.cuda.device_of(positions):
        _end[(requests,)](
            layout.row_start,
            layout.first_row,
            layout.num_rows,
            layout.context,
            layout.parents,
            layout.groups,
            positions,
            *window,
            ROWS=triton.next_power_of_2(most),
            num_warps=1,
        )


@triton.jit
def _keep(
    table,
    seq_lens,
    part_start,
    request,
    behind,
    slots,
    listed,
    list_heads,
    list_skips,
    list_firsts,
    kept_table,
    kept_lens,
    list_stride,
    stride,
    num_blocks,
    width,
    sinks,
    window_blocks,
    block_size,
    COLUMNS: tl.constexpr,
):
    part = tl.program_id(0)
    of = part
    if request is not None:
        of = tl.load(request + part)
    end = tl.load(seq_lens + of)
    if behind is not None:
        end -= tl.load(behind + part)
    rows = tl.load(part_start + part + 1) - tl.load(part_start + part)
    skipped = tl.maximum(tl.maximum(end - rows, 0) // block_size - window_blocks - sinks, 0)
    head = sinks
    if listed is not None:
        slot = tl.load(
            slots + of, mask=rows > 0, other=0
        )  # graphs have requests without rows, and without slots
        has_list = (rows > 0) & (end - rows >= tl.load(list_firsts + slot))
        skipped = tl.where(has_list, tl.load(list_skips + slot), skipped)
        head = tl.where(has_list, tl.load(list_heads + slot), 0)
        listed += slot * list_stride
    tl.store(kept_lens + part, tl.minimum(end - skipped * block_size, width * block_size))
    table += of.to(tl.int64) * stride
    kept_table += part.to(tl.int64) * width
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        source = tl.where(column < head, column, column + skipped)
        if listed is not None:
            source = tl.where(column < head, tl.load(listed + column, mask=column < head, other=0), source)
        inside = (column < width) & (source < num_blocks)
        tl.store(kept_table + column, tl.load(table + source, mask=inside, other=0), mask=inside)


@triton.jit
def _end(
    row_start,
    first_row,
    num_rows,
    context,
    parents,
    groups,
    positions,
    sinks,
    window_blocks,
    block_size,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0)
    rows = tl.load(num_rows + request)
    if rows > 0:
        root = tl.load(context + request)
        block = root // block_size
        row = tl.arange(0, ROWS)
        at = tl.load(first_row + request) + row
        behind = (row < rows) & (tl.load(positions + at, mask=row < rows, other=0) // block_size > block)
        start = tl.load(row_start + request)
        tl.store(parents + start + row, -1, mask=behind)
        tl.store(groups + start + row, -1, mask=behind)
        skipped = tl.maximum(block - window_blocks - sinks, 0)
        tl.store(context + request, root - skipped * block_size)
