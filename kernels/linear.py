# SPDX-License-Identifier: Apache-2.0
"""Products with a weight matrix of bfloat16, for few rows: what a decode step on a CPU mostly is.

Reading the weights is the floor, and a CPU multiplies a dozen rows while it reads. For that each part of the weights is
read once for all rows of a tile, in the order of memory and ahead of its use. A row's result does not depend on the
rows beside it: not on their number, nor on its place among them.

`linear_numba.py` is the fast form (x86), `linear_ref.py` the readable one.
"""

from __future__ import annotations

import platform

import torch

from vllm_ext.kernels import backends
from vllm_ext.kernels.linear_ref import linear_ref

BLOCK = 32  # output columns that lie together


def problem(weight: torch.Tensor) -> str | None:
    """Why these weights cannot be packed; None: they can be.

    Args:
        weight: ``[out_features, in_features]``.
    """
    if weight.dim() != 2 or weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return (
            f"{weight.dim()} dimensions of {weight.dtype} on {weight.device}, not a matrix of bfloat16 on cpu"
        )
    if weight.shape[0] % BLOCK or weight.shape[1] % 2:
        return (
            f"{weight.shape[0]} x {weight.shape[1]}: rows are not whole blocks of {BLOCK}, columns not pairs"
        )
    return None


def machine_problem() -> str | None:
    """Why this machine's own form of the product serves better; None: ours does."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the CPU is {platform.machine()}, not x86-64"
    if torch.cpu._is_amx_tile_supported():
        return "the CPU multiplies tiles of bfloat16 (AMX)"
    if not torch.cpu._is_avx2_supported():
        return "the CPU has no AVX2"
    return None


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The weights in the order in which they are read.

    Args:
        weight: bfloat16 ``[out_features, in_features]``.

    Returns:
        bfloat16 ``[out_features / BLOCK, in_features / 2, BLOCK, 2]``, contiguous: the pairs of a block's rows.

    Raises:
        ValueError: see `problem`.
    """
    reason = problem(weight)
    if reason is not None:
        raise ValueError(f"weight: {reason}; leave it to torch.nn.functional.linear")
    rows, columns = weight.shape
    return weight.view(rows // BLOCK, BLOCK, columns // 2, 2).transpose(1, 2).contiguous()


def check(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor) -> None:
    """Refuse what does not go with packed weights ``[out_features / BLOCK, in_features / 2, BLOCK, 2]``.

    Raises:
        ValueError: dtypes or shapes other than `linear` says.
    """
    blocks, pairs = packed.shape[:2]
    if x.dtype != torch.bfloat16 or x.shape[-1] != 2 * pairs:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}: the weights take bfloat16 with {2 * pairs} in the last dimension"
        )
    if bias.dtype != torch.float32 or bias.shape != (blocks * BLOCK,):
        raise ValueError(
            f"bias is {bias.dtype} {tuple(bias.shape)}: it must be float32 ({blocks * BLOCK},), zeros for none"
        )


def linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor, backend: backends.Backend = "auto"
) -> torch.Tensor:
    """``x @ weight.T + bias``, summed in float32 and rounded once.

    Args:
        x: bfloat16 ``[..., in_features]``.
        packed: of `pack`.
        bias: float32 ``[out_features]``.
        backend: "numba", "torch" (the reference), or "auto".

    Returns:
        bfloat16 ``[..., out_features]``.

    Raises:
        ValueError: dtypes or shapes other than these, or no such backend.
    """
    check(x, packed, bias)
    if backends.choose(backend, x) == "torch":
        return linear_ref(x, packed, bias)
    from vllm_ext.kernels.linear_numba import linear_numba

    return linear_numba(x, packed, bias)
