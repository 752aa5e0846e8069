# SPDX-License-Identifier: Apache-2.0
"""Attention of draft-tree rows over a paged KV cache.

Row j of a request has its key and value at flat index ``context_len + j`` of the request's blocks. It attends to
the ``context_len`` tokens before the root, to its ancestors and to itself.
"""

from __future__ import annotations

import os
from typing import Literal

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Backend = Literal["auto", "torch", "numba", "triton"]


def tree_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    *,
    block_table: torch.Tensor,
    first_row: torch.Tensor,
    num_rows: torch.Tensor,
    context_len: torch.Tensor,
    parents: torch.Tensor,
    scale: float,
    backend: Backend = "auto",
) -> None:
    """Softmax attention of tree rows, in float32 inside.

    Args:
        query: float32, bfloat16 or float16 ``[num_tokens, num_heads, head_size]``, last dimension contiguous.
        key_cache: ``[num_blocks, num_kv_heads, block_size, head_size]`` of the same dtype, a view of any
            strides; "numba" wants those of `vec_layout`. ``num_heads`` is a multiple of ``num_kv_heads``.
        value_cache: as ``key_cache``.
        output: shape and dtype of ``query``. Written at the rows of the requests named here and nowhere else.
        block_table: int32 ``[num_requests, max_blocks]``.
        first_row: int32 ``[num_requests]``, row of the request's root in ``query``.
        num_rows: int32 ``[num_requests]``, rows of each request: the root and its draft nodes.
        context_len: int32 ``[num_requests]``, tokens before the root.
        parents: int32 ``[sum(num_rows)]``, each row's parent as an offset inside its request, smaller than the
            row's own; -1 for roots.
        scale: factor of the scores.
        backend: "auto" takes numba on the CPU, triton on CUDA and torch elsewhere.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit. The values of the five int arrays are
            not looked at: this runs once a layer.
    """
    _validate(query, key_cache, value_cache, output, backend)
    _validate_integers(query, block_table, first_row, num_rows, context_len, parents)
    if backend == "auto":
        backend = {"cpu": "numba", "cuda": "triton"}.get(query.device.type, "torch")  # type: ignore[assignment]
    arguments = (
        query,
        key_cache,
        value_cache,
        output,
        block_table,
        first_row,
        num_rows,
        context_len,
        parents,
    )
    # Imported here: a backend that is not used may be missing, and costs nothing.
    if backend == "numba":
        from vllm_ext.kernels.tree_attention_numba import tree_attention_numba

        tree_attention_numba(*arguments, scale)
    elif backend == "triton":
        from vllm_ext.kernels.tree_attention_triton import tree_attention_triton

        tree_attention_triton(*arguments, scale)
    else:
        from vllm_ext.kernels.tree_attention_ref import tree_attention_ref

        tree_attention_ref(*arguments, scale)


