# SPDX-License-Identifier: Apache-2.0
"""Causal convolution of draft trees' rows, channel by channel: what recurrent layers have before their state.

A row sees its ancestors, and before the root the text. The inputs of a step stay in the rolling state, so that the
next one can take those that were accepted from there.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_ext.kernels import backends
from vllm_ext.kernels.backends import Backend

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tree_conv(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: torch.Tensor,
    row_start: torch.Tensor,
    parents: torch.Tensor,
    pending: torch.Tensor,
    num_pending: torch.Tensor,
    out_start: torch.Tensor,
    out: torch.Tensor,
    silu: bool,
    backend: Backend = "auto",
) -> None:
    """Convolve the last step's accepted rows and this step's, and keep this step's inputs.

    The contract, in float32, for a request with rows whose block is not 0; ``at`` is its block, ``rows`` its rows of
    ``x``, and ``count`` its number of pending ones::

        old = state[at].clone()
        text = [*columns(old[:, : W - 1]), *(old[:, W - 2 + row] for row in pending[request, :count])]
        for place in range(len(text) - count, len(text)):
            convolve(text[: place + 1])
        for row in range(len(rows)):
            convolve([*text, *(rows[node] for node in path_from_root(row))])
        state[at][:, : W - 2] = text[len(text) - (W - 2) :]
        state[at][:, W - 2 : W - 2 + len(rows)] = rows

    where ``convolve(inputs)`` writes the request's next row of ``out``::

        y = bias + sum(weight[:, W - 1 - j] * inputs[-1 - j] for j in range(W))
        out[next_row] = y * sigmoid(y) if silu else y

    Args:
        x: float32, bfloat16 or float16 ``[rows, D]``, last dimension contiguous. Of each request the root is first.
        state: ``[num_blocks, D, W - 1 + N]`` of any strides, where N is the most nodes of a tree. Columns to W - 2 are
            the text's last inputs to the last step's root, column W - 2 + r is that of its row r.
        weight: ``[D, W]``, W 2 at least: the last column is the row's own. Any strides.
        bias: ``[D]``, of weight's dtype, contiguous; None: 0.
        blocks: int32 ``[R]``: where each request's state is; 0: the request is padding, for which nothing is done.
        row_start: int32 ``[R + 1]``: where each request's rows begin.
        parents: int32 ``[rows]``: each row's parent as an offset inside its request, smaller than the row's own; -1 for
            the root.
        pending: int32 ``[R, P]``: the last step's rows that were accepted behind its root, ascending, which are a path.
        num_pending: int32 ``[R]``: how many.
        out_start: int32 ``[R]``: where each request's outputs begin, first of its pending rows, then of this step's.
        out: ``[total, D]`` of x's dtype, last dimension contiguous. Other rows are not written.
        silu: whether outputs go through SiLU.
        backend: "auto" is triton on CUDA, numba on the CPU, else torch. "numba" takes multiples of 16 for D.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit. The values are not looked at.
    """
    _validate_channels(x, state, weight, bias, out)
    requests = len(blocks)
    for name, tensor, shape in (
        ("blocks", blocks, (requests,)),
        ("row_start", row_start, (requests + 1,)),
        ("parents", parents, (len(x),)),
        ("pending", pending, (requests, pending.shape[-1])),
        ("num_pending", num_pending, (requests,)),
        ("out_start", out_start, (requests,)),
    ):
        good = tensor.dtype == torch.int32 and tensor.device == x.device and tensor.is_contiguous()
        if not good or tensor.shape != shape:
            raise ValueError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)} on {tensor.device} must be contiguous int32 {shape} on "
                f"x's device {x.device}; pass {name}.to(x.device, torch.int32)"
            )
    form: Any
    match backends.choose(backend, x):
        case "numba":
            from vllm_ext.kernels.tree_conv_numba import tree_conv_numba as form
        case "triton":
            from vllm_ext.kernels.tree_conv_triton import tree_conv_triton as form
        case _:
            from vllm_ext.kernels.tree_conv_ref import tree_conv_ref as form
    form(x, state, weight, bias, blocks, row_start, parents, pending, num_pending, out_start, out, silu)


def _validate_channels(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    tensors = {"x": x, "state": state, "weight": weight, "out": out}
    if bias is not None:
        tensors["bias"] = bias
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.device != x.device:
            raise ValueError(
                f"{name}: {tensor.dtype} on {tensor.device} must be one of {', '.join(map(str, DTYPES))} on x's device "
                f"{x.device}"
            )
    shapes = x.dim() == 2 and weight.dim() == 2 and state.dim() == 3 and out.dim() == 2
    channels = x.shape[-1]
    if not shapes or not len(weight) == state.shape[1] == out.shape[1] == channels:
        raise ValueError(
            f"x {tuple(x.shape)}, state {tuple(state.shape)}, weight {tuple(weight.shape)} and out {tuple(out.shape)} "
            "must be [rows, D], [num_blocks, D, W - 1 + N], [D, W] and [total, D]"
        )
    width = weight.shape[1]
    if width < 2 or state.shape[2] < width - 1:
        raise ValueError(
            f"weight {tuple(weight.shape)} and state {tuple(state.shape)}: W={width} must be 2 at least, and the state "
            "have W - 1 columns at least"
        )
    packed = x.stride(1) == out.stride(1) == 1 or channels == 1
    if not packed or x.dtype != out.dtype:
        raise ValueError(
            f"x: {x.dtype}, strides {x.stride()}; out: {out.dtype}, strides {out.stride()} must be of one dtype with "
            "the last dimension contiguous"
        )
    if bias is not None and (
        bias.shape != (channels,) or bias.dtype != weight.dtype or not bias.is_contiguous()
    ):
        raise ValueError(
            f"bias: {bias.dtype} {tuple(bias.shape)} must be contiguous {weight.dtype} [{channels}], or None"
        )
