# SPDX-License-Identifier: Apache-2.0
"""A second model in vLLM's V1 worker: its KV lies in the same blocks as the target's, it reads what the target reads.

vLLM's own loader makes it, its attention layers get caches with the target's, and their slots are found by the same
block tables: what is shared by prefix caching, freed or preempted is so for both. What keeps it in step:

- Per request the number of tokens is known whose KV is right. It starts with what the prefix cache gave, also after a
  preemption, and ends with the last token put out.
- A request's tokens are read when it is drafted for, and at the latest in the step in which the target fills a block:
  full blocks may be another request's prefix from then on.
- Draft nodes lie behind the committed tokens, in slots that the scheduler reserves (`v1_scheduler`). They are read
  again once they are committed: one row more in a pass that takes place anyway, and nothing has to move.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_ext import companion_load
from vllm_ext.draft_passes import DraftPasses, Growth
from vllm_ext.proposers.draft_model import SELF, DraftModelOptions, Rows

logger = init_logger("vllm.vllm_ext")

PREFIX = "companion"  # of the layers' names


class Companion(DraftPasses):
    """The model, its place in the caches, and forward passes. See `vllm_ext.proposers.draft_model.DraftModel`."""

    what_next = "Choose another draft model, or a method without one: `vllm-ext methods`."

    def __init__(self, vllm_config: Any, options: DraftModelOptions) -> None:
        super().__init__(vllm_config, f"speculative_config.model={options.model!r}")
        self._options = options
        self.model: Any = None
        self._known: dict[str, int] = {}  # by request id, tokens whose KV is right
        self._roots: dict[str, tuple[Any, Any]] = {}  # by request id, the distribution after its last token

    def load(self, target: Any) -> None:
        """Build it and load its weights; its layers then take part in vLLM's sizing of the caches."""
        self.config, self.model, self.layers = companion_load.load(
            self._target_config, self._options, target, PREFIX
        )
        self.own_layers = self.layers
        own = sum(p.numel() * p.element_size() for p in self.model.parameters())
        shared = 0
        if self._options.model == SELF:
            shared, own = own, 0
        self._vocab_size = min(self._vocab_size, self.config.model_config.get_vocab_size())
        logger.info(
            "vllm-ext: draft model %s: %d layers, %.1f MB of weights of its own (%.1f MB are the target's); its KV is "
            "counted with the target's",
            self._options.model,
            len(self.layers),
            own / 1e6,
            shared / 1e6,
        )

    def begin_step(self, scheduler_output: Any) -> None:
        """See `DraftPasses`: note what the prefix cache gave requests that come, or come back."""
        for new in scheduler_output.scheduled_new_reqs:
            self._known[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                self._known[request_id] = computed

    def forget(self, request_id: str) -> None:
        """See `DraftPasses`."""
        super().forget(request_id)
        self._known.pop(request_id, None)
        self._roots.pop(request_id, None)

    def advance(self, computed: Sequence[int], num_tokens: Sequence[int], drafting: set[str]) -> None:
        """See `DraftPasses`: read what the target's step has committed, as far as it is needed now."""
        batch = self._runner.input_batch
        block_size = batch.block_table[self._group_id].block_size
        self._roots.clear()
        self._growth.clear()
        self.passes.clear()
        parts: list[tuple[int, int, int]] = []  # batch index, first and last token
        for slot, request_id in enumerate(batch.req_ids):
            known = self._known[request_id]
            if request_id in drafting:
                # The last token is read again where it was before, for what follows it.
                parts.append((slot, min(known, num_tokens[slot] - 1), num_tokens[slot]))
            elif computed[slot] // block_size > known // block_size:
                parts.append((slot, known, computed[slot]))
        limit = self._target_config.scheduler_config.max_num_batched_tokens
        while parts:
            taken, rows = 0, 0
            while taken < len(parts) and (not taken or rows + parts[taken][2] - parts[taken][1] <= limit):
                rows += parts[taken][2] - parts[taken][1]
                taken += 1
            self._read(parts[:taken], drafting)
            parts = parts[taken:]

    def _read(self, parts: list[tuple[int, int, int]], drafting: set[str]) -> None:
        """One pass over stretches of committed tokens."""
        started = time.perf_counter()
        batch = self._runner.input_batch
        slots = np.array([part[0] for part in parts])
        start, end = (np.array([part[i] for part in parts], np.int32) for i in (1, 2))
        lengths = end - start
        query_start = np.zeros(len(parts) + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        owner = np.repeat(np.arange(len(parts)), lengths)
        positions = np.arange(query_start[-1], dtype=np.int32) - query_start[owner] + start[owner]
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
        asked = []
        for index, (slot, _, last) in enumerate(parts):
            request_id = batch.req_ids[slot]
            self._known[request_id] = last
            if request_id in drafting:
                asked.append(int(query_start[index + 1]) - 1)
                self._growth[request_id] = Growth(slot, last)
        if asked:
            names = [name for slot, _, _ in parts if (name := batch.req_ids[slot]) in drafting]
            wanted = hidden if len(asked) == len(hidden) else hidden[self._to(np.array(asked))]
            for name, ids, log_q in zip(names, *self._distributions(wanted), strict=True):
                self._roots[name] = ids, log_q
        self.passes.append((time.perf_counter() - started, len(tokens), len(parts)))

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
