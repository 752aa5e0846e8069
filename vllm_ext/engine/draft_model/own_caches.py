# SPDX-License-Identifier: Apache-2.0
"""A model that drafts with caches of its own in vLLM's V1 worker: they lie in the same blocks as the target's.

Its attention layers get caches with the target's, and their slots are found by the same block tables: what is shared by
prefix caching, freed or preempted is so for both. What keeps it in step:

- Of a full block the target's KV may be there and the model's not, whatever shares the block. It is known which
  blocks are right: those that it has read to their end since vLLM gave them out. Of each request, in turn, how many
  tokens are: up to the last full right block, or the last one that was read for this request.
- Draft nodes lie behind the committed tokens, in slots that the scheduler reserves (`scheduler`). They are read again
  once they are committed: one row more in a pass that takes place anyway, and nothing has to move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_ext.engine.draft_model.passes import DraftPasses, stacked
from vllm_ext.engine.tree_layout import offsets, starts
from vllm_ext.proposers.draft_model import Rows
from vllm_ext.proposers.tree import Int32


class OwnCaches(DraftPasses):
    """See the module.

    Args:
        vllm_config: the target's.
        what: how errors name the model.
    """

    def __init__(self, vllm_config: Any, what: str) -> None:
        super().__init__(vllm_config, what)
        self.model: Any = None
        self._known: dict[str, int] = {}  # by request id, tokens read for it
        self._right = np.zeros(0, bool)  # by block of vLLM's, whether it was read to its end
        self._block_size = 0
        self._roots: dict[str, tuple[Any, Any]] = {}  # by request id, the distribution after its last token

    def bind(self, runner: Any) -> None:
        """See `DraftPasses`."""
        super().bind(runner)
        self._right = np.zeros(runner.kv_cache_config.num_blocks, bool)
        self._block_size = runner.kv_cache_config.kv_cache_groups[self._group_id].kv_cache_spec.block_size

    def begin_step(self, scheduler_output: Any) -> None:
        """See `DraftPasses`: note which blocks are given out; what the prefix cache gave stays as it is."""
        for new in scheduler_output.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids, new.num_computed_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, computed, new_blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                self._begin(request_id, new_blocks, computed)
            elif new_blocks is not None:
                self._right[new_blocks[self._group_id]] = False

    def _begin(self, request_id: str, blocks: Any, computed: int) -> None:
        """A request comes, or comes back: the blocks behind the prefix cache's are its own."""
        self._known[request_id] = 0
        self._right[blocks[self._group_id][computed // self._block_size :]] = False

    def _blocks(self, request_id: str) -> list[int]:
        blocks: list[int] = self._runner.requests[request_id].block_ids[self._group_id]
        return blocks

    def _fill(self, request_id: str, first: int, last: int) -> None:
        """Its tokens from ``first`` until before ``last`` are read; those before were."""
        self._right[self._blocks(request_id)[first // self._block_size : last // self._block_size]] = True

    def _read_of(self, request_id: str) -> int:
        """How many of its tokens are read, also for another that shares its blocks."""
        known = self._known[request_id]
        blocks, place = self._blocks(request_id), known // self._block_size
        while place < len(blocks) and self._right[blocks[place]]:
            place += 1
        return max(known, place * self._block_size)

    def forget(self, request_id: str) -> None:
        """See `DraftPasses`."""
        super().forget(request_id)
        self._known.pop(request_id, None)
        self._roots.pop(request_id, None)

    def roots(self, request_ids: Sequence[str]) -> Rows:
        """See `DraftModel`."""
        return stacked([self._roots[request_id] for request_id in request_ids])

    def _pass(
        self,
        slots: Any,
        start: Int32,
        end: Int32,
        inputs: Callable[[Any, Int32], Int32],
        read_as: Callable[[Any, Int32], Int32] = lambda _, places: places,
    ) -> tuple[Any, Int32]:
        """One pass over stretches of committed tokens, one of a request.

        Args:
            slots: int ``[num_parts]`` batch indices.
            start: int32 ``[num_parts]`` the first token of each.
            end: likewise, behind the last.
            inputs: of rows' batch indices and places in their requests, the tokens that the model is given there.
            read_as: likewise, the places that rows stand for, where it is not the one of their slot.

        Returns:
            what the model puts out, and int32 ``[num_parts + 1]`` where each part begins in it.
        """
        lengths = end - start
        query_start = starts(lengths)
        owner = np.repeat(np.arange(len(slots)), lengths)
        places = offsets(lengths) + start[owner]
        kv_slots = self._kv_slots(slots[owner], places)
        positions = read_as(slots[owner], places)
        common = replace(
            self._runner.step_common,
            query_start_loc=self._to(query_start),
            query_start_loc_cpu=torch.from_numpy(query_start),
            seq_lens=self._to(end),
            num_reqs=len(slots),
            num_actual_tokens=len(positions),
            max_query_len=int(lengths.max()),
            max_seq_len=int(end.max()),
            block_table_tensor=self._block_table(slots),
            slot_mapping=kv_slots,
            positions=self._to(positions.astype(np.int64)),
            is_prefilling=None,
            seq_lens_cpu_upper_bound=torch.from_numpy(end),
        )
        metadata = {
            name: built
            for group, names in self._groups
            for built in [group.get_metadata_builder(0).build(0, common)]
            for name in names
        }
        return self._forward(inputs(slots[owner], positions), positions, kv_slots, metadata), query_start


def packed(parts: Sequence[tuple[int, int, int]], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """Stretches of tokens (whose, the first, behind the last) in lots of ``limit`` tokens, cut where a lot is full."""
    lot: list[tuple[int, int, int]] = []
    room = limit
    for whose, first, last in parts:
        while first < last:
            end = min(last, first + room)
            lot.append((whose, first, end))
            room -= end - first
            first = end
            if not room:
                yield lot
                lot, room = [], limit
    if lot:
        yield lot
