# SPDX-License-Identifier: Apache-2.0
"""`device_trees` on the CPU: the loops of `device_trees_ref`, for numba."""

from __future__ import annotations

import functools
from typing import Any

import numba
import torch

from vllm_ext.kernels import backends
from vllm_ext.kernels.backends import as_arrays
from vllm_ext.kernels.device_trees import RowLayout, SlotTrees, Walked


def lay_out_numba(
    trees: SlotTrees,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    row_start: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    layout: RowLayout,
) -> None:
    """See `vllm_ext.kernels.device_trees.lay_out`."""
    _compiled("_lay_out")(
        as_arrays(trees),
        slots.numpy(),
        query_start.numpy(),
        row_start.numpy(),
        seq_lens.numpy(),
        positions.numpy(),
        as_arrays(layout),
    )


def walk_numba(
    row_start: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    parents: torch.Tensor,
    sampled: torch.Tensor,
    invalid: torch.Tensor | None,
    prefill_len: torch.Tensor,
    seq_lens: torch.Tensor,
    walked: Walked,
    totals: torch.Tensor | None,
) -> None:
    """See `vllm_ext.kernels.device_trees.walk`."""
    _compiled("_walk")(
        row_start.numpy(),
        slots.numpy(),
        tokens.numpy(),
        positions.numpy(),
        parents.numpy(),
        sampled.numpy(),
        None if invalid is None else invalid.numpy(),
        prefill_len.numpy(),
        seq_lens.numpy(),
        as_arrays(walked),
        None if totals is None else totals.numpy(),
    )


@functools.cache
def _compiled(name: str) -> Any:
    return backends.compile_cached(numba.njit, nogil=True)(globals()[name])


def _lay_out(
    trees: Any, slots: Any, query_start: Any, row_start: Any, seq_lens: Any, positions: Any, layout: Any
) -> None:
    requests = len(slots)
    layout.num_rows[:] = 0
    for request in range(len(layout.row_start)):
        layout.row_start[request] = row_start[min(request, requests)]
    for request in range(requests):
        slot, start = slots[request], row_start[request]
        rows = row_start[request + 1] - start
        first = query_start[request + 1] - rows
        before = seq_lens[request] - rows
        layout.first_row[request] = first
        layout.num_rows[request] = rows
        layout.context[request] = before
        for row in range(rows):
            layout.parents[start + row] = trees.parents[slot, row]
            layout.groups[start + row] = trees.groups[slot, row]
            positions[first + row] = before + trees.depths[slot, row]
            for word in range(trees.bits.shape[2]):
                layout.bits[start + row, word] = trees.bits[slot, row, word]


def _walk(
    row_start: Any,
    slots: Any,
    tokens: Any,
    positions: Any,
    parents: Any,
    sampled: Any,
    invalid: Any,
    prefill_len: Any,
    seq_lens: Any,
    walked: Any,
    totals: Any,
) -> None:
    walked.emitted[:] = 0
    walked.accepted[:] = 0
    for request in range(len(slots)):
        for column in range(walked.path.shape[1]):
            walked.path[request, column] = column
        slot, start = slots[request], row_start[request]
        rows = row_start[request + 1] - start
        # Behind a root of a prompt rows are padding.
        real = rows if rows > 0 and positions[start] >= prefill_len[slot] else min(rows, 1)
        count = 0
        row = 0
        while row < real:
            token = sampled[start + row]
            walked.emitted[request, count] = token
            walked.path[request, count] = row
            walked.accepted[start + row] = 1
            count += 1
            child = row + 1  # children stand behind their parent
            while child < real:
                at = start + child
                if parents[at] == row and tokens[at] == token and (invalid is None or not invalid[at]):
                    break
                child += 1
            row = child
        speaks = seq_lens[request] >= prefill_len[slot]
        walked.num_emitted[request] = count if speaks else 0
        walked.num_rejected[request] = rows - count if speaks else 0
        if totals is not None:
            for row in range(1, real):
                totals[0] += parents[start + row] >= 0
            if speaks:
                totals[1] += count - 1
                totals[2] += count
                totals[3] += 1
