# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""`tree_attention` on CUDA: one program for each request, KV head and tile of rows.

Which nodes a row sees it reads from `TreeRows.ancestor_bits`. The kernel goes over the request's keys once, context
and nodes alike, and looks up the bit only behind the context.
"""

import os

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.tree_attention import MAX_ROWS, TreeRows

ROWS = 16  # the least tl.dot takes
KEYS = 32  # of one step of the loop


def tree_attention_triton(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    trees: TreeRows,
    scale: float,
) -> None:
    """See `vllm_ext.kernels.tree_attention.tree_attention`, which validates all but the layout.

    Raises:
        ValueError: the caches have not four dimensions.
    """
    if key_cache.dim() != 4:
        raise ValueError(
            f"key_cache.shape={tuple(key_cache.shape)}: backend='triton' takes [num_blocks, num_kv_heads, block_size, "
            "head_size]; use backend='torch'"
        )
    num_requests, num_heads, head_size = len(trees.num_rows), query.shape[1], query.shape[2]
    num_kv_heads, block_size = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    # A tree has at most 129 rows; programs behind a smaller one's end return at once.
    tiles = _tiles(len(trees.parents), num_requests, group)
    _tree_attention[(num_requests, num_kv_heads, tiles)](
        query,
        key_cache,
        value_cache,
        output,
        trees.block_table,
        trees.first_row,
        trees.num_rows,
        trees.num_past,
        trees.row_start,
        trees.context_len,
        trees.ancestor_bits,
        scale * 1.4426950408889634,
        query.stride(0),
        query.stride(1),
        output.stride(0),
        output.stride(1),
        *key_cache.stride(),
        *value_cache.stride(),
        trees.block_table.stride(0),
        block_size,
        head_size,
        GROUP=group,
        HEAD=triton.next_power_of_2(head_size),
        ROWS=ROWS,
        KEYS=KEYS,
        WORDS=MAX_ROWS // 32,
        # Tensor cores take 16-bit operands as they are; the interpreter multiplies bfloat16's bits.
        WIDE=query.dtype == torch.float32 or os.environ.get("TRITON_INTERPRET") == "1",
    )


def _tiles(total_rows: int, num_requests: int, group: int) -> int:
    """Row tiles of the largest tree there can be among so many rows: known without asking the device."""
    most = min(total_rows - num_requests + 1, MAX_ROWS)
    return -(-most * group // ROWS)


@triton.jit
def _tree_attention(
    query,
    keys,
    values,
    output,
    block_table,
    first_row,
    num_rows,
    num_past,
    row_start,
    context_len,
    ancestors,
    scale,
    query_row,
    query_head,
    output_row,
    output_head,
    key_block,
    key_head,
    key_token,
    key_dim,
    value_block,
    value_head,
    value_token,
    value_dim,
    table_row,
    block_size,
    head_size,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WORDS: tl.constexpr,
    WIDE: tl.constexpr,
):
    request, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, past = tl.load(num_rows + request), tl.load(num_past + request)
    wide = past * GROUP + tile * ROWS + tl.arange(0, ROWS)  # row r, head g of the group: r * GROUP + g
    if past * GROUP + tile * ROWS >= rows * GROUP:
        return
    context = tl.load(context_len + request)
    row = wide // GROUP
    real = row < rows
    dims = tl.arange(0, HEAD)
    inside = dims < head_size
    query_head_of = head * GROUP + wide % GROUP
    at = (tl.load(first_row + request) + row - past).to(tl.int64)
    q = tl.load(
        query + at[:, None] * query_row + query_head_of[:, None] * query_head + dims[None, :],
        mask=real[:, None] & inside[None, :],
        other=0.0,
    )
    bits_at = ancestors + (tl.load(row_start + request) + row) * WORDS
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, HEAD], tl.float32)
    for start in range(0, context + rows, KEYS):
        token = start + tl.arange(0, KEYS)
        there = token < context + rows
        block = tl.load(block_table + request * table_row + token // block_size, mask=there, other=0).to(
            tl.int64
        )
        offset = token % block_size
        k = tl.load(
            keys
            + (block * key_block + head * key_head + offset * key_token)[None, :]
            + dims[:, None].to(tl.int64) * key_dim,
            mask=there[None, :] & inside[:, None],
            other=0.0,
        )
        if WIDE:
            scores = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="ieee") * scale
        else:
            scores = tl.dot(q, k) * scale
        node = token - context  # negative in the context
        word = tl.load(
            bits_at[:, None] + tl.maximum(node, 0)[None, :] // 32,
            mask=real[:, None] & ((node >= 0) & there)[None, :],
            other=0,
        )
        visible = (node < 0)[None, :] | (((word >> (tl.maximum(node, 0) % 32)[None, :]) & 1) != 0)
        scores = tl.where(visible & there[None, :], scores, float("-inf"))
        top = tl.maximum(best, tl.max(scores, 1))
        # A tile's first keys may all be hidden from a row (other branches), never from then on.
        base = tl.where(top == float("-inf"), 0.0, top)
        keep = tl.exp2(best - base)
        share = tl.exp2(scores - base[:, None])
        v = tl.load(
            values
            + (block * value_block + head * value_head + offset * value_token)[:, None]
            + dims[None, :].to(tl.int64) * value_dim,
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        weight = weight * keep + tl.sum(share, 1)
        total = total * keep[:, None]
        if WIDE:
            total += tl.dot(share, v.to(tl.float32), input_precision="ieee")
        else:
            total += tl.dot(share.to(v.dtype), v)
        best = top
    result = total / tl.where(real, weight, 1.0)[:, None]
    tl.store(
        output + at[:, None] * output_row + query_head_of[:, None] * output_head + dims[None, :],
        result.to(output.dtype.element_ty),
        mask=real[:, None] & inside[None, :],
    )
