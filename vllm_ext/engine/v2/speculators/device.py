# SPDX-License-Identifier: Apache-2.0
"""Drafts of the V2 runner that are grown on the device: no value of a tensor is asked for on the host."""

from __future__ import annotations

from typing import Any

import torch

from vllm_ext.engine.v2.speculators.base import TreeSpeculator
from vllm_ext.engine.v2.speculators.device_tables import DeviceTables, WithTables


class DeviceSpeculator(WithTables, TreeSpeculator):
    """Token Recycling's tables, and a tree for each slot."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        self.tables = DeviceTables(vllm_config, self, self.max_num_reqs)
        self.drafter = self.tables.drafter
        self.trees = self.drafter.trees
        self.only_chains = self.drafter.only_chains

    @property
    def memory(self) -> tuple[int, str]:
        return self.drafter.memory_bytes, "device"

    def start(self, slot: int, request: Any, chain: bool, most_depth: int) -> None:
        self.tables.start(slot, request, chain, most_depth)

    def draft(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        if dummy_run or kwargs.get("num_speculative_tokens") == 0:
            return self.drafter.tokens[: input_batch.num_reqs]
        return self.tables.grow(input_batch)
