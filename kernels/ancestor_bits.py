# SPDX-License-Identifier: Apache-2.0
"""Which rows of a draft tree each of its rows sees, as bits: nothing of it is worked out on the host."""

from __future__ import annotations

from typing import Any

import torch

from vllm_ext.kernels import backends
from vllm_ext.kernels.backends import Backend

MAX_ROWS = 160  # of one tree
WORDS = MAX_ROWS // 32


def ancestor_bits(
    parents: torch.Tensor,
    row_start: torch.Tensor,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """For each row the row itself and its ancestors, as int32 ``[num_rows, WORDS]``.

    The contract::

        for request in range(num_requests):
            for row in range(row_start[request + 1] - row_start[request]):
                seen = {row, *ancestors of row}
                for word in range(WORDS):
                    out[row_start[request] + row, word] = sum(1 << b for b in range(32) if 32 * word + b in seen)

    Args:
        parents: int32 ``[num_rows]``, each row's parent as an offset inside its request, smaller than the row's own;
            -1 where there is none. Contiguous.
        row_start: int32 ``[num_requests + 1]``: where each request's rows begin, MAX_ROWS of them at most.
        out: int32 ``[num_rows, WORDS]``, contiguous, written to; None: a new one. Rows of no request stay as they are.
        backend: "auto" is triton on CUDA, numba on the CPU, else torch.

    Returns:
        ``out``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit. The values are not looked at.
    """
    for name, tensor in (("parents", parents), ("row_start", row_start)):
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or tensor.device != parents.device:
            raise ValueError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)} on {tensor.device} must be int32 of one dimension on "
                f"the device of parents; pass {name}.to(parents.device, torch.int32)"
            )
    if out is None:
        out = parents.new_empty((len(parents), WORDS))
    if out.shape != (len(parents), WORDS) or out.dtype != torch.int32 or not out.is_contiguous():
        raise ValueError(
            f"out: {out.dtype} {tuple(out.shape)} must be contiguous int32 [{len(parents)}, {WORDS}]; leave it out"
        )
    form: Any
    match backends.choose(backend, parents):
        case "numba":
            from vllm_ext.kernels.ancestor_bits_numba import ancestor_bits_numba as form
        case "triton":
            from vllm_ext.kernels.ancestor_bits_triton import ancestor_bits_triton as form
        case _:
            from vllm_ext.kernels.ancestor_bits_ref import ancestor_bits_ref as form
    form(parents, row_start, out)
    return out
