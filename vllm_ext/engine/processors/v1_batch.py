# SPDX-License-Identifier: Apache-2.0
"""The batch that a logits processor of V1's interface is told of, where vLLM's V2 runner has slots instead.

Places are given out as V1's own batch does: a new request takes the lowest that is free, then the last ones move into
those that are left. The lists of output tokens grow by one token for each that is sampled, in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, BatchUpdateBuilder, MoveDirectionality


@dataclass(frozen=True, slots=True)
class Member:
    """A request of the batch."""

    name: str
    slot: int
    params: Any
    prompt_len: int
    output: list[int]  # processors hold it


class V1Batch:
    """All requests that have a slot."""

    def __init__(self) -> None:
        self.members: list[Member] = []  # by place
        self._places: dict[int, int] = {}  # by slot

    def change(self, slots: Mapping[str, int], new: Sequence[Any]) -> BatchUpdate | None:
        """Let go of requests and take in others, and say so in V1's way; None: nothing has changed.

        Args:
            slots: of all requests, by id, new ones too.
            new: vLLM's ``NewRequestData`` of those that have come, or have come back.
        """
        members, builder = self.members, BatchUpdateBuilder()
        coming = {request.req_id for request in new}
        gone = {
            place for place, member in enumerate(members) if member.name in coming or member.name not in slots
        }
        for place in gone:
            builder.removed_append(place)
        for request in new:
            member = Member(
                request.req_id,
                slots[request.req_id],
                request.sampling_params,
                request.prompt_len,
                list(request.prefill_token_ids[request.prompt_len :]),
            )
            place = builder.pop_removed()
            if place is None:
                place = len(members)
                members.append(member)
            else:
                gone.discard(place)
                members[place] = member
            builder.added.append((place, member.params, request.prompt_token_ids, member.output))
        while gone:
            last = len(members) - 1
            moving = members.pop()
            if last in gone:
                gone.discard(last)
                continue
            place = builder.pop_removed()
            assert place is not None
            gone.discard(place)
            members[place] = moving
            builder.moved.append((last, place, MoveDirectionality.UNIDIRECTIONAL))
        self._places = {member.slot: place for place, member in enumerate(members)}
        return builder.get_and_reset(len(members))

    def place(self, slot: int) -> int:
        """Of a request that is there."""
        return self._places[slot]

    def grow(self, ctx: Any, slots: Collection[int]) -> dict[int, int]:
        """Add what stands before the rows that are sampled to the lists of output tokens, and wait for it.

        A request's rows are a chain, of which the last is sampled: its own token is the last one before it. That is the
        one that was sampled for the request's last row, so a list is never more than one token behind.

        Args:
            ctx: vLLM's ``LogitsContext``.
            slots: whose lists; none of them may be left out in any step.

        Returns:
            By place, the row that is sampled.
        """
        layout = torch.stack(
            [
                each.to(torch.int64)
                for each in (ctx.expanded_idx_mapping, ctx.expanded_local_pos, ctx.input_ids, ctx.pos)
            ]
        )
        row_slots, offsets, tokens, positions = layout.tolist()
        found = {}
        for row, slot in enumerate(row_slots):
            if slot not in slots or row_slots[row + 1 : row + 2] == [slot]:
                continue
            if offsets[row] and tokens[row] < 0:
                continue  # its path has ended
            place = self._places[slot]
            member = self.members[place]
            missing = positions[row] + 1 - member.prompt_len - len(member.output)
            assert missing <= 1, f"{missing} tokens of request {member.name} were not seen"
            if missing == 1:
                member.output.append(tokens[row])
            found[place] = row
        return found
