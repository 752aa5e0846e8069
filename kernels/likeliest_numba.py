# SPDX-License-Identifier: Apache-2.0
"""The sum of `likeliest` on the CPU: one pass in vectors over logits as they are, no copy of them in float32."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from vllm_ext.kernels import backends
from vllm_ext.kernels.numba_vectors import (
    LANES,
    exp2_of_difference,
    load_vector,
    splat,
    sum_of_lanes,
    vector_add,
    vector_multiply,
)

# By dtype: what stands for it in numba, and the bits of its minus infinity.
STORED: dict[torch.dtype, tuple[torch.dtype, Any]] = {
    torch.float32: (torch.float32, np.float32(-np.inf)),
    torch.bfloat16: (torch.uint16, np.uint16(0xFF80)),
    torch.float16: (torch.int16, np.int16(0xFC00 - 0x10000)),
}
LOG2E = np.float32(1.4426950408889634)


def log_sum_exp_numba(logits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """float32 ``[rows]``: the logarithm of the sum of the exponentials.

    Args:
        logits: see `vllm_ext.kernels.likeliest.likeliest`.
        largest: float32 ``[rows]``, of each row. Where it is not finite, nor is the result.
    """
    rows, vocab = logits.shape
    found = torch.empty(rows)
    if rows:
        stride = logits.stride(0)
        stored, nothing = STORED[logits.dtype]
        flat = logits.view(stored).as_strided(((rows - 1) * stride + vocab,), (1,)).numpy()
        _compiled()(flat, stride, vocab, nothing, largest.numpy(), found.numpy())
    return found


@functools.cache
def _compiled() -> Any:
    return backends.compile_cached(numba.njit, nogil=True)(_sum)


def _sum(flat: Any, stride: int, vocab: int, nothing: Any, largest: Any, found: Any) -> None:
    whole = vocab - vocab % LANES
    rest = np.empty(LANES, flat.dtype)
    factor = splat(LOG2E)
    for row in range(len(found)):
        if not np.isfinite(largest[row]):
            found[row] = largest[row]
            continue
        begin, top = row * stride, splat(largest[row] * LOG2E)
        rest[:] = nothing
        rest[: vocab - whole] = flat[begin + whole : begin + vocab]
        total = exp2_of_difference(vector_multiply(load_vector(rest, 0), factor), top)
        for place in range(begin, begin + whole, LANES):
            scaled = vector_multiply(load_vector(flat, place), factor)
            total = vector_add(total, exp2_of_difference(scaled, top))
        found[row] = largest[row] + np.log(sum_of_lanes(total))
