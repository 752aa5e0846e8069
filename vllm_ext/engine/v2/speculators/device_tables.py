# SPDX-License-Identifier: Apache-2.0
"""Token Recycling's tables in a worker of vLLM's V2 runner: when they learn, grow trees, and are saved."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

from vllm_ext.engine.state.keeper import Checkpointer
from vllm_ext.engine.v2.speculators.base import StepRows, TreeSpeculator
from vllm_ext.kernels import backends
from vllm_ext.proposers.hybrid import HybridOptions
from vllm_ext.proposers.token_recycling import TEXT_SLOTS, TokenRecyclingOptions
from vllm_ext.proposers.token_recycling_device import DeviceTokenRecycling

# Of steps without drafts one in so many teaches: most rows are as they were, and launches cost the host.
LEARN_EVERY = 4
# What `hybrid` looks up besides: longer contexts, and more of them, as `suffix_tree` does.
HYBRID_CONTEXT, HYBRID_TEXT_SLOTS = 8, 1 << 21


class DeviceTables:
    """See `vllm_ext.proposers.token_recycling_device`.

    Args:
        vllm_config: the target's.
        owner: whose trees these are.
        slots: of requests, and one more where batches are filled up.
        beside_heads: heads grow on below the trees, which are judged with theirs.
    """

    def __init__(
        self, vllm_config: Any, owner: TreeSpeculator, slots: int, *, beside_heads: bool = False
    ) -> None:
        options, longest, text_slots = owner.settings.options, None, TEXT_SLOTS
        if isinstance(options, HybridOptions):
            options, longest, text_slots = TokenRecyclingOptions(), HYBRID_CONTEXT, HYBRID_TEXT_SLOTS
        assert isinstance(options, TokenRecyclingOptions)
        self._owner = owner
        self.drafter = DeviceTokenRecycling(
            owner.num_nodes,
            options.matrix_width,
            longest or options.context_tokens,
            options.tree,
            vllm_config.model_config.get_vocab_size(),
            slots,
            owner.device,
            backends.V2,
            text_slots,
            beside_heads=beside_heads,
        )
        own = {**owner.settings.own_options, "drafts": "on the device"}  # V1's tables are other ones
        self._checkpointer = Checkpointer(
            vllm_config, owner.settings.method, owner.settings.options, own, owner.counts.count
        )
        self._chains = UvaBackedTensor(owner.max_num_reqs, dtype=torch.int32)
        self._max_depths = UvaBackedTensor(owner.max_num_reqs, dtype=torch.int32)
        # Slots of requests that have come, and how long their texts are.
        self._new: list[tuple[int, int]] = []
        self._quiet_steps = 0

    def start(self, slot: int, request: Any, chain: bool, most_depth: int) -> None:
        """See `TreeSpeculator.start`."""
        self._chains.np[slot] = chain
        self._max_depths.np[slot] = most_depth
        if self._owner.most_nodes[slot]:
            self._new.append((slot, len(request.prefill_token_ids)))

    def apply_staged_writes(self) -> None:
        """See `TreeSpeculator.apply_staged_writes`."""
        self._chains.copy_to_uva()
        self._max_depths.copy_to_uva()
        if self._new:
            slots, lengths = zip(*self._new, strict=True)
            text, owner = self._owner.req_states.all_token_ids.gpu, self._owner
            with self._checkpointer.lock:
                self.drafter.start(text, owner.to_device(slots), owner.prefill_len, max(lengths))
            self._new.clear()

    def needs(self, has_drafts: bool) -> bool:
        """See `TreeSpeculator.needs`."""
        self._quiet_steps = 0 if has_drafts else self._quiet_steps + 1
        return self._quiet_steps % LEARN_EVERY == 0

    def learn(self, rows: StepRows) -> None:
        """See `TreeSpeculator.learn`."""
        owner = self._owner
        text = owner.req_states.all_token_ids.gpu
        with self._checkpointer.lock:
            self.drafter.observe(
                rows.verified, rows.layout, text, owner.prefill_len, owner.teaches, rows.logits
            )
            self._checkpointer.mark_dirty()

    def grow(self, input_batch: Any) -> torch.Tensor:
        """int64 ``[requests, nodes]`` of the trees of a batch, good until the next call."""
        states = self._owner.req_states
        return self.drafter.propose(
            states.all_token_ids.gpu,
            states.total_len.gpu,
            input_batch.idx_mapping,
            self._chains.gpu,
            self._max_depths.gpu,
        )

    def serve(self) -> None:
        """See `TreeSpeculator.serve`."""
        self.drafter.forget()
        # Only now: warming up has taught it, too.
        self._checkpointer.restore(self.drafter, lambda: self.drafter)

    def close(self) -> None:
        """See `TreeSpeculator.close`."""
        self._checkpointer.close()


class WithTables:
    """Mixin in front of a `TreeSpeculator`: what it has of its tables alone."""

    tables: DeviceTables

    def apply_staged_writes(self) -> None:
        """See `TreeSpeculator`."""
        super().apply_staged_writes()  # type: ignore[misc]
        self.tables.apply_staged_writes()

    def needs(self, has_drafts: bool) -> bool:
        """See `TreeSpeculator`."""
        return self.tables.needs(has_drafts)

    def learn(self, rows: StepRows) -> None:
        """See `TreeSpeculator`."""
        self.tables.learn(rows)

    def serve(self) -> None:
        """See `TreeSpeculator`."""
        self.tables.serve()

    def forget(self) -> None:
        """See `TreeSpeculator`."""
        self.tables.drafter.forget()

    def close(self) -> None:
        """See `TreeSpeculator`."""
        self.tables.close()
