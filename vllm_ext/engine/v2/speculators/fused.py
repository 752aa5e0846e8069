# SPDX-License-Identifier: Apache-2.0
"""`hybrid` with heads on the V2 runner: Token Recycling's trees, and heads that grow on below them, on the device.

The tables grow their trees first, in a launch; then the heads' passes take place, which know of them
(`proposers.joint_device`).
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_ext.engine.v2.speculators.device_tables import DeviceTables, WithTables
from vllm_ext.engine.v2.speculators.model import ModelSpeculator
from vllm_ext.proposers.draft_model import DraftModelProposer
from vllm_ext.proposers.joint_device import Bins, Joint, Others
from vllm_ext.proposers.sampled_device import Growth


class FusedSpeculator(WithTables, ModelSpeculator):
    """Tables and heads."""

    beside = True

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        # One more slot than there are: of whoever fills a batch up, as in `DraftStep`.
        self.tables = DeviceTables(vllm_config, self, self.max_num_reqs + 1, beside_heads=True)
        self._bins = Bins.on(device)
        self.step.chosen = self._joint

    def _drafting(self, proposer: Any) -> DraftModelProposer:
        (self._heads,) = (each for each in proposer.drafters if isinstance(each, DraftModelProposer))
        return self._heads  # a hybrid's trees are never drawn

    def _deepest(self, asked: int) -> int:
        return self.num_nodes  # the tables' trees may be deeper than the heads'

    def _joint(self, level: int, home: torch.Tensor) -> Growth:
        """Of the batch whose trees live there; see `DraftStep.chosen`."""
        drafter = self.tables.drafter
        others = Others.of(drafter.trees, home, drafter.tokens[: len(home)])
        chains = self.chain_reason is not None or self.known_trees is None
        estimates = drafter.calibration.estimates
        return Joint(level, self._heads.most_depth, others, estimates, self._bins, chains=chains)

    @property
    def memory(self) -> tuple[int, str]:
        held, where = super().memory
        return held + self.tables.drafter.memory_bytes, where

    def start(self, slot: int, request: Any, chain: bool, most_depth: int) -> None:
        super().start(slot, request, chain, most_depth)
        self.tables.start(slot, request, chain, most_depth)

    def draft(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        if not dummy_run and kwargs.get("num_speculative_tokens") != 0:
            self.tables.grow(input_batch)
        return super().draft(input_batch, *args, dummy_run=dummy_run, **kwargs)
