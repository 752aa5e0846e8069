# SPDX-License-Identifier: Apache-2.0
"""`tree_conv` as it is defined, row by row: the readable form the others are tested against."""

from __future__ import annotations

import itertools

import torch


def tree_conv_ref(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: torch.Tensor,
    row_start: torch.Tensor,
    parents: torch.Tensor,
    pending: torch.Tensor,
    num_pending: torch.Tensor,
    out_start: torch.Tensor,
    out: torch.Tensor,
    silu: bool,
) -> None:
    """See `vllm_ext.kernels.tree_conv.tree_conv`, which validates."""
    width = weight.shape[1]
    factors = weight.float().T

    def convolved(inputs: list[torch.Tensor]) -> torch.Tensor:
        y = (torch.stack(inputs[-width:]) * factors).sum(0)
        if bias is not None:
            y = y + bias.float()
        return (torch.nn.functional.silu(y) if silu else y).to(out.dtype)

    for request, (start, end) in enumerate(itertools.pairwise(row_start.tolist())):
        block = int(blocks[request])
        if block == 0 or start == end:
            continue
        old, count = state[block].float(), int(num_pending[request])
        accepted = pending[request, :count].tolist()
        text = [*old[:, : width - 1].T, *(old[:, width - 2 + row] for row in accepted)]
        results = [convolved(text[: place + 1]) for place in range(width - 1, len(text))]
        paths: dict[int, list[torch.Tensor]] = {-1: text}
        for row, parent in enumerate(parents[start:end].tolist()):
            paths[row] = [*paths[parent], x[start + row].float()]
            results.append(convolved(paths[row]))
        first = int(out_start[request])
        out[first : first + len(results)] = torch.stack(results)
        for column, values in enumerate([*text[len(text) - (width - 2) :], *x[start:end]]):
            state[block, :, column] = values.to(state.dtype)
