# SPDX-License-Identifier: Apache-2.0
"""Twins in the V1 runner: which rows of a step stand behind the same tokens of two prompts. No vLLM in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ext.engine import paired_requests


class Twins:
    """The requests of a batch that read another's answer behind a prompt of their own; see `engine.paired_requests`."""

    def __init__(self) -> None:
        self._twins: dict[str, str] = {}  # by owner's request id, also of those one of whom has not come yet
        self._owners: dict[str, str] = {}  # by twin's request id
        # Batch indices of owners and twins that come to their next token in a step.
        self.pairs: list[tuple[int, int]] = []
        self.held: list[int] = []  # batch indices of those that come to it without the other

    def admit(self, request_id: str, params: Any) -> None:
        """A request has come."""
        if (owner := paired_requests.owner_of(params)) is not None:
            self._owners[request_id], self._twins[owner] = owner, request_id
        elif (twin := paired_requests.twin_of(params)) is not None:
            self._twins[request_id] = twin

    def forget(self, request_id: str) -> None:
        """A request is gone."""
        self._twins.pop(self._owners.pop(request_id, request_id), None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._owners

    def begin(self, batch: Mapping[str, int], row_start: Sequence[int], ready: Sequence[bool]) -> list[int]:
        """Find them in a step.

        Args:
            batch: of vLLM's, index by request id.
            row_start: ``[num_requests + 1]`` where each one's rows with logits begin.
            ready: ``[num_requests]`` whether all its tokens have been read.

        Returns:
            ``[num_rows]``, of each row with logits its twin's; of those without twins their own.
        """
        self.pairs, self.held = [], []
        rows = list(range(row_start[-1]))
        for owner_id, twin_id in self._twins.items():
            owner, twin = batch.get(owner_id), batch.get(twin_id)
            here = [each for each in (owner, twin) if each is not None and ready[each]]
            if len(here) < 2 or owner is None or twin is None:
                self.held += here
                continue
            first, its = row_start[owner], row_start[twin]
            if (
                row_start[twin + 1] - its != row_start[owner + 1] - first
            ):  # the scheduler has cut one's drafts
                self.held += here
                continue
            self.pairs.append((owner, twin))
            rows[first : row_start[owner + 1]] = range(its, row_start[twin + 1])
        return rows
