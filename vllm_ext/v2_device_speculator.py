# SPDX-License-Identifier: Apache-2.0
"""Drafts of the V2 runner that are grown on the device: no value of a tensor is asked for on the host."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

from vllm_ext.proposers.token_recycling_device import DeviceTokenRecycling
from vllm_ext.v2_speculator import BACKEND, StepRows, TreeSpeculator

logger = init_logger("vllm.vllm_ext")


class DeviceSpeculator(TreeSpeculator):
    """Token Recycling's table, and a tree for each slot."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        self.drafter = DeviceTokenRecycling(
            self.settings.options,  # type: ignore[arg-type]
            vllm_config.model_config.get_vocab_size(),
            self.max_num_reqs,
            device,
            BACKEND,
        )
        self.trees = self.drafter.trees
        self.only_chains = self.drafter.only_chains
        self._chains = UvaBackedTensor(self.max_num_reqs, dtype=torch.int32)
        self._max_depths = UvaBackedTensor(self.max_num_reqs, dtype=torch.int32)

    def load(self) -> None:
        """See the base class."""
        drafter = self.drafter
        logger.info(
            "vllm-ext: %s holds %.2f MB of device memory", type(drafter).__name__, drafter.memory_bytes / 1e6
        )

    def start(self, slot: int, request: Any, chain: bool, most_depth: int) -> None:
        """See the base class."""
        self._chains.np[slot] = chain
        self._max_depths.np[slot] = most_depth
        self.drafter.start(self.req_states.all_token_ids.gpu[slot, : len(request.prefill_token_ids)])

    def apply_staged_writes(self) -> None:
        """See the base class."""
        super().apply_staged_writes()
        self._chains.copy_to_uva()
        self._max_depths.copy_to_uva()

    def learn(self, rows: StepRows) -> None:
        """Take over what the target ranks highest after each row; see `DeviceTokenRecycling.observe`."""
        own = torch.arange(len(rows.tokens), device=self.device)
        known = self.not_structured[rows.slots]
        if rows.drafted is not None:
            known = known & (rows.drafted | (rows.roots == own))
        self.drafter.observe(rows.tokens, known, rows.accepted, *self.top(rows.logits, self.drafter.width))
        if rows.drafted is not None and rows.parents is not None and rows.roots is not None:
            groups = torch.where(rows.drafted & known, self.layout.groups[: len(own)], -1)
            self.drafter.judge(groups, rows.roots + rows.parents.clamp(min=0), rows.accepted)

    def propose(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        """vLLM's: int64 ``[requests, nodes]`` in batch order, after the step's tokens were taken over."""
        if dummy_run or kwargs.get("num_speculative_tokens") == 0:
            return self.drafter.tokens[: input_batch.num_reqs]
        return self.drafter.propose(
            self.req_states.last_sampled_tokens.view(-1),
            input_batch.idx_mapping,
            self._chains.gpu,
            self._max_depths.gpu,
        )

    def serve(self) -> None:
        """See the base class."""
        self.drafter.forget()
