# SPDX-License-Identifier: Apache-2.0
"""`device_trees` as it is defined, one request at a time: the readable form the others are tested against."""

from __future__ import annotations

import torch

from vllm_ext.kernels.device_trees import RowLayout, SlotTrees, Walked


def lay_out_ref(
    trees: SlotTrees,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    row_start: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    layout: RowLayout,
) -> None:
    """See `vllm_ext.kernels.device_trees.lay_out`."""
    layout.num_rows.zero_()
    layout.row_start[:] = row_start[-1]
    layout.row_start[: len(row_start)] = row_start
    for request, slot in enumerate(slots.tolist()):
        start, end = row_start[request : request + 2].tolist()
        rows = end - start
        first = int(query_start[request + 1]) - rows
        layout.first_row[request] = first
        layout.num_rows[request] = rows
        layout.context[request] = seq_lens[request] - rows
        layout.parents[start:end] = trees.parents[slot, :rows]
        layout.bits[start:end] = trees.bits[slot, :rows]
        layout.groups[start:end] = trees.groups[slot, :rows]
        positions[first : first + rows] = seq_lens[request] - rows + trees.depths[slot, :rows]


def walk_ref(
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
    walked.emitted.zero_()
    walked.accepted.zero_()
    walked.path[:] = torch.arange(walked.path.shape[1])
    for request, slot in enumerate(slots.tolist()):
        start, end = row_start[request : request + 2].tolist()
        has_tree = positions[start] >= prefill_len[slot]
        nodes = [row for row in range(1, end - start) if has_tree and parents[start + row] >= 0]
        row, count = 0, 0
        while row >= 0:
            token = int(sampled[start + row])
            walked.emitted[request, count] = token
            walked.path[request, count] = row
            walked.accepted[start + row] = 1
            count += 1
            children = [
                child
                for child in nodes
                if parents[start + child] == row
                and tokens[start + child] == token
                and not (invalid is not None and invalid[start + child])
            ]
            row = children[0] if children else -1
        incomplete = bool(seq_lens[request] < prefill_len[slot])
        walked.num_emitted[request] = 0 if incomplete else count
        walked.num_rejected[request] = 0 if incomplete else end - start - count
        if totals is not None:
            steps = int(not incomplete)
            totals += torch.tensor([len(nodes), steps * (count - 1), steps * count, steps])
