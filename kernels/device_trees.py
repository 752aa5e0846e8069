# SPDX-License-Identifier: Apache-2.0
"""Draft trees that never leave the device: growing them, laying them out as rows, walking them.

A *slot* is where an engine keeps one request; its tree has ``nodes`` nodes at most, in buffers of fixed size that a
captured graph can read. Row 0 is the root, row ``j`` node ``j - 1``. Rows without a node are *padding*: their parent
is -1, so they see the context and themselves, nobody is their child, and no walk can get to them.
"""

from __future__ import annotations

from typing import NamedTuple

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


class RecycledTable(NamedTuple):
    """What followed which token. The last row belongs to no token: what is written for none goes there."""

    successors: torch.Tensor  # int32 [vocab + 1, width] best first, EMPTY behind the last one
    classes: torch.Tensor  # int32 [vocab + 1, width] of each entry's share of its row; 0: from no logits
    newest: (
        torch.Tensor
    )  # int64 [vocab + 1] EMPTY between calls: which of several rows of one token is written

    @classmethod
    def empty(cls, vocab_size: int, width: int, device: torch.device) -> RecycledTable:
        """A table that knows nothing."""
        return cls(
            torch.full((vocab_size + 1, width), EMPTY, dtype=torch.int32, device=device),
            torch.zeros((vocab_size + 1, width), dtype=torch.int32, device=device),
            torch.full((vocab_size + 1,), EMPTY, dtype=torch.int64, device=device),
        )


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


def grow(
    table: RecycledTable,
    estimates: torch.Tensor,
    roots: torch.Tensor,
    slots: torch.Tensor,
    chains: torch.Tensor,
    max_depths: torch.Tensor,
    template: torch.Tensor | None,
    trees: SlotTrees,
    tokens: torch.Tensor,
    backend: Backend = "auto",
) -> None:
    """Grow a tree from each root: open the newest node, then take the most probable of all unopened children.

    A child's own chance is ``estimates[class of its entry, depth - 1]``, at greater depths the last one; of equally
    probable children the one whose parent came first is taken, then the one of the lower rank. A tree ends when no
    child has a chance above 0 that is no deeper than allowed.

    Args:
        table: as `record` wrote it.
        estimates: float32 ``[classes, depths]``.
        roots: int64 ``[slots]`` the last token of each slot.
        slots: int64 ``[requests]`` whose trees are grown, no two alike.
        chains: int32 ``[slots]`` not 0: consider the newest node's children alone.
        max_depths: int32 ``[slots]`` deepest node.
        template: int32 ``[positions, width]``: position 0 is the root, an entry the position of the child of that
            rank, -1 where there is none; None: any shape.
        trees: written to at ``slots``.
        tokens: int64 ``[requests, nodes]``, written to: of padding the root's.
        backend: "auto" is triton on CUDA, else torch.
    """
    if _form(backend, tokens) == "triton":
        from vllm_ext.kernels.device_trees_triton import grow_triton as form
    else:
        from vllm_ext.kernels.device_trees_ref import grow_ref as form
    form(table, estimates, roots, slots, chains, max_depths, template, trees, tokens)


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
        backend: "auto" is triton on CUDA, else torch.
    """
    if _form(backend, positions) == "triton":
        from vllm_ext.kernels.device_trees_triton import lay_out_triton as form
    else:
        from vllm_ext.kernels.device_trees_ref import lay_out_ref as form
    form(trees, slots, query_start, row_start, seq_lens, positions, layout)


def walk(
    row_start: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    sampled: torch.Tensor,
    emitted: torch.Tensor,
    num_emitted: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
    backend: Backend = "auto",
) -> None:
    """From each root on, go to the child that is what was sampled at its parent; stop where there is none.

    Args:
        row_start: int32 ``[requests + 1]``; rows of request i are ``row_start[i]:row_start[i + 1]``, root first.
        tokens: int64 ``[rows]`` each row's input token.
        parents: int32 ``[rows]`` offset of the parent row inside the request; -1: there is none.
        sampled: int64 ``[rows]`` what follows each row.
        emitted: int64 ``[requests, most]``, written to: what was sampled along the path, then 0.
        num_emitted: int32 ``[requests]``, written to: rows of the path.
        path: int32 ``[requests, most]``, written to: these rows as offsets, the root first; behind the last, their
            own place.
        accepted: int32 ``[rows]``, written to: 1 for rows of the path.
        backend: "auto" is triton on CUDA, else torch.
    """
    if _form(backend, tokens) == "triton":
        from vllm_ext.kernels.device_trees_triton import walk_triton as form
    else:
        from vllm_ext.kernels.device_trees_ref import walk_ref as form
    form(row_start, tokens, parents, sampled, emitted, num_emitted, path, accepted)


def record(
    table: RecycledTable,
    shares: torch.Tensor,
    tokens: torch.Tensor,
    priority: torch.Tensor,
    top_ids: torch.Tensor,
    top_logits: torch.Tensor,
) -> None:
    """Overwrite the rows of verified tokens. Of several rows of one token the one of the largest priority is written.

    An entry's class is 1 + the number of ``shares`` below its part of the softmax over its row's logits. Which row is
    written depends on no order of execution: tensor-parallel ranks must go on alike.

    Args:
        table: written to.
        shares: float32 ``[bounds]``, ascending.
        tokens: int64 ``[rows]``; those outside the vocabulary are skipped.
        priority: int64 ``[rows]``, at least 0 and no two alike; -1: the row is skipped.
        top_ids: int32 ``[rows, width]``, best first.
        top_logits: float32 ``[rows, width]``.
    """
    vocab = len(table.newest) - 1
    there = (tokens >= 0) & (tokens < vocab) & (priority >= 0)
    token = torch.where(there, tokens, vocab)
    table.newest.scatter_reduce_(0, token, priority, "amax")
    row = torch.where(there & (table.newest[token] == priority), token, vocab)
    share = torch.softmax(top_logits, 1)
    table.successors[row] = top_ids
    table.classes[row] = 1 + torch.bucketize(share, shares).to(torch.int32)
    table.newest.index_fill_(0, token, EMPTY)  # not by []: that copies the number from the host, and waits


def seed(table: RecycledTable, text: torch.Tensor) -> None:
    """Give each token of a text that has no successor yet the one that follows its last occurrence there.

    Args:
        table: written to.
        text: int32 ``[num_tokens]``, at least 2; those outside the vocabulary have no successor and are none.
    """
    vocab = len(table.newest) - 1
    tokens, successors = text[:-1].to(torch.int64), text[1:]
    there = (tokens >= 0) & (tokens < vocab) & (successors >= 0) & (successors < vocab)
    token = torch.where(there, tokens, vocab)
    place = torch.arange(len(token), device=token.device)
    table.newest.scatter_reduce_(0, token, place, "amax")
    first = there & (table.newest[token] == place) & (table.successors[token, 0] == EMPTY)
    row = torch.where(first, token, vocab)
    table.successors[row, 0] = successors
    table.classes[:, 0].index_fill_(0, row, 0)
    table.newest.index_fill_(0, token, EMPTY)


def _form(backend: Backend, tensor: torch.Tensor) -> Backend:
    """Whose form runs; there is none of numba's."""
    chosen = choose(backend, tensor)
    return "torch" if chosen == "numba" else chosen
