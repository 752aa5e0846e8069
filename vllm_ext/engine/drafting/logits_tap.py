# SPDX-License-Identifier: Apache-2.0
"""What a step's logits say, read while no sampler has written into them and kept until the step is learnt from."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm_ext.kernels.top_k import top_k_ids
from vllm_ext.proposers.tree import Float32, Int32

Int64 = npt.NDArray[np.int64]


class Tapped(NamedTuple):
    """Of the logits of one step's rows."""

    top: tuple[Int32, Float32]  # [num_rows, width] ids of each row's largest, best first, and these
    log_total: Float32 | None  # [num_rows] the log of the sum of their exponentials; 0: not asked for


class LogitsTap:
    """Reads one step at a time.

    Args:
        with_total: whether somebody wants `Tapped.log_total`.
    """

    def __init__(self, with_total: bool) -> None:
        self._with_total = with_total
        self._tapped: Tapped | None = None
        self.seconds = 0.0  # spent in `read` so far

    def read(self, logits: Any, width: int, total_of: Int64 | None = None) -> Int32:
        """Read the logits ``[num_rows, vocab]`` of a step; int32 ``[num_rows, width]``, ids of each row's largest.

        Args:
            logits: of the step.
            width: how many.
            total_of: the rows whose `Tapped.log_total` is wanted, which costs far more than the ids; None: all.
        """
        started = time.perf_counter()
        self._tapped = None
        try:
            top_ids = top_k_ids(logits, width)
            top_logits = logits.gather(1, top_ids.to(torch.int64)).to(torch.float32)
            top = top_ids.cpu().numpy(), top_logits.cpu().numpy()
            self._tapped = Tapped(top, _log_total(logits, total_of) if self._with_total else None)
        finally:
            self.seconds += time.perf_counter() - started
        return top[0]

    def take(self) -> Tapped | None:
        """This step's, once; None where its logits were not read."""
        tapped, self._tapped = self._tapped, None
        return tapped


def _log_total(logits: torch.Tensor, rows: Int64 | None) -> Float32:
    """Of some rows, or all, the log of the sum of their exponentials; 0 of the others."""
    if rows is None:
        every: Float32 = torch.logsumexp(logits.float(), 1).cpu().numpy()
        return every
    found: Float32 = np.zeros(len(logits), np.float32)
    if len(rows):
        some = logits[torch.from_numpy(rows).to(logits.device)]
        found[rows] = torch.logsumexp(some.float(), 1).cpu().numpy()
    return found


def warm_up(model: Any, vocab_size: int, dtype: torch.dtype, width: int) -> None:
    """Compile on the model's device what would else stall the first request."""
    logits = next(model.parameters()).new_zeros((2, vocab_size), dtype=dtype)
    top_k_ids(logits, width)
