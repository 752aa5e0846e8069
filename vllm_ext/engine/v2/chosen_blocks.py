# SPDX-License-Identifier: Apache-2.0
"""Blocks that requests choose when their prompts end, by what the last tokens attend to, on the V2 runner.

The step that reads these tokens makes their weights (`vllm_ext.kernels.block_mass`) and sends them to the host. Before
the next one is laid out the request's policy chooses there: from then on its rows read a list, and what they read no
more goes to the scheduler with that step's tokens (`scheduler.evicted_blocks`). Only steps behind a prompt's end wait,
for a copy that the step before has begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size

from vllm_ext.codecs.base import KVCodec
from vllm_ext.codecs.selection import EvictionPolicy
from vllm_ext.engine.recurrent.device_rows import to_device
from vllm_ext.engine.v2.speculators.base import to_host
from vllm_ext.kernels.block_mass import AskedRows
from vllm_ext.kernels.kept_blocks import NEVER, KeptLists
from vllm_ext.proposers.tree import Int32


class Asked(NamedTuple):
    """A row of a step, and whose it is."""

    name: str
    position: int


class Choices:
    """Of all requests.

    Args:
        codec: of the cache; it chooses once, when a prompt has been read.
        slots: how many requests run at once.
        width: blocks of a table.
        device: of the tables.
    """

    def __init__(self, codec: KVCodec, slots: int, width: int, device: torch.device) -> None:
        self.lists = KeptLists.of_size(slots, width, device)
        self.first: Int32 = np.full(slots, NEVER, np.int32)  # as in `lists`, on the host
        self._codec, self._device = codec, device
        self._policies: dict[str, tuple[EvictionPolicy, int]] = {}  # with the prompt's length
        self._slots: dict[str, int] = {}
        self._asked: list[Asked] = []
        self._mass: torch.Tensor | None = None
        self._pending: tuple[list[Asked], torch.Tensor, Any] | None = None
        self._evicted: dict[str, list[tuple[int, list[int]]]] = {}

    def admit(self, slot: int, request: Any) -> None:
        """A request has got a slot; one that was preempted reads what it has chosen."""
        name = request.req_id
        if name not in self._policies:
            policy = self._codec.choice(request.prompt_len)
            assert policy is not None
            self._policies[name] = policy, request.prompt_len
        self._slots[name] = slot
        self._show(name)

    def drop(self, name: str) -> None:
        """A request has lost its slot, for a while or for good."""
        self._slots.pop(name, None)

    def finish(self, names: Iterable[str]) -> None:
        """Requests are over."""
        for name in names:
            self._policies.pop(name, None)

    def ask(self, input_batch: Any, block_tables: Sequence[torch.Tensor]) -> list[AskedRows]:
        """By KV group, the rows of a step whose weights are wanted; none: there are no such rows."""
        self._asked, self._mass = [], None
        places, rows = [], []
        for place, name in enumerate(input_batch.req_ids):
            if name not in self._policies:
                continue  # made up, to warm up
            begin = int(input_batch.num_computed_tokens_np[place])
            end = begin + int(input_batch.num_scheduled_tokens[place])
            for position in self._policies[name][0].watched(begin, end):
                self._asked.append(Asked(name, position))
                places.append(place)
                rows.append(int(input_batch.query_start_loc_np[place]) + position - begin)
        if not rows:
            return []
        seen = [asked.position + 1 for asked in self._asked]
        whose, row, sees = to_device(np.array([places, rows, seen], np.int32), torch.int32, self._device)
        self._mass = torch.zeros(len(rows), block_tables[0].shape[1], device=self._device)
        return [AskedRows(table, whose, row, sees, self._mass) for table in block_tables]

    def collect(self) -> None:
        """The step is under way: its weights are to be sent."""
        if self._mass is not None:
            mass, self._mass = self._mass, None
            if get_tensor_model_parallel_world_size() > 1:
                mass = tensor_model_parallel_all_reduce(mass)
            self._pending = self._asked, *to_host(mass)

    def settle(self) -> None:
        """Before the next step is laid out: choose by what has come."""
        if self._pending is None:
            return
        (asked, masses, event), self._pending = self._pending, None
        if event is not None:
            event.synchronize()
        for (name, position), mass in zip(asked, masses.numpy(), strict=True):
            if name not in self._policies:
                continue  # it has ended meanwhile
            policy, prompt_len = self._policies[name]
            # Of the blocks before the row's own, as on V1.
            policy.take(position, mass[: position // self._codec.block_size].copy())
            if position + 1 == prompt_len:
                if evicted := policy.settle(prompt_len):
                    self._evicted[name] = evicted
                self._show(name)

    def take_evicted(self) -> dict[str, list[tuple[int, list[int]]]]:
        """What has been chosen since this was asked last; see `EvictionPolicy.settle`."""
        evicted, self._evicted = self._evicted, {}
        return evicted

    def _show(self, name: str) -> None:
        """Let the device know what a request reads behind its prompt, if it has a slot."""
        slot = self._slots.get(name)
        if slot is None:
            return
        policy, prompt_len = self._policies[name]
        read = policy.read_at(prompt_len)
        block = prompt_len // self._codec.block_size
        whole = isinstance(read, int) or len(read) == block
        self.first[slot] = NEVER if whole else prompt_len
        blocks = [] if isinstance(read, int) else [*read]
        values = np.array([self.first[slot], len(blocks), block - len(blocks), *blocks], np.int32)
        moved = to_device(values, torch.int32, self._device)
        self.lists.first[slot : slot + 1] = moved[:1]
        self.lists.head[slot : slot + 1] = moved[1:2]
        self.lists.skipped[slot : slot + 1] = moved[2:3]
        self.lists.blocks[slot, : len(blocks)] = moved[3:]
