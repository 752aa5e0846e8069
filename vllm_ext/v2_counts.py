# SPDX-License-Identifier: Apache-2.0
"""Counters of the V2 runner: added up on the device, copied to the host a step later, without waiting for it."""

from __future__ import annotations

from typing import Any

import torch

from vllm_ext import metrics

# What the device counts, in this order.
ON_DEVICE = ("spec_draft_tokens", "spec_accepted_tokens", "spec_emitted_tokens", "spec_steps")


class Counts:
    """Totals since start-up; on rank 0 alone they reach the counter file."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self._device = device
        self._totals = torch.zeros(len(ON_DEVICE), dtype=torch.int64, device=device)
        self._taken = [0] * len(ON_DEVICE)
        self._copied: torch.Tensor | None = None
        self._event: Any = None
        self._file: metrics.CounterFile | None = None
        if vllm_config.parallel_config.rank == 0:
            self._file = metrics.CounterFile(
                metrics.counter_path(vllm_config, vllm_config.parallel_config.data_parallel_index),
                create=True,
            )

    def add(self, drafted: torch.Tensor | None, num_emitted: torch.Tensor) -> None:
        """One step's.

        Args:
            drafted: bool ``[rows]``: the row is a node; None where there were no drafts.
            num_emitted: int32 ``[requests]`` tokens put out.
        """
        emitted, steps = num_emitted.sum(), (num_emitted > 0).sum()
        nodes = emitted.new_zeros(()) if drafted is None else drafted.sum()
        self._totals += torch.stack([nodes, emitted - steps, emitted, steps])

    def count(self, name: str, amount: int = 1) -> None:
        """What the host knows."""
        if self._file is not None and amount:
            self._file.add({name: amount})

    def begin_step(self) -> None:
        """Take over what has arrived; where the last copy is still under way, later."""
        if self._file is None:
            return
        if self._copied is not None:
            if self._device.type == "cuda" and self._event is not None and not self._event.query():
                return
            self._take(self._copied)
        self._copied = self._totals.to("cpu", non_blocking=True, copy=True)
        if self._device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def totals(self) -> dict[str, int]:
        """All there is, waited for: not in a step."""
        if self._file is None:
            return {}
        self._take(self._totals.cpu())
        self._copied = None
        return self._file.totals()

    def reset(self) -> None:
        """As if nothing had been counted on the device yet; not in a step."""
        self._totals.zero_()
        self._copied = None
        if self._file is not None:
            self._file.add({name: -taken for name, taken in zip(ON_DEVICE, self._taken, strict=True)})
        self._taken = [0] * len(ON_DEVICE)

    def _take(self, copied: torch.Tensor) -> None:
        assert self._file is not None
        now = copied.tolist()
        new = {name: a - b for name, a, b in zip(ON_DEVICE, now, self._taken, strict=True) if a > b}
        self._file.add(new)
        self._taken = now
