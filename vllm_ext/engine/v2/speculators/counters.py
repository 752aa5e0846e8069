# SPDX-License-Identifier: Apache-2.0
"""Counters of the V2 runner: kernels add them up on the device; now and then they are copied, and not waited for."""

from __future__ import annotations

import time
from typing import Any

import torch

from vllm_ext.engine.counters import Counters

# What the device counts, in this order: that of `vllm_ext.kernels.device_trees.walk`.
ON_DEVICE = ("spec_draft_tokens", "spec_accepted_tokens", "spec_emitted_tokens", "spec_steps")
COPY_SECONDS = 0.2  # between two copies; a copy each step would be a launch each step


class Counts(Counters):
    """With those that the device adds up."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config)
        self._device = device
        self.on_device = torch.zeros(len(ON_DEVICE), dtype=torch.int64, device=device)
        self._taken = [0] * len(ON_DEVICE)
        self._copied: torch.Tensor | None = None
        self._copied_at = 0.0
        self._event: Any = None

    def begin_step(self, idle: bool = False) -> None:
        """Take over what has arrived, and send for more.

        Args:
            idle: nothing runs in this step, so all that was counted is taken over, and waited for.
        """
        if not self.counts:
            return
        if idle:
            self.totals()
            return
        if self._copied is not None:
            if self._event is not None and not self._event.query():
                return
            self._take(self._copied)
            self._copied = None
        if time.monotonic() - self._copied_at < COPY_SECONDS:
            return
        self._copied_at = time.monotonic()
        self._copied = self.on_device.to("cpu", non_blocking=True, copy=True)
        if self._device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def totals(self) -> dict[str, int]:
        """All there is, waited for: not in a step."""
        if not self.counts:
            return {}
        self._take(self.on_device.cpu())
        self._copied = None
        return super().totals()

    def reset(self) -> None:
        """As if nothing had been counted on the device yet; not in a step."""
        self.on_device.zero_()
        self._copied = None
        self.add({name: -taken for name, taken in zip(ON_DEVICE, self._taken, strict=True)})
        self._taken = [0] * len(ON_DEVICE)

    def _take(self, copied: torch.Tensor) -> None:
        now = copied.tolist()
        new = {name: a - b for name, a, b in zip(ON_DEVICE, now, self._taken, strict=True) if a > b}
        self.add(new)
        self._taken = now
