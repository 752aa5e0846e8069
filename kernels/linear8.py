# SPDX-License-Identifier: Apache-2.0
"""Products with a weight matrix in 8 bits, for few rows: of drafts, whose exact values no output depends on.

As `linear`, where reading the weights is the floor, with half of the bytes: integers of 8 bits, symmetric, with a scale
for each output. Each input row is rounded to integers of 12 bits with a scale of its own, so that sums are of integers,
and exact. A row's result does not depend on the rows beside it.

`linear8_numba.py` is the fast form (x86), `linear8_ref.py` the readable one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_ext.kernels import backends
from vllm_ext.kernels.linear import BLOCK, check, problem
from vllm_ext.kernels.linear8_ref import linear8_ref

MOST = 127
MOST_INPUTS = 1 << 13  # of a row: sums of so many products fit into 32 bits


class Packed(NamedTuple):
    """Weights as they are read."""

    codes: torch.Tensor  # int8 [out_features / BLOCK, in_features / 2, BLOCK, 2], contiguous
    scale: torch.Tensor  # float32 [out_features]


def pack8(weight: torch.Tensor) -> Packed:
    """Round the weights, each row to multiples of its largest one's 127th part.

    Args:
        weight: bfloat16 ``[out_features, in_features]``.

    Raises:
        ValueError: see `vllm_ext.kernels.linear.problem`.
    """
    reason = problem(weight)
    if reason is None and weight.shape[1] > MOST_INPUTS:
        reason = f"{weight.shape[1]} columns: {MOST_INPUTS} at most"
    if reason is not None:
        raise ValueError(f"weight: {reason}; leave it to torch.nn.functional.linear")
    exact = weight.float()
    scale = (exact.abs().amax(1) / MOST).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (exact / scale[:, None]).round().clamp(-MOST, MOST).to(torch.int8)
    rows, columns = weight.shape
    return Packed(codes.view(rows // BLOCK, BLOCK, columns // 2, 2).transpose(1, 2).contiguous(), scale)


def linear8(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor, backend: backends.Backend = "auto"
) -> torch.Tensor:
    """``x @ weight.T + bias``, of rounded ones.

    Args:
        x: bfloat16 ``[..., in_features]``.
        packed: of `pack8`.
        bias: float32 ``[out_features]``.
        backend: "numba", "torch" (the reference), or "auto".

    Returns:
        bfloat16 ``[..., out_features]``.

    Raises:
        ValueError: dtypes or shapes other than these, or no such backend.
    """
    check(x, packed.codes, bias)
    if backends.choose(backend, x) == "torch":
        return linear8_ref(x, packed.codes, packed.scale, bias)
    from vllm_ext.kernels.linear8_numba import linear8_numba

    return linear8_numba(x, packed.codes, packed.scale, bias)
