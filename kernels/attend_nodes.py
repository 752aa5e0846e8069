# SPDX-License-Identifier: Apache-2.0
"""Attention of draft-tree rows, continued behind the context: what a kernel without masks has done is given.

Attention over disjoint keys adds up by the logarithms of the weights (FlashInfer, arXiv 2501.01005, section 2.2). So a
kernel that knows no trees, FlashAttention for one, may attend to the context, which all rows see; only the nodes need a
mask.
"""

from __future__ import annotations

import torch

from vllm_ext.kernels import backends
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.tree_attention import TreeRows, validate


def attend_nodes(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    context_output: torch.Tensor,
    context_lse: torch.Tensor,
    output: torch.Tensor,
    trees: TreeRows,
    scale: float,
    backend: Backend = "auto",
) -> None:
    """`tree_attention`, where attention over each row's context is known.

    Args:
        query: as in `vllm_ext.kernels.tree_attention.tree_attention`, and so are the caches, ``output``, ``trees`` and
            ``scale``.
        key_cache: see there.
        value_cache: see there.
        context_output: ``[sum(num_rows), num_heads, head_size]`` of query's dtype, last dimension contiguous: row r of
            request i is at ``row_start[i] + r``. Rows of requests without a context are not read.
        context_lse: float32 ``[num_heads, sum(num_rows)]``, last dimension contiguous: the natural logarithm of the sum
            of the exponentials of a row's scores. Not read where ``context_output`` is not.
        output: see there.
        trees: see there.
        scale: see there.
        backend: "auto" takes triton on CUDA and torch elsewhere.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit.
    """
    tensors = (query, key_cache, value_cache, output, context_output, context_lse)
    kind = query.device, *[(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
    prepared = trees.prepared.get(kind)
    if prepared is None:
        validate(query, key_cache, value_cache, output, trees)
        _validate(query, context_output, context_lse, trees)
        prepared = trees.prepared[kind] = {}
    arguments = query, key_cache, value_cache, context_output, context_lse, output, trees, scale
    if backends.choose(backend, query) == "triton":
        from vllm_ext.kernels.tree_attention_triton import attend_nodes_triton

        attend_nodes_triton(*arguments, prepared)
    else:
        from vllm_ext.kernels.attend_nodes_ref import attend_nodes_ref

        attend_nodes_ref(*arguments)


def _validate(
    query: torch.Tensor, context_output: torch.Tensor, context_lse: torch.Tensor, trees: TreeRows
) -> None:
    shape = len(trees.parents), *query.shape[1:]
    if (
        context_output.shape != shape
        or context_output.dtype != query.dtype
        or context_output.device != query.device
        or context_output.stride(2) != 1
    ):
        raise ValueError(
            f"context_output: {context_output.dtype} {tuple(context_output.shape)}, strides {context_output.stride()} "
            f"on {context_output.device} must be {query.dtype} {shape} on {query.device} with the last dimension "
            "contiguous"
        )
    wanted = query.shape[1], len(trees.parents)
    if (
        context_lse.shape != wanted
        or context_lse.dtype != torch.float32
        or context_lse.device != query.device
        or (context_lse.shape[1] > 1 and context_lse.stride(1) != 1)
    ):
        raise ValueError(
            f"context_lse: {context_lse.dtype} {tuple(context_lse.shape)}, strides {context_lse.stride()} on "
            f"{context_lse.device} must be torch.float32 {wanted} on {query.device} with the last dimension contiguous"
        )
