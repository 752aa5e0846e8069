# SPDX-License-Identifier: Apache-2.0
"""`ancestor_bits` on the CPU: a row sees itself and what its parent, which stands before it, sees."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from vllm_ext.kernels import backends


def ancestor_bits_numba(parents: torch.Tensor, row_start: torch.Tensor, out: torch.Tensor) -> None:
    """See `vllm_ext.kernels.ancestor_bits.ancestor_bits`, which validates."""
    _compiled()(parents.numpy(), row_start.numpy(), out.numpy())


@functools.cache
def _compiled() -> Any:
    return backends.compile_cached(numba.njit, nogil=True)(_ancestor_bits)


def _ancestor_bits(parents: Any, row_start: Any, out: Any) -> None:
    for request in range(len(row_start) - 1):
        start = row_start[request]
        for row in range(row_start[request + 1] - start):
            parent = parents[start + row]
            for word in range(out.shape[1]):
                out[start + row, word] = out[start + parent, word] if parent >= 0 else 0
            out[start + row, row // 32] |= np.int32(1) << np.int32(row % 32)
