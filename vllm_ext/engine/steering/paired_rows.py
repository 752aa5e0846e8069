# SPDX-License-Identifier: Apache-2.0
"""Pairs in a runner: which rows of a step stand behind the same tokens of two prompts. No vLLM in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ext.engine import paired_requests


class PairedRows:
    """The requests of a batch that read another's answer behind a prompt of their own; see `engine.paired_requests`."""

    def __init__(self) -> None:
        self._pairs: dict[
            str, str
        ] = {}  # by primary's request id, also of those one of whom has not come yet
        self._primaries: dict[str, str] = {}  # by pair's request id
        # Batch indices of primaries and pairs that come to their next token in a step.
        self.pairs: list[tuple[int, int]] = []
        self.held: list[int] = []  # batch indices of those that come to it without the other

    def admit(self, request_id: str, params: Any) -> None:
        """A request has come."""
        if (primary := paired_requests.primary_of(params)) is not None:
            self._primaries[request_id], self._pairs[primary] = primary, request_id
        elif (pair := paired_requests.pair_of(params)) is not None:
            self._pairs[request_id] = pair

    def forget(self, request_id: str) -> None:
        """A request is gone."""
        self._pairs.pop(self._primaries.pop(request_id, request_id), None)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._pairs)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._primaries

    def begin(self, batch: Mapping[str, int], row_start: Sequence[int], ready: Sequence[bool]) -> list[int]:
        """Find them in a step.

        Args:
            batch: of vLLM's, index by request id.
            row_start: ``[num_requests + 1]`` where each one's rows with logits begin.
            ready: ``[num_requests]`` whether all its tokens have been read.

        Returns:
            ``[num_rows]``, of each row with logits its pair's; of those without pairs their own.
        """
        self.pairs, self.held = [], []
        rows = list(range(row_start[-1]))
        for primary_id, pair_id in self._pairs.items():
            primary, pair = batch.get(primary_id), batch.get(pair_id)
            here = [each for each in (primary, pair) if each is not None and ready[each]]
            if len(here) < 2 or primary is None or pair is None:
                self.held += here
                continue
            first, its = row_start[primary], row_start[pair]
            if (
                row_start[pair + 1] - its != row_start[primary + 1] - first
            ):  # the scheduler has cut one's drafts
                self.held += here
                continue
            self.pairs.append((primary, pair))
            rows[first : row_start[primary + 1]] = range(its, row_start[pair + 1])
        return rows
