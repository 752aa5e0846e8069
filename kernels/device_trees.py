# SPDX-License-Identifier: Apache-2.0
"""Draft trees that never leave the device: laying them out as rows, walking them. `recycling` grows some.

A *slot* is where an engine keeps one request; its tree has ``nodes`` nodes at most, in buffers of fixed size that a
captured graph can read. Row 0 is the root, row ``j`` node ``j - 1``. Rows without a node are *padding*: their parent
is -1, so they see the context and themselves, nobody is their child, and no walk can get to them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vllm_ext.kernels.backends import Backend, choose

WORDS = 5  # of 32 bits: `vllm_ext.kernels.tree_attention.MAX_ROWS` rows
EMPTY = -1


class SlotTrees(NamedTuple):
    """The trees of all slots, for the next step."""

    parents: torch.Tensor  # int32 [slots, 1 + nodes] the parent's row; -1 for roots and padding
    depths: torch.Tensor  # int32 [slots, 1 + nodes] 0 for roots, 1 for padding
    bits: torch.Tensor  # int32 [slots, 1 + nodes, WORDS] bit b of word w: the row sees row 32 * w + b
    groups: (
        torch.Tensor
    )  # int32 [slots, 1 + nodes] which estimate a node's chance came from; -1 for the others

    @classmethod
    def of_size(cls, slots: int, nodes: int, device: torch.device) -> SlotTrees:
        """Padding alone."""
        shape = slots, 1 + nodes
        row = torch.arange(1 + nodes, device=device)
        word = torch.arange(WORDS, device=device)
        own = torch.where(row[:, None] // 32 == word, 1 << (row[:, None] % 32), 0)
        depths = torch.ones(shape, dtype=torch.int32, device=device)
        depths[:, 0] = 0
        return cls(
            torch.full(shape, EMPTY, dtype=torch.int32, device=device),
            depths,
            own.to(torch.int32).expand(slots, -1, -1).contiguous(),
            torch.full(shape, EMPTY, dtype=torch.int32, device=device),
        )


def keep_first(trees: SlotTrees, slots: torch.Tensor, most: torch.Tensor) -> None:
    """Make padding of all but the first nodes of some trees.

    Args:
        trees: of all slots; changed at ``slots``.
        slots: int64 ``[requests]``, no two alike.
        most: int64 ``[requests]`` nodes that stay.
    """
    padding = SlotTrees.of_size(1, trees.parents.shape[1] - 1, trees.parents.device)
    row = torch.arange(trees.parents.shape[1], device=trees.parents.device)
    stays = row <= most[:, None]
    for values, empty in zip(trees, padding, strict=True):
        kept = stays.reshape(*stays.shape, *[1] * (values.dim() - 2))
        values[slots] = torch.where(kept, values[slots], empty)


class RowLayout(NamedTuple):
    """The verified rows of one step, request after request."""

    row_start: torch.Tensor  # int32 [requests + 1] rows of request i are row_start[i]:row_start[i + 1]
    first_row: torch.Tensor  # int32 [requests] where in the query the root is
    num_rows: torch.Tensor  # int32 [requests]
    context: torch.Tensor  # int32 [requests] tokens before the root
    parents: torch.Tensor  # int32 [rows] as an offset inside the request
    bits: torch.Tensor  # int32 [rows, WORDS]
    groups: torch.Tensor  # int32 [rows]

    @classmethod
    def of_size(cls, requests: int, rows: int, device: torch.device) -> RowLayout:
        """Room for so many."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        by_request = (zeros(requests + 1), zeros(requests), zeros(requests), zeros(requests))
        return cls(*by_request, zeros(rows), zeros(rows, WORDS), zeros(rows))


class Walked(NamedTuple):
    """What a walk has found."""

    emitted: torch.Tensor  # int64 [requests, most] what was sampled along the path, then 0
    num_emitted: torch.Tensor  # int32 [requests] rows of the path; 0 as long as a prompt is incomplete
    num_rejected: torch.Tensor  # int32 [requests] rows that are not on it; 0 likewise
    path: (
        torch.Tensor
    )  # int32 [requests, most] its rows as offsets, the root first; behind the last, their own place
    accepted: torch.Tensor  # int32 [rows] 1 for rows of the path

    @classmethod
    def of_size(cls, requests: int, rows: int, most: int, device: torch.device) -> Walked:
        """Room for a step, of any content."""

        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            empty(torch.int64, requests, most),
            empty(torch.int32, requests),
            empty(torch.int32, requests),
            empty(torch.int32, requests, most),
            empty(torch.int32, rows),
        )


def lay_out(
    trees: SlotTrees,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    row_start: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    layout: RowLayout,
    backend: Backend = "auto",
) -> None:
    """Lay the trees out as the last rows of each request's query, and give these their rotary positions.

    Args:
        trees: of all slots.
        slots: int64 ``[requests]``.
        query_start: int32 ``[requests + 1]``; request i has the query rows ``query_start[i]:query_start[i + 1]``.
        row_start: int32 ``[requests + 1]``; the last ``row_start[i + 1] - row_start[i]`` of these are the root and
            the first nodes of its tree.
        seq_lens: int32 ``[requests]`` tokens of each, its query's rows included.
        positions: int64 ``[query rows]``, changed for the verified rows: the root's plus the depth.
        layout: written to; behind ``requests`` there are 0 rows.
        backend: "auto" is triton on CUDA, numba on the CPU, else torch.
    """
    form: Any
    match choose(backend, positions):
        case "numba":
            from vllm_ext.kernels.device_trees_numba import lay_out_numba as form
        case "triton":
            from vllm_ext.kernels.device_trees_triton import lay_out_triton as form
        case _:
            from vllm_ext.kernels.device_trees_ref import lay_out_ref as form
    form(trees, slots, query_start, row_start, seq_lens, positions, layout)


def walk(
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
    totals: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """From each root on, go to the child that is what was sampled at its parent; stop where there is none.

    Args:
        row_start: int32 ``[requests + 1]``; rows of request i are ``row_start[i]:row_start[i + 1]``, root first.
        slots: int64 ``[requests]``.
        tokens: int32 ``[rows]`` each row's input token.
        positions: int64 ``[rows]`` its position in the text.
        parents: int32 ``[rows]`` offset of the parent row inside the request; -1: there is none.
        sampled: int64 ``[rows]`` what follows each row.
        invalid: bool ``[rows]``: nobody may go there; None: all may be gone to.
        prefill_len: int32 ``[slots]``: behind a root that stands before this rows are padding.
        seq_lens: int32 ``[requests]``: of a request with fewer tokens than ``prefill_len`` nothing is put out.
        walked: written to.
        totals: int64 ``[4]``, added to: nodes, of them accepted, tokens put out, requests that put out any.
        backend: "auto" is triton on CUDA, numba on the CPU, else torch.
    """
    form: Any
    match choose(backend, sampled):
        case "numba":
            from vllm_ext.kernels.device_trees_numba import walk_numba as form
        case "triton":
            from vllm_ext.kernels.device_trees_triton import walk_triton as form
        case _:
            from vllm_ext.kernels.device_trees_ref import walk_ref as form
    form(
        row_start, slots, tokens, positions, parents, sampled, invalid, prefill_len, seq_lens, walked, totals
    )