def vec_layout(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's CPU cache in its "vec" layout as key and value views.

    A block of one KV head is the keys transposed, ``[head_size][block_size]``, then the values,
    ``[block_size][head_size]``.

    Args:
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.

    Returns:
        Key and value cache, both ``[num_blocks, num_kv_heads, block_size, head_size]``, sharing its memory.
    """
    num_blocks, num_kv_heads, block_size, width = kv_cache.shape
    shape = (num_blocks, num_kv_heads, block_size, width // 2)
    block, head = kv_cache.stride()[:2]
    start = kv_cache.storage_offset()
    keys = kv_cache.as_strided(shape, (block, head, 1, block_size), start)
    values = kv_cache.as_strided(shape, (block, head, shape[3], 1), start + block_size * shape[3])
    return keys, values


def _validate(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    backend: str,
) -> None:
    if query.dim() != 3 or query.stride(2) != 1:
        raise ValueError(
            f"query: shape {tuple(query.shape)}, strides {query.stride()} must be [num_tokens, num_heads, "
            "head_size] with the last dimension contiguous; pass query.contiguous()"
        )
    if query.dtype not in DTYPES or not query.dtype == key_cache.dtype == value_cache.dtype == output.dtype:
        raise ValueError(
            f"dtypes of query {query.dtype}, key_cache {key_cache.dtype}, value_cache {value_cache.dtype} and "
            f"output {output.dtype} must be one of {', '.join(map(str, DTYPES))}, the same for all four"
        )
    if output.shape != query.shape or output.stride(2) != 1:
        raise ValueError(
            f"output: shape {tuple(output.shape)}, strides {output.stride()} must be query's shape "
            f"{tuple(query.shape)} with the last dimension contiguous"
        )
    if (
        key_cache.dim() != 4
        or key_cache.shape != value_cache.shape
        or key_cache.shape[3] != query.shape[2]
        or query.shape[1] % key_cache.shape[1]
    ):
        raise ValueError(
            f"key_cache.shape={tuple(key_cache.shape)} and value_cache.shape={tuple(value_cache.shape)} must "
            "both be [num_blocks, num_kv_heads, block_size, head_size] with query's head_size "
            f"{query.shape[2]} and a num_kv_heads that divides its num_heads {query.shape[1]}"
        )
    if backend not in ("auto", "torch", "numba", "triton"):
        raise ValueError(f"backend={backend!r} must be 'auto', 'torch', 'numba' or 'triton'; leave it out")
    device = query.device.type
    if backend == "numba" and device != "cpu":
        raise ValueError(
            f"backend='numba' takes CPU tensors, query.device={query.device}; use backend='auto'"
        )
    if backend == "triton" and device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"backend='triton' takes CUDA tensors, query.device={query.device}; use backend='auto', or set "
            "TRITON_INTERPRET=1 before triton is imported"
        )


def _validate_integers(
    query: torch.Tensor,
    block_table: torch.Tensor,
    first_row: torch.Tensor,
    num_rows: torch.Tensor,
    context_len: torch.Tensor,
    parents: torch.Tensor,
) -> None:
    # One test for the good case; which argument is bad is looked for afterwards.
    int32, device = torch.int32, query.device
    if (
        block_table.dtype == first_row.dtype == num_rows.dtype == context_len.dtype == parents.dtype == int32
        and block_table.device == first_row.device == num_rows.device == context_len.device == device
        and parents.device == device
        and block_table.dim() == 2
        and parents.dim() == 1
        and first_row.shape == num_rows.shape == context_len.shape == block_table.shape[:1]
        and (block_table.shape[1] == 1 or block_table.stride(1) == 1)
        and first_row.is_contiguous()
        and num_rows.is_contiguous()
        and context_len.is_contiguous()
        and parents.is_contiguous()
    ):
        return
    requests = block_table.shape[0]
    named = {"first_row": first_row, "num_rows": num_rows, "context_len": context_len, "parents": parents}
    for name, tensor in {"block_table": block_table, **named}.items():
        if tensor.dtype != int32 or tensor.device != device:
            raise ValueError(
                f"{name}: {tensor.dtype} on {tensor.device} must be torch.int32 on query's device {device}; "
                f"pass {name}.to(query.device, torch.int32)"
            )
    if block_table.dim() != 2 or block_table.stride(1) != 1:
        raise ValueError(
            f"block_table: shape {tuple(block_table.shape)}, strides {block_table.stride()} must be "
            "[num_requests, max_blocks] with the last dimension contiguous; pass block_table.contiguous()"
        )
    for name, tensor in named.items():
        shape = "[sum(num_rows)]" if name == "parents" else f"[num_requests={requests}]"
        if tensor.dim() != 1 or not tensor.is_contiguous() or (name != "parents" and len(tensor) != requests):
            raise ValueError(
                f"{name}: shape {tuple(tensor.shape)}, strides {tensor.stride()} must be {shape}, "
                f"contiguous; num_requests is block_table's; pass {name}[:num_requests].contiguous()"
            )
