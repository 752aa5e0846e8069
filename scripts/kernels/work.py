# SPDX-License-Identifier: Apache-2.0
"""What is checked and timed: a kernel at one size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Work:
    """One row of the table.

    Args:
        op: of `kernels/`.
        form: "triton" or "numba".
        size: what it is run on.
        error: its distance from the readable reference, or from that in float64; 0 is equality.
        limit: the largest error that is right.
        call: what is timed; None: nothing is.
        num_bytes: that have to be read or written at least; 0: that says nothing of its time.
        flops: that have to be done at least.
    """

    op: str
    form: str
    size: str
    error: Callable[[], float]
    limit: float
    call: Callable[[], object] | None = None
    num_bytes: int = 0
    flops: int = 0


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, by the largest value wanted; NaN where one is NaN."""
    difference = (got.double() - want.double()).abs().max()
    return float(difference / want.double().abs().max())
