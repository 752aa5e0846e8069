# SPDX-License-Identifier: Apache-2.0
"""`kept_blocks` as it is defined: the readable form the other is tested against."""

from __future__ import annotations

import torch

from vllm_ext.kernels.device_trees import EMPTY, RowLayout
from vllm_ext.kernels.kept_blocks import KeptParts, Window


def keep_blocks_ref(
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
    width = kept.table.shape[1]
    for part, rows in enumerate(part_start.diff().tolist()):
        of = part if request is None else int(request[part])
        end = int(seq_lens[of]) - (0 if behind is None else int(behind[part]))
        if gone is None or slots is None:
            skipped = window.skipped(max(end - rows, 0) // window.block_size)
            columns = [*range(window.sinks), *range(window.sinks + skipped, table.shape[1])]
        else:
            columns = [i for i in range(table.shape[1]) if not rows or gone[slots[of], i] > end - rows]
            skipped = table.shape[1] - len(columns)
        columns = columns[:width]
        kept.table[part, : len(columns)] = table[of, columns]
        kept.seq_lens[part] = min(end - skipped * window.block_size, width * window.block_size)


def end_with_block_ref(layout: RowLayout, positions: torch.Tensor, window: Window) -> None:
    """See `vllm_ext.kernels.kept_blocks.end_with_block`."""
    for request, rows in enumerate(layout.num_rows.tolist()):
        root, block = int(layout.context[request]), int(layout.context[request]) // window.block_size
        start, first = int(layout.row_start[request]), int(layout.first_row[request])
        for row in range(rows):
            if int(positions[first + row]) // window.block_size > block:
                layout.parents[start + row] = layout.groups[start + row] = EMPTY
        layout.context[request] = root - window.skipped(block) * window.block_size
