# SPDX-License-Identifier: Apache-2.0
"""What a step's logits say, read while no sampler has written into them and kept until the step is learnt from."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from vllm_ext.kernels.top_k import top_k_ids
from vllm_ext.proposers.tree import Float32, Int32


class Tapped(NamedTuple):
    """Of the logits of one step's rows."""

    top: tuple[Int32, Float32]  # [num_rows, width] ids of each row's largest, best first, and these
    log_total: Float32 | None  # [num_rows] the log of the sum of their exponentials


class LogitsTap:
    """Reads one step at a time.

    Args:
        with_total: whether somebody wants `Tapped.log_total`.
    """

    def __init__(self, with_total: bool) -> None:
        self._with_total = with_total
        self._tapped: Tapped | None = None
        self.seconds = 0.0  # spent in `read` so far

    def read(self, logits: Any, width: int) -> Int32:
        """Read the logits ``[num_rows, vocab]`` of a step; int32 ``[num_rows, width]``, ids of each row's largest."""
        started = time.perf_counter()
        self._tapped = None
        try:
            top_ids = top_k_ids(logits, width)
            top_logits = logits.gather(1, top_ids.to(torch.int64)).to(torch.float32)
            top = top_ids.cpu().numpy(), top_logits.cpu().numpy()
            log_total = torch.logsumexp(logits.float(), 1).cpu().numpy() if self._with_total else None
            self._tapped = Tapped(top, log_total)
        finally:
            self.seconds += time.perf_counter() - started
        return top[0]

    def take(self) -> Tapped | None:
        """This step's, once; None where its logits were not read."""
        tapped, self._tapped = self._tapped, None
        return tapped


def warm_up(model: Any, vocab_size: int, dtype: torch.dtype, width: int) -> None:
    """Compile on the model's device what would else stall the first request."""
    logits = next(model.parameters()).new_zeros((2, vocab_size), dtype=dtype)
    top_k_ids(logits, width)
