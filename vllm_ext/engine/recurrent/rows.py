# SPDX-License-Identifier: Apache-2.0
"""The rows of a step as recurrent layers read them: what was accepted in the last step, then this step's trees.

A state cannot be taken back, so it stands at the last root. In the next step each layer first reads the rows that were
accepted behind that root again (their inputs lie in the convolution's state), then the new root, and keeps the state
that it has there; nodes start from it, and leave no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from vllm_ext.engine.tree_layout import StepTrees, offsets, starts
from vllm_ext.proposers.tree import Int32

Rows = torch.Tensor | slice  # int64, or all of a range


@dataclass(frozen=True, slots=True)
class RecurrentRows:
    """A step for one group of recurrent layers, instead of vLLM's metadata; before `over`, for all of them.

    Packed rows are, request after request, the pending ones and then those of the step. Requests are counted among
    those that decode; of one group there are their states instead.
    """

    own: Rows  # query rows of requests that decode
    row_start: torch.Tensor  # int32 [requests + 1] among ``own``
    parents: torch.Tensor  # int32 [rows] inside the request; -1 for roots
    pending: torch.Tensor  # int32 [requests, most] rows of the last step that were accepted behind its root
    num_pending: torch.Tensor  # int32 [requests]
    packed_start: torch.Tensor  # int32 [requests + 1]
    packed_parents: torch.Tensor  # int32 [packed rows]
    certain: torch.Tensor  # int32 [requests] packed rows that are accepted: the pending ones and the root
    verified: torch.Tensor  # int64 [rows] of ``own`` the places among the packed rows
    # Of all pending rows, int64: places among the packed rows, requests, rows of the last step.
    read: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    # Of all nodes, int64: places among ``own``, requests, rows of the step.
    kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    fresh: torch.Tensor | None  # int64: requests that have read nothing yet
    max_rows: int  # the most of a request, its pending ones left out
    # Of a group.
    blocks: Any = None  # int32 [requests] of each the state
    stock: Any = None  # vLLM's metadata of the other requests; None when there are none
    stock_rows: Rows | None = None

    @property
    def num_packed(self) -> int:
        """How many packed rows there are."""
        return len(self.packed_parents)

    def over(self, blocks: torch.Tensor, stock: Any = None, stock_rows: Rows | None = None) -> RecurrentRows:
        """The step for a group of layers.

        Args:
            blocks: int32 ``[requests]`` of each its state.
            stock: vLLM's metadata of the other requests.
            stock_rows: their query rows.
        """
        states = blocks.to(torch.int64)
        (places, of_pending, last), (nodes, of_nodes, rows) = self.read, self.kept
        return replace(
            self,
            read=(places, states[of_pending], last),
            kept=(nodes, states[of_nodes], rows),
            fresh=None if self.fresh is None else states[self.fresh],
            blocks=blocks,
            stock=stock,
            stock_rows=stock_rows,
        )


@dataclass(slots=True)
class Pending:
    """Of each request the rows of its last step that were accepted, until its next one."""

    _rows: dict[str, tuple[int, list[int]]] = field(
        default_factory=dict
    )  # the context that they lead to, too

    def note(self, request_ids: Sequence[str], trees: StepTrees) -> None:
        """A step was verified."""
        for i, (request_id, path) in enumerate(zip(request_ids, trees.accepted, strict=True)):
            self._rows[request_id] = int(trees.context[i]) + 1 + len(path), path

    def take(self, request_id: str, context: int) -> list[int]:
        """The accepted rows; none if the request was not verified up to there: it was preempted, or is new."""
        reached, rows = self._rows.pop(request_id, (-1, []))
        return rows if reached == context else []

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._rows.pop(request_id, None)


def decoding(trees: StepTrees) -> Int32:
    """Batch indices of the requests whose rows go by our kernels: all are verified, and there is a state."""
    found = np.array(trees.decoding, dtype=np.int32)
    return found[trees.context[found] > 0]


def recurrent_rows(
    trees: StepTrees, ours: Int32, pending: Sequence[Sequence[int]], device: torch.device
) -> RecurrentRows:
    """A step of some requests.

    Args:
        trees: of the whole batch.
        ours: batch indices, ascending.
        pending: of each of these the rows of its last step that were accepted behind the root.
        device: of the states.
    """
    num_rows = np.diff(trees.row_start)[ours]
    num_pending = np.array([len(rows) for rows in pending], dtype=np.int32)
    start, packed_start = starts(num_rows), starts(num_rows + num_pending)
    parents = np.concatenate([trees.parents[trees.rows(i)] for i in ours]).astype(np.int32)
    offset = offsets(num_rows)
    behind = np.repeat(num_pending, num_rows)  # of each row the pending rows before its root
    verified = np.repeat(packed_start[:-1], num_rows) + behind + offset
    packed_parents = offsets(num_rows + num_pending) - 1
    packed_parents[verified] = parents + behind
    table = np.zeros((len(ours), max(1, num_pending.max())), dtype=np.int32)
    for i, rows in enumerate(pending):
        table[i, : len(rows)] = rows
    nodes = np.flatnonzero(offset)
    owner = np.arange(len(ours))
    query = np.repeat(trees.query_row[ours], num_rows) + offset

    def to(array: Any, dtype: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=dtype)).to(device)

    def index(array: Any) -> torch.Tensor:
        return to(array, np.int64)

    return RecurrentRows(
        own=as_rows(query, index),
        row_start=to(start, np.int32),
        parents=to(parents, np.int32),
        pending=to(table, np.int32),
        num_pending=to(num_pending, np.int32),
        packed_start=to(packed_start, np.int32),
        packed_parents=to(packed_parents, np.int32),
        certain=to(num_pending + 1, np.int32),
        verified=index(verified),
        read=(
            index(np.repeat(packed_start[:-1], num_pending) + offsets(num_pending)),
            index(np.repeat(owner, num_pending)),
            index(np.concatenate([np.asarray(rows, dtype=np.int64) for rows in pending])),
        ),
        kept=(index(nodes), index(np.repeat(owner, num_rows)[nodes]), index(offset[nodes])),
        fresh=None,
        max_rows=int(num_rows.max()),
    )


def as_rows(rows: Any, index: Callable[[Any], torch.Tensor]) -> Rows:
    """A slice where ascending rows lie in a range, else what ``index`` makes of them."""
    if len(rows) == rows[-1] - rows[0] + 1:
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return index(rows)
