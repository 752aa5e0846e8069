# SPDX-License-Identifier: Apache-2.0
"""Draft trees in recurrent layers, Mamba-2's and the gated delta net's, after STree (arXiv 2505.14969).

A layer's state is that of the text alone: rows that are certain advance it, those of a draft tree read it. What a
tree's rows do to one another is worked out beside the state, along each row's path: where a chain has a lower
triangle as its mask, a tree has its rows' ancestors. So the state is read once and written once a step.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_ext.kernels import backends
from vllm_ext.kernels.backends import Backend

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_ROWS = 64  # of a tree, the root included, that the triton form takes: a row's ancestors are bits


def recurrent_trees(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    blocks: torch.Tensor,
    row_start: torch.Tensor,
    certain: torch.Tensor,
    parents: torch.Tensor,
    out: torch.Tensor,
    backend: Backend = "auto",
    *,
    max_rows: int = MAX_ROWS,
) -> None:
    """Advance each request's state by its certain rows, and give the outputs of the last of these and of the tree's.

    The contract, in float32, for a request with rows whose block is not 0::

        states = {-1: state[block]}
        for row in range(row_start[request + 1] - row_start[request]):
            S = states[parents[row]] * exp(decay[row])  # [H, V, K], as all here, by head
            w = v[row] if beta is None else beta[row] * (v[row] - S @ k[row])
            states[row] = S + outer(w, k[row])
            if row >= certain[request] - 1:
                out[row] = states[row] @ q[row]
        state[block] = states[certain[request] - 1]

    Args:
        q: float32, bfloat16 or float16 ``[rows, G, K]``, last dimension contiguous, as those of ``k`` to ``beta``. Head
            ``h`` has group ``h // (H // G)``.
        k: as ``q``.
        v: ``[rows, H, V]`` of the same dtype; ``H`` is a multiple of ``G``.
        decay: float32 ``[rows, H]``, logarithms of what the state is multiplied by, 0 at most.
        beta: float32 ``[rows, H]``: gated delta net; None: Mamba-2.
        state: float32, bfloat16 or float16 ``[num_blocks, H, V, K]``, of any strides.
        blocks: int32 ``[R]``: where each request's state is; 0: the request is padding, for which nothing is done.
        row_start: int32 ``[R + 1]``: where each request's rows begin.
        certain: int32 ``[R]``: how many rows of each request, the first, are text, a chain; 1 at least.
        parents: int32 ``[rows]``: each row's parent as an offset inside its request, smaller than the row's own; -1 for
            the first. Rows that are not certain have the last certain one, the root, among their ancestors.
        out: shape and dtype of ``v``, last dimension contiguous. Other rows are not written.
        backend: "auto" is triton on CUDA, numba on the CPU, else torch. "numba" takes multiples of 16 for K and V.
        max_rows: no request has more rows from its root on, as far as the host knows: the closer, the better triton's
            launch fits, which takes MAX_ROWS at most.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit. The values are not looked at.
    """
    _validate_rows(q, k, v, decay, beta, state, out)
    requests = len(blocks)
    for name, tensor, length in (
        ("blocks", blocks, requests),
        ("row_start", row_start, requests + 1),
        ("certain", certain, requests),
        ("parents", parents, len(q)),
    ):
        good = tensor.dtype == torch.int32 and tensor.device == q.device and tensor.is_contiguous()
        if not good or tensor.shape != (length,):
            raise ValueError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)} on {tensor.device} must be contiguous int32 [{length}] "
                f"on q's device {q.device}; pass {name}.to(q.device, torch.int32)"
            )
    if max_rows < 1:
        raise ValueError(f"max_rows={max_rows} must be 1 at least; leave it out")
    form: Any
    match backends.choose(backend, q):
        case "numba":
            from vllm_ext.kernels.recurrent_trees_numba import recurrent_trees_numba as form
        case "triton":
            from vllm_ext.kernels.recurrent_trees_triton import recurrent_trees_triton as form
        case _:
            from vllm_ext.kernels.recurrent_trees_ref import recurrent_trees_ref as form
    form(q, k, v, decay, beta, state, blocks, row_start, certain, parents, out, max_rows)


def _validate_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    out: torch.Tensor,
) -> None:
    if q.dim() != 3 or v.dim() != 3 or state.dim() != 4 or not q.shape[1] or v.shape[1] % q.shape[1]:
        raise ValueError(
            f"q {tuple(q.shape)}, v {tuple(v.shape)} and state {tuple(state.shape)} must be [rows, G, K], [rows, H, V] "
            "and [num_blocks, H, V, K], with H a multiple of G"
        )
    rows, heads, width = v.shape
    shapes = {"q": (q, (rows, *q.shape[1:])), "k": (k, q.shape), "out": (out, v.shape), "v": (v, v.shape)}
    shapes["decay"] = decay, (rows, heads)
    if beta is not None:
        shapes["beta"] = beta, (rows, heads)
    for name, (tensor, shape) in shapes.items():
        dtype = torch.float32 if name in ("decay", "beta") else q.dtype
        packed = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != q.device or not packed:
            raise ValueError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device} must be "
                f"{dtype} {tuple(shape)} on q's device {q.device} with the last dimension contiguous"
            )
    if q.dtype not in DTYPES or state.dtype not in DTYPES:
        raise ValueError(
            f"dtypes of q {q.dtype} and state {state.dtype} must be of {', '.join(map(str, DTYPES))}"
        )
    if state.shape[1:] != (heads, width, q.shape[2]) or state.device != q.device:
        raise ValueError(
            f"state: {tuple(state.shape)} on {state.device} must be [num_blocks, {heads}, {width}, {q.shape[2]}] on "
            f"q's device {q.device}"
        )
