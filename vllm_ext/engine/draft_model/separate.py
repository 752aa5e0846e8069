# SPDX-License-Identifier: Apache-2.0
"""A second model in vLLM's V1 worker: its KV lies in the same blocks as the target's, it reads what the target reads.

vLLM's own loader makes it, its attention layers get caches with the target's, and their slots are found by the same
block tables: what is shared by prefix caching, freed or preempted is so for both. What keeps it in step:

- A request's tokens are read when it is drafted for, and not before: who is not drafted for costs nothing.
- So of a full block the target's KV may be there and the model's not, whatever shares the block. It is known which
  blocks are right: those that it has read to their end since vLLM gave them out. Of each request, in turn, how many
  tokens are: up to the last full right block, or the last one that was read for this request.
- Draft nodes lie behind the committed tokens, in slots that the scheduler reserves (`scheduler`). They are read
  again once they are committed: one row more in a pass that takes place anyway, and nothing has to move.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_ext.engine.draft_model.passes import DraftPasses, Growth, Pass
from vllm_ext.engine.models import second_model
from vllm_ext.engine.tree_layout import offsets, starts
from vllm_ext.proposers.draft_model import DraftModelOptions, Rows

PREFIX = "companion"  # of the layers' names
MAX_NEW_TOKENS = 8  # of a request, on average, in a pass that reads no prompt


class SeparateModel(DraftPasses):
    """The model, its place in the caches, and forward passes. See `vllm_ext.proposers.draft_model.DraftModel`."""

    what_next = "Choose another draft model, or a method without one: `vllm-ext methods`."

    def __init__(self, vllm_config: Any, options: DraftModelOptions) -> None:
        super().__init__(vllm_config, f"speculative_config.model={options.model!r}")
        self._options = options
        self.model: Any = None
        self._known: dict[str, int] = {}  # by request id, tokens read for it
        self._right = np.zeros(0, bool)  # by block of vLLM's, whether it was read to its end
        self._block_size = 0
        self._roots: dict[str, tuple[Any, Any]] = {}  # by request id, the distribution after its last token

    def load(self, target: Any) -> None:
        """Build it and load its weights; its layers then take part in vLLM's sizing of the caches."""
        self.config, self.model, self.layers = second_model.load(
            self._target_config, self._options, target, PREFIX
        )
        self.own_layers = self.layers
        self._vocab_size = min(self._vocab_size, self.config.model_config.get_vocab_size())
        second_model.log_draft(self._options, self.model, self.layers)

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

    def unread(self, request_ids: Sequence[str], num_tokens: Sequence[int]) -> list[int]:
        """See `DraftPasses`."""
        return [
            tokens - self._read_of(request_id)
            for request_id, tokens in zip(request_ids, num_tokens, strict=True)
        ]

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

    def advance(self, num_tokens: Sequence[int], drafting: set[str]) -> None:
        """See `DraftPasses`: read what those that are drafted for have committed."""
        batch = self._runner.input_batch
        self._roots.clear()
        self._growth.clear()
        self.passes.clear()
        # The last token is read again where it was before, for what follows it.
        parts = [
            (slot, min(self._read_of(request_id), num_tokens[slot] - 1), num_tokens[slot])
            for slot, request_id in enumerate(batch.req_ids)
            if request_id in drafting
        ]
        for stretches in packed(parts, self._target_config.scheduler_config.max_num_batched_tokens):
            self._read(stretches, num_tokens)

    def _read(self, parts: list[tuple[int, int, int]], num_tokens: Sequence[int]) -> None:
        """One pass over stretches of committed tokens; those that reach their request's end have roots then."""
        started = time.perf_counter()
        batch = self._runner.input_batch
        slots = np.array([part[0] for part in parts])
        start, end = (np.array([part[i] for part in parts], np.int32) for i in (1, 2))
        lengths = end - start
        query_start = starts(lengths)
        owner = np.repeat(np.arange(len(parts)), lengths)
        positions = offsets(lengths) + start[owner]
        tokens = batch.token_ids_cpu[slots[owner], positions]
        kv_slots = self._kv_slots(slots[owner], positions)
        common = replace(
            self._runner.step_common,
            query_start_loc=self._to(query_start),
            query_start_loc_cpu=torch.from_numpy(query_start),
            seq_lens=self._to(end),
            num_reqs=len(parts),
            num_actual_tokens=len(tokens),
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
        hidden = self._forward(tokens, positions, kv_slots, metadata)
        asked, names = [], []
        for index, (slot, first, last) in enumerate(parts):
            request_id = batch.req_ids[slot]
            self._known[request_id] = last
            self._fill(request_id, first, last)
            if last == num_tokens[slot]:
                asked.append(int(query_start[index + 1]) - 1)
                names.append(request_id)
                self._growth[request_id] = Growth(slot, last)
        if asked:
            wanted = hidden if len(asked) == len(hidden) else hidden[self._to(np.array(asked))]
            for name, ids, log_q in zip(names, *self._distributions(wanted), strict=True):
                self._roots[name] = ids, log_q
        reads = len(tokens) > MAX_NEW_TOKENS * len(parts)
        self.passes.append(Pass(time.perf_counter() - started, len(tokens), len(parts), reads))

    def roots(self, request_ids: Sequence[str]) -> Rows:
        """See `DraftModel`."""
        found = [self._roots[request_id] for request_id in request_ids]
        return Rows(np.stack([ids for ids, _ in found]), np.stack([log_q for _, log_q in found]))

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
        # A token the draft has no row for is one that no tokenizer gives.
        known = torch.where(tokens < self._vocab_size, tokens, 0)
        return self.model(input_ids=known, positions=positions, intermediate_tensors=None)

    def _logits(self, hidden: Any) -> Any:
        return self.model.compute_logits(hidden)


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
