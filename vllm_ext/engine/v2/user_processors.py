# SPDX-License-Identifier: Apache-2.0
"""A logits processor of the user's own in the V2 runner, and which requests it has something to do for.

A processor says so of each request when that comes, and vLLM keeps of it only whether any processor has. What it does
to rows nobody knows: it takes a request's rows for a chain. So the trees of its requests, and of no others, are sampled
depth by depth (`rejection_sampler`).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor


class AskedProcessor(LogitsProcessor):  # type: ignore[misc]  # vLLM is untyped to us
    """Instead of a finished sampler's own.

    Args:
        processor: the user's; stays as it is.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._slots: set[int] = set()

    def is_under(self, slot: int) -> bool:
        """Whether the processor has something to do for the request in a slot."""
        return slot in self._slots

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """The processor's."""
        needs: bool = self._processor.add_request(req_idx, sampling_params)
        (self._slots.add if needs else self._slots.discard)(req_idx)
        return needs

    def apply_staged_writes(self) -> None:
        """The processor's."""
        self._processor.apply_staged_writes()

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The processor's."""
        result: torch.Tensor = self._processor.apply(logits, ctx)
        return result
