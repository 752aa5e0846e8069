# SPDX-License-Identifier: Apache-2.0
"""`recurrent_trees` as it is defined, row by row: the readable form the others are tested against."""

from __future__ import annotations

import itertools

import torch


def recurrent_trees_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    blocks: torch.Tensor,
    row_start: torch.Tensor,
    certain: torch.Tensor,
    parents: torch.Tensor,
    out: torch.Tensor,
    max_rows: int,
) -> None:
    """See `vllm_ext.kernels.recurrent_trees.recurrent_trees`, which validates."""
    per_group = v.shape[1] // q.shape[1]
    for (start, end), block, last in zip(
        itertools.pairwise(row_start.tolist()), blocks.tolist(), (certain - 1).tolist(), strict=True
    ):
        if block == 0 or start == end:
            continue
        states = {-1: state[block].float()}
        for row, parent in enumerate(parents[start:end].tolist()):
            at = start + row
            key, query = (side[at].float().repeat_interleave(per_group, 0)[..., None] for side in (k, q))
            decayed = states[parent] * decay[at].exp()[:, None, None]
            w = v[at].float()[..., None]
            if beta is not None:
                w = beta[at][:, None, None] * (w - decayed @ key)
            states[row] = decayed + w @ key.transpose(1, 2)
            if row >= last:
                out[at] = (states[row] @ query)[..., 0].to(out.dtype)
        state[block] = states[last].to(state.dtype)
