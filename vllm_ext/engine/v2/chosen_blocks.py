# SPDX-License-Identifier: Apache-2.0
"""Blocks that requests choose by what their last tokens attend to, on the V2 runner: when their prompts end, or again
and again.

The step that reads these tokens makes their weights (`vllm_ext.kernels.block_mass`) and sends them to the host; of a
tree those of all nodes, and with them the accepted path. Before the next step is laid out the request's policy chooses
there: from then on its rows read some blocks no more, and these go to the scheduler with that step's tokens
(`scheduler.evicted_blocks`). Only steps behind such a token wait, for a copy that the step before has begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size

from vllm_ext.codecs.base import KVCodec
from vllm_ext.codecs.selection import EvictionPolicy, Float32
from vllm_ext.engine.recurrent.device_rows import to_device
from vllm_ext.engine.v2.speculators.base import to_host
from vllm_ext.kernels.block_mass import AskedRows, AskedTrees
from vllm_ext.kernels.device_trees import RowLayout, Walked
from vllm_ext.kernels.kept_blocks import NEVER, KeptParts
from vllm_ext.proposers.tree import Int32


class Asked(NamedTuple):
    """Rows of a request that are asked, one after the other in the step."""

    name: str
    place: int  # of the request in the batch
    first: int  # row of the step
    begin: int  # position of that row; of a tree its root's
    rows: int
    is_tree: bool


class Pending(NamedTuple):
    """What a step has sent to the host."""

    asked: list[Asked]
    masses: torch.Tensor  # float32 [asked rows, blocks]
    paths: torch.Tensor | None  # int32 [requests, 1 + most rows]: how many rows of a tree stand, and which
    event: Any


class Choices:
    """Of all requests.

    Args:
        codec: of the cache.
        slots: how many requests run at once.
        width: blocks of a table.
        device: of the tables.
    """

    def __init__(self, codec: KVCodec, slots: int, width: int, device: torch.device) -> None:
        # int32 [slots, width]; see `vllm_ext.kernels.kept_blocks.keep_blocks`.
        self.gone = torch.full((slots, width), NEVER, dtype=torch.int32, device=device)
        self._codec, self._device = codec, device
        self._policies: dict[str, EvictionPolicy] = {}
        self._slots: dict[str, int] = {}
        self._asked: list[Asked] = []
        self._mass: torch.Tensor | None = None
        self._pending: Pending | None = None
        self._evicted: dict[str, list[tuple[int, list[int]]]] = {}

    @property
    def width(self) -> int:
        """Blocks of a table."""
        return self.gone.shape[1]

    def admit(self, slot: int, request: Any) -> None:
        """A request has got a slot; one that was preempted reads what it has chosen."""
        name = request.req_id
        if name not in self._policies:
            policy = self._codec.choice(request.prompt_len)
            assert policy is not None
            self._policies[name] = policy
        self._slots[name] = slot
        self._show(name)

    def drop(self, name: str) -> None:
        """A request has lost its slot, for a while or for good."""
        self._slots.pop(name, None)

    def finish(self, names: Iterable[str]) -> None:
        """Requests are over."""
        for name in names:
            self._policies.pop(name, None)

    def cuts(self, names: Iterable[str]) -> list[list[int]]:
        """Of each request the positions from which on rows read less, ascending."""
        policies = (self._policies.get(name) for name in names)  # none of those that are made up, to warm up
        return [[] if policy is None else [first for first, _ in policy.evicted] for policy in policies]

    def ask(
        self,
        input_batch: Any,
        block_tables: Sequence[torch.Tensor],
        kept: Sequence[KeptParts],
        part_start: Int32,
        layout: RowLayout | None,
    ) -> list[tuple[AskedRows, ...]]:
        """By KV group, the rows of a step whose weights are wanted; none: there are no such rows.

        Args:
            input_batch: the step's.
            block_tables: int32 ``[requests, blocks]`` each, all blocks.
            kept: by KV group, the blocks that parts read.
            part_start: int32 ``[parts + 1]`` rows of the step before each part.
            layout: of the step's trees, whose requests come first; None: there are none.
        """
        self._asked, self._mass = [], None
        of_prompts: list[Asked] = []
        of_answers: list[Asked] = []
        for place, name in enumerate(input_batch.req_ids):
            if name in self._policies:  # else it is made up, to warm up
                asked = self._asked_of(input_batch, place, layout is not None)
                if asked is not None:
                    in_prompt = asked.begin < self._policies[name].prompt_len
                    (of_prompts if in_prompt else of_answers).append(asked)
        self._asked = of_prompts + of_answers
        if not self._asked:
            return []
        self._mass = torch.zeros(sum(asked.rows for asked in self._asked), self.width, device=self._device)
        number = sum(asked.rows for asked in of_prompts)
        by_group: list[list[AskedRows]] = [[] for _ in block_tables]
        if of_prompts:
            place, row, seen = self._rows_of(of_prompts)
            for group, table in zip(by_group, block_tables, strict=True):
                group.append(AskedRows(table, place, row, seen, self._mass[:number]))
        if of_answers:
            part, row, seen, trees = self._nodes_of(of_answers, input_batch, kept[0], part_start, layout)
            for group, each in zip(by_group, kept, strict=True):
                group.append(AskedRows(each.table, part, row, seen, self._mass[number:], trees))
        return [tuple(group) for group in by_group]

    def _asked_of(self, input_batch: Any, place: int, has_trees: bool) -> Asked | None:
        """The rows of a request that are asked; None: there are none."""
        name, start = input_batch.req_ids[place], int(input_batch.query_start_loc_np[place])
        begin, rows = (
            int(each[place])
            for each in (input_batch.num_computed_tokens_np, input_batch.num_scheduled_tokens)
        )
        drafts = input_batch.num_draft_tokens_per_req
        is_tree = has_trees and drafts is not None and bool(drafts[place] > 0)  # numpy
        # Nodes have the place of an only path at most.
        watched = self._policies[name].watched(begin, begin + rows)
        if not watched:
            return None
        if is_tree:  # which of them stand, and where, is not known yet
            return Asked(name, place, start, begin, rows, is_tree)
        return Asked(name, place, start + watched[0] - begin, watched[0], len(watched), is_tree)

    def _rows_of(self, found: Sequence[Asked]) -> torch.Tensor:
        """int32 ``[3, rows]``: of a prompt's rows whose each is, its place in the query, and what it sees."""
        each = [
            (asked.place, asked.first + i, asked.begin + i + 1) for asked in found for i in range(asked.rows)
        ]
        return self._columns(each)

    def _columns(self, rows: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """int32 ``[numbers of a row, rows]``, contiguous."""
        return to_device(np.ascontiguousarray(np.array(rows, np.int32).T), torch.int32, self._device)

    def _nodes_of(
        self,
        found: Sequence[Asked],
        input_batch: Any,
        kept: KeptParts,
        part_start: Int32,
        layout: RowLayout | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AskedTrees | None]:
        """The same of rows behind a prompt, by part; what they see is known on the device alone."""
        each = []
        for asked in found:
            for row in range(asked.first, asked.first + asked.rows):
                part = int(np.searchsorted(part_start, row, "right")) - 1
                # Rows of the part behind it, which it does not see; of a tree the row itself, too, and what is before.
                behind = asked.rows if asked.is_tree else int(part_start[part + 1]) - 1 - row
                first = int(input_batch.cu_num_logits_np[asked.place]) - asked.first
                node = first + row if asked.is_tree else -1
                each.append((part, row, behind, node))
        part, row, behind, node = self._columns(each)
        ends = kept.seq_lens[part]
        if layout is None:
            return part, row, ends - behind, None
        seen = torch.where(node >= 0, ends, ends - behind)
        return part, row, seen, AskedTrees(ends - behind, layout.bits[node.clamp(min=0)])

    def collect(self, walked: Walked | None) -> None:
        """The step is under way: its weights are to be sent.

        Args:
            walked: of its trees; None: there are none.
        """
        if self._mass is None:
            return
        mass, self._mass = self._mass, None
        if get_tensor_model_parallel_world_size() > 1:
            mass = tensor_model_parallel_all_reduce(mass)
        paths = None
        if walked is not None and any(asked.is_tree for asked in self._asked):
            paths, _ = to_host(torch.cat([walked.num_emitted[:, None], walked.path], 1))
        masses, event = to_host(mass)
        self._pending = Pending(self._asked, masses, paths, event)

    def settle(self) -> None:
        """Before the next step is laid out: choose by what has come."""
        if self._pending is None:
            return
        (all_asked, masses, paths, event), self._pending = self._pending, None
        if event is not None:
            event.synchronize()
        arrived, start = masses.numpy(), 0
        for asked in all_asked:
            of_request, start = arrived[start : start + asked.rows], start + asked.rows
            policy = self._policies.get(asked.name)
            if policy is None:
                continue  # it has ended meanwhile
            if asked.is_tree:
                assert paths is not None
                number, *path = paths[asked.place].numpy()
                of_request = of_request[path[:number]]
            end = asked.begin + len(of_request)
            for position in policy.watched(asked.begin, end):
                policy.take(position, self._by_block(policy, position, of_request[position - asked.begin]))
            if evicted := policy.settle(end):
                self._evicted.setdefault(asked.name, []).extend(evicted)
                self._show(asked.name)

    def _by_block(self, policy: EvictionPolicy, position: int, mass: Float32) -> Float32:
        """float32 ``[blocks before the row's own]``, as on V1, of what lies in a row's table."""
        read, block = policy.read_at(position), position // self._codec.block_size
        if isinstance(read, int):
            return mass[:block].copy()
        found = np.zeros(block, np.float32)
        found[[*read]] = mass[: len(read)]
        return found

    def take_evicted(self) -> dict[str, list[tuple[int, list[int]]]]:
        """What has been chosen since this was asked last; see `EvictionPolicy.settle`."""
        evicted, self._evicted = self._evicted, {}
        return evicted

    def _show(self, name: str) -> None:
        """Let the device know what a request reads no more, if it has a slot."""
        slot = self._slots.get(name)
        if slot is None:
            return
        gone = np.full(self.width, NEVER, np.int32)
        for first, blocks in self._policies[name].evicted:
            gone[blocks] = first
        self.gone[slot] = to_device(gone, torch.int32, self._device)
