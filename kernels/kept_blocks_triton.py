# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""`kept_blocks` on CUDA: one program for each part, or request."""

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.device_trees import RowLayout
from vllm_ext.kernels.kept_blocks import KeptParts, Window


def keep_blocks_triton(
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    part_start: torch.Tensor,
    request: torch.Tensor | None,
    behind: torch.Tensor | None,
    window: Window,
    kept: KeptParts,
    gone: torch.Tensor | None,
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
            gone,
            *kept,
            0 if gone is None else gone.stride(0),
            table.stride(0),
            table.shape[1],
            width,
            *window,
            COLUMNS=min(triton.next_power_of_2(width if gone is None else table.shape[1]), 1024),
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
    gone,
    kept_table,
    kept_lens,
    gone_stride,
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
    table += of.to(tl.int64) * stride
    kept_table += part.to(tl.int64) * width
    if gone is None:
        skipped = tl.maximum(tl.maximum(end - rows, 0) // block_size - window_blocks - sinks, 0)
        for first in range(0, width, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            source = tl.where(column < sinks, column, column + skipped)
            inside = (column < width) & (source < num_blocks)
            tl.store(kept_table + column, tl.load(table + source, mask=inside, other=0), mask=inside)
    else:
        # Graphs have requests without rows, and without slots.
        gone += tl.load(slots + of, mask=rows > 0, other=0) * gone_stride
        position = tl.where(rows > 0, end - rows, -1)
        number = 0
        for first in range(0, num_blocks, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = column < num_blocks
            stays = tl.load(gone + column, mask=inside, other=-1) > position
            stays &= inside
            counted = stays.to(tl.int32)
            at = number + tl.cumsum(counted, 0) - 1
            read = tl.load(table + column, mask=inside, other=0)
            tl.store(kept_table + at, read, mask=stays & (at < width))
            number += tl.sum(counted, 0)
        skipped = num_blocks - number
    tl.store(kept_lens + part, tl.minimum(end - skipped * block_size, width * block_size))


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
