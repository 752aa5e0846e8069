# SPDX-License-Identifier: Apache-2.0
"""Drafts of the V2 runner that are grown on the device: no value of a tensor is asked for on the host."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

from vllm_ext.engine.state.keeper import Checkpointer
from vllm_ext.engine.v2.speculator import StepRows, TreeSpeculator
from vllm_ext.kernels import backends
from vllm_ext.proposers.hybrid import HybridOptions
from vllm_ext.proposers.token_recycling import TEXT_SLOTS, TokenRecyclingOptions
from vllm_ext.proposers.token_recycling_device import DeviceTokenRecycling

# Of steps without drafts one in so many teaches: most rows are as they were, and launches cost the host.
LEARN_EVERY = 4
# What `hybrid` looks up besides: longer contexts, and more of them, as `suffix_tree` does.
HYBRID_CONTEXT, HYBRID_TEXT_SLOTS = 8, 1 << 21


class DeviceSpeculator(TreeSpeculator):
    """Token Recycling's tables, and a tree for each slot."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        options, longest, text_slots = self.settings.options, None, TEXT_SLOTS
        if isinstance(options, HybridOptions):
            options, longest, text_slots = TokenRecyclingOptions(), HYBRID_CONTEXT, HYBRID_TEXT_SLOTS
        assert isinstance(options, TokenRecyclingOptions)
        self.drafter = DeviceTokenRecycling(
            self.num_nodes,
            options.matrix_width,
            longest or options.context_tokens,
            options.tree,
            vllm_config.model_config.get_vocab_size(),
            self.max_num_reqs,
            device,
            backends.V2,
            text_slots,
        )
        own = {**self.settings.own_options, "drafts": "on the device"}  # V1's tables are other ones
        self._checkpointer = Checkpointer(
            vllm_config, self.settings.method, self.settings.options, own, self.counts.count
        )
        self.trees = self.drafter.trees
        self.only_chains = self.drafter.only_chains
        self._chains = UvaBackedTensor(self.max_num_reqs, dtype=torch.int32)
        self._max_depths = UvaBackedTensor(self.max_num_reqs, dtype=torch.int32)
        self._new: list[
            tuple[int, int]
        ] = []  # slots of requests that have come, and how long their texts are
        self._quiet_steps = 0

    @property
    def memory(self) -> tuple[int, str]:
        return self.drafter.memory_bytes, "device"

    def start(self, slot: int, request: Any, chain: bool, most_depth: int) -> None:
        self._chains.np[slot] = chain
        self._max_depths.np[slot] = most_depth
        self._new.append((slot, len(request.prefill_token_ids)))

    def apply_staged_writes(self) -> None:
        super().apply_staged_writes()
        self._chains.copy_to_uva()
        self._max_depths.copy_to_uva()
        if self._new:
            slots, lengths = zip(*self._new, strict=True)
            text = self.req_states.all_token_ids.gpu
            with self._checkpointer.lock:
                self.drafter.start(text, self.to_device(slots), self.prefill_len, max(lengths))
            self._new.clear()

    def needs(self, has_drafts: bool) -> bool:
        self._quiet_steps = 0 if has_drafts else self._quiet_steps + 1
        return self._quiet_steps % LEARN_EVERY == 0

    def learn(self, rows: StepRows) -> None:
        text = self.req_states.all_token_ids.gpu
        with self._checkpointer.lock:
            self.drafter.observe(
                rows.verified, rows.layout, text, self.prefill_len, self.teaches, rows.logits
            )
            self._checkpointer.mark_dirty()

    def draft(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        if dummy_run or kwargs.get("num_speculative_tokens") == 0:
            return self.drafter.tokens[: input_batch.num_reqs]
        return self.drafter.propose(
            self.req_states.all_token_ids.gpu,
            self.req_states.total_len.gpu,
            input_batch.idx_mapping,
            self._chains.gpu,
            self._max_depths.gpu,
        )

    def serve(self) -> None:
        self.forget()
        # Only now: warming up has taught it, too.
        self._checkpointer.restore(self.drafter, lambda: self.drafter)

    def close(self) -> None:
        self._checkpointer.close()

    def forget(self) -> None:
        self.drafter.forget()
