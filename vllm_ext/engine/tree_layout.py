# SPDX-License-Identifier: Apache-2.0
"""The draft trees of one step as vLLM's V1 runner lays them out: rows of the batch, positions and slots.

vLLM schedules a request's drafts as a flat list behind its last committed token (the root). Row j of a
request therefore has KV slot ``context + j``; what makes the list a tree is its rotary position,
``context + depth``, and that it attends to the context, its ancestors and itself only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ext.proposers.base import VerifiedRows, no_top
from vllm_ext.proposers.tree import DraftTree, Float32, Int32, ReadAgain, SampledDrafts, num_ancestors

NO_TOKEN = -1  # of rows that are no drafts: nothing that is sampled is that


@dataclass(slots=True)
class StepTrees:
    """One step's verified rows, request after request in batch order."""

    row_start: Int32  # [num_requests + 1] rows of request i are row_start[i]:row_start[i + 1], root first
    tokens: Int32  # [num_rows] each row's input token
    parents: Int32  # [num_rows] offset of the parent row inside the request; -1 for roots
    query_row: Int32  # [num_requests] where the root's row is in the step's query
    context: Int32  # [num_requests] committed tokens before the root
    branching: list[int]  # batch indices of the requests whose drafts are no chain
    decoding: list[
        int
    ]  # batch indices of the requests all of whose query rows are verified: no prompt among them
    # By batch index, what the verifier of a tree must know that was drawn. Row r + 1 is its node r.
    drawn: dict[int, SampledDrafts] = field(default_factory=dict)
    # By batch index, bool [num_nodes] of a chain: see `DraftTree.sure`. Those of which some are.
    sure: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)
    # By batch index, of a chain that is read twice; rows behind its drafts have no tokens.
    again: dict[int, ReadAgain] = field(default_factory=dict)
    accepted: list[list[int]] = field(default_factory=list)  # [num_requests] offsets of the accepted rows

    @classmethod
    def from_step(
        cls,
        request_ids: Sequence[str],
        num_drafts: Sequence[int],
        scheduled: Mapping[str, Sequence[int]],
        proposed: Mapping[str, DraftTree],
        query_start: Int32,
        num_scheduled: Int32,
        num_computed: Int32,
        input_ids: Int32,
    ) -> StepTrees:
        """Read the step off the runner's arrays.

        Args:
            request_ids: the batch.
            num_drafts: by batch index, drafts verified.
            scheduled: by request id, the drafts the scheduler let through.
            proposed: by request id, what we proposed. The scheduler may have cut it, which leaves a prefix
                and so a tree; anything else is read as a chain, which is always right, if slow.
            query_start: int32 ``[num_requests + 1]``.
            num_scheduled: int32 ``[num_requests]`` query rows of each request.
            num_computed: int32 ``[num_requests]`` tokens whose KV was there before the step.
            input_ids: int32 ``[num_query_rows]``.
        """
        num_rows = np.asarray(num_drafts, dtype=np.int32) + 1
        row_start = starts(num_rows)
        # A request's verified rows are the last ones of its query; earlier ones are prompt.
        query_row = query_start[1:] - num_rows
        offset = offsets(num_rows)
        parents = offset - 1
        branching = []
        drawn, sure, again = {}, {}, {}
        scratch: list[int] = []
        for index, request_id in enumerate(request_ids):
            tree = proposed.get(request_id)
            if tree is None or num_rows[index] == 1:
                continue
            drafts = scheduled[request_id]
            if (
                len(drafts) <= len(tree)
                and num_scheduled[index] == num_rows[index]
                and tree.tokens[: len(drafts)].tolist() == list(drafts)
            ):
                cut = tree.prefix(len(drafts))
                if not cut.is_chain:
                    parents[row_start[index] + 1 : row_start[index + 1]] = cut.parents + 1
                    branching.append(index)
                if cut.drawn is not None:
                    drawn[index] = cut.drawn
                if cut.again is not None:
                    scratch += range(row_start[index] + 1 + cut.again.num_drafts, row_start[index + 1])
                    if len(cut) == len(tree):
                        again[index] = cut.again
                if cut.sure is not None and cut.sure.any():
                    sure[index] = cut.sure
        tokens = input_ids[np.repeat(query_row, num_rows) + offset]
        tokens[scratch] = NO_TOKEN
        return cls(
            row_start=row_start,
            tokens=tokens,
            parents=parents,
            query_row=query_row,
            context=num_computed + num_scheduled - num_rows,
            branching=branching,
            drawn=drawn,
            sure=sure,
            again=again,
            decoding=np.flatnonzero(num_scheduled == num_rows).tolist(),
        )

    @property
    def has_no_drafts(self) -> bool:
        """Whether each request has its root alone."""
        return len(self.parents) == len(self.query_row)

    def rows(self, request: int) -> slice:
        """The rows of one request."""
        return slice(int(self.row_start[request]), int(self.row_start[request + 1]))

    def verified(
        self,
        request_ids: Sequence[str],
        emitted: Sequence[Sequence[int]],
        top: tuple[Int32, Float32] | None,
        log_total: Float32 | None = None,
    ) -> VerifiedRows:
        """What the step has found out, for a proposer.

        Args:
            request_ids: the batch.
            emitted: by batch index, the tokens each request put out.
            top: of each row the likeliest tokens and their logits, where they are wanted.
            log_total: float32 ``[num_rows]``, where it is wanted; see `VerifiedRows`.
        """
        accepted = self.parents < 0
        for start, path, tokens in zip(self.row_start.tolist(), self.accepted, emitted, strict=False):
            accepted[[start + row for row in path[: len(tokens)]]] = True
        ids, logits = top or no_top(len(self.tokens))
        return VerifiedRows(
            request_ids, self.row_start, self.tokens, self.parents, accepted, ids, logits, emitted, log_total
        )

    def branching_rows(self) -> tuple[Int32, Int32]:
        """Query rows of the branching requests' nodes and their rotary positions, both int32 ``[num]``."""
        query_rows, positions = [], []
        for request in self.branching:
            parents = self.parents[self.rows(request)]
            query_rows.append(self.query_row[request] + np.arange(len(parents), dtype=np.int32))
            positions.append(self.context[request] + num_ancestors(parents))
        return np.concatenate(query_rows), np.concatenate(positions)

    def moves(self) -> tuple[Int32, Int32]:
        """Query rows whose KV has to move, and the query rows whose slots it has to move to.

        The k-th accepted row of a request belongs into the slot of row k. Int32 ``[num_moves]`` both.
        """
        source, target = [], []
        for request in self.branching:
            for place, row in enumerate(self.accepted[request], 1):
                if row != place:
                    source.append(self.query_row[request] + row)
                    target.append(self.query_row[request] + place)
        return np.array(source, dtype=np.int32), np.array(target, dtype=np.int32)


def starts(lengths: Any) -> Int32:
    """Where each of so many begins, and the end."""
    found = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=found[1:])
    return found


def offsets(lengths: Any) -> Int32:
    """``[0, 1, ..., n - 1]`` for each length n, one after the other."""
    return np.arange(lengths.sum(), dtype=np.int32) - np.repeat(starts(lengths)[:-1], lengths)
