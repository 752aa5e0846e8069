# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""`encoded_attention` of decoding rows over blocks of codec kivi, on CUDA: one program for each row and KV head.

A program decodes the blocks before its own one by one, keys as ``[head_size, block_size]`` and values as ``[block_size,
head_size]``, with an online softmax over them; then come the tokens that lie in its own block as they are, and the rows
of the step that it sees. New keys and values are put into the cache by the readable form.
"""

import os
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.block_format import BlockFormat
from vllm_ext.kernels.encoded_attention import EncodedRows
from vllm_ext.kernels.encoded_attention_ref import write_rows

HEADS = 16  # the least tl.dot takes
LOG2_E = 1.4426950408889634


def encoded_attention_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    output: torch.Tensor,
    rows: EncodedRows,
    codec: BlockFormat,
    scale: float,
    prepared: dict[str, Any],
) -> None:
    """See `vllm_ext.kernels.encoded_attention.encoded_attention`, which validates.

    Raises:
        ValueError: another codec, rows of a prompt, or rows that read lists.
    """
    if codec.name != "kivi" or rows.reading is not None:
        raise ValueError(
            f"codec {codec.name!r}: backend='triton' has codec kivi, without lists; use backend='torch'"
        )
    if not prepared:
        prepared.update(_prepare(rows, codec))
    write_rows(query, key, value, pages, rows, codec)
    group, head_size = query.shape[1] // pages.shape[1], codec.head_size
    bits, group_size = codec.numbers
    _attend_kivi[(len(prepared["request"]), pages.shape[1])](
        *(query, key, value, output, pages, pages.view(torch.float16), pages.view(query.dtype)),
        *(rows.block_table, rows.context_len, rows.first_row),
        *(prepared["request"], prepared["query_row"], prepared["seen"]),
        scale * LOG2_E,
        *(query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
        *(output.stride(0), output.stride(1), pages.stride(0), pages.stride(1)),
        *(
            rows.block_table.stride(0),
            prepared["seen"].stride(0),
            codec.raw_tokens_per_block(query.element_size()),
        ),
        rows.block_table.shape[1] if codec.window_blocks is None else codec.window_blocks,
        codec.sink_blocks,
        GROUP=group,
        HEADS=max(HEADS, triton.next_power_of_2(group)),
        HEAD=head_size,
        BLOCK=codec.block_size,
        BITS=bits,
        SHARED=group_size,
        SEEN=prepared["seen"].shape[1],
        WIDE=query.dtype == torch.float32 or os.environ.get("TRITON_INTERPRET") == "1",
    )


def _prepare(rows: EncodedRows, codec: BlockFormat) -> dict[str, torch.Tensor]:
    """By row its request, where in the query it is, and the rows of its request that it sees, uint8."""
    columns = (rows.num_rows, rows.num_settled, rows.context_len, rows.first_row)
    requests = list(zip(*(column.tolist() for column in columns), strict=True))
    for num, settled, context, _ in requests:
        if settled == num > 1 and context // codec.block_size != (context + num - 1) // codec.block_size:
            raise ValueError(
                f"{num} rows behind {context} tokens go over a block's end: backend='triton' takes rows that decode; "
                "use backend='torch'"
            )
    width = max(HEADS, triton.next_power_of_2(max(num for num, *_ in requests)))
    parents, start, request, query_row = rows.parents.tolist(), 0, [], []
    seen = torch.zeros(len(parents), width, dtype=torch.uint8)
    for i, (num, _, _, first) in enumerate(requests):
        for row in range(num):
            request.append(i)
            query_row.append(first + row)
            ancestor = row
            while ancestor >= 0:
                seen[start + row, ancestor] = 1
                ancestor = parents[start + ancestor]
        start += num
    device = rows.parents.device
    return {
        "request": torch.tensor(request, dtype=torch.int32, device=device),
        "query_row": torch.tensor(query_row, dtype=torch.int32, device=device),
        "seen": seen.to(device),
    }


@triton.jit
def _codes(bytes_, row, column, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Of rows of packed codes; the byte i of a row has the columns i, i + WIDTH, and so on."""
    byte = tl.load(bytes_ + row * WIDTH + column % WIDTH).to(tl.int32)
    return ((byte >> (column // WIDTH * BITS)) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def _multiply(a, b, WIDE: tl.constexpr, dtype: tl.constexpr):
    """Tensor cores take 16-bit operands as they are; the interpreter multiplies bfloat16's bits."""
    if WIDE:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a.to(dtype), b.to(dtype))


@triton.jit
def _take_in(scores, values, best, total, mixed, WIDE: tl.constexpr, dtype: tl.constexpr):
    """A step of the online softmax, base 2."""
    top = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - top[:, None])
    keep = tl.exp2(best - top)
    mixed = mixed * keep[:, None] + _multiply(weights, values, WIDE, dtype)
    return top, total * keep + tl.sum(weights, 1), mixed


@triton.jit
def _attend_kivi(
    query,
    key,
    value,
    output,
    pages,
    halves,
    raw,
    block_table,
    context_len,
    first_row,
    request_of,
    query_row_of,
    seen,
    scale,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    output_row,
    output_head,
    page_block,
    page_head,
    table_row,
    seen_row,
    raw_tokens,
    window_blocks,
    sink_blocks,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    SHARED: tl.constexpr,
    SEEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    request = tl.load(request_of + row).to(tl.int64)
    at_row = tl.load(query_row_of + row).to(tl.int64)
    context = tl.load(context_len + request).to(tl.int64)
    first = tl.load(first_row + request).to(tl.int64)
    table = block_table + request * table_row
    dtype: tl.constexpr = query.dtype.element_ty
    g, d, t = tl.arange(0, HEADS), tl.arange(0, HEAD), tl.arange(0, BLOCK)
    inside = (g < GROUP)[:, None]
    q = tl.load(
        query + at_row * query_row + (head * GROUP + g)[:, None] * query_head + d[None],
        mask=inside,
        other=0.0,
    )
    q = q.to(tl.float32) * scale
    best = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    mixed = tl.zeros((HEADS, HEAD), tl.float32)

    block = context // BLOCK
    CODES: tl.constexpr = HEAD * BLOCK * BITS // 8  # bytes of one side
    AFFINE: tl.constexpr = HEAD * BLOCK // SHARED  # scales of one side
    dense = tl.maximum(block - window_blocks, 0)
    sinks = tl.minimum(sink_blocks, dense)
    for n in range(sinks + block - dense):
        index = tl.where(n < sinks, n, dense + n - sinks)
        page = tl.load(table + index).to(tl.int64) * page_block + head * page_head
        affine = halves + page // 2 + CODES
        codes = _codes(pages + page, d[:, None], t[None], BLOCK * BITS // 8, BITS)
        of_group = affine + (t // SHARED)[None] * HEAD + d[:, None]
        keys = codes * tl.load(of_group).to(tl.float32) + tl.load(of_group + AFFINE).to(tl.float32)
        codes = _codes(pages + page + CODES, t[:, None], d[None], HEAD * BITS // 8, BITS)
        of_group = affine + 2 * AFFINE + (d // SHARED)[None] * BLOCK + t[:, None]
        values = codes * tl.load(of_group).to(tl.float32) + tl.load(of_group + AFFINE).to(tl.float32)
        scores = _multiply(q, keys, WIDE, dtype)
        best, total, mixed = _take_in(scores, values, best, total, mixed, WIDE, dtype)

    # What lies in the block as it is, in the bytes of those behind it.
    lying = context - block * BLOCK
    if lying > 0:
        there = t < lying
        page = tl.load(table + block + 1 + t // raw_tokens, mask=there, other=0).to(tl.int64)
        SIZE: tl.constexpr = query.dtype.element_ty.primitive_bitwidth // 8
        at = (page * page_block + head * page_head) // SIZE + t % raw_tokens * (2 * HEAD)
        keys = tl.load(raw + at[None] + d[:, None], mask=there[None], other=0.0).to(tl.float32)
        values = tl.load(raw + at[:, None] + HEAD + d[None], mask=there[:, None], other=0.0).to(tl.float32)
        scores = tl.where(there[None], _multiply(q, keys, WIDE, dtype), float("-inf"))
        best, total, mixed = _take_in(scores, values, best, total, mixed, WIDE, dtype)

    s = tl.arange(0, SEEN)
    there = tl.load(seen + row * seen_row + s) > 0
    at = (first + s)[None] * key_row + head * key_head + d[:, None]
    keys = tl.load(key + at, mask=there[None], other=0.0).to(tl.float32)
    at = (first + s)[:, None] * value_row + head * value_head + d[None]
    values = tl.load(value + at, mask=there[:, None], other=0.0).to(tl.float32)
    scores = tl.where(there[None], _multiply(q, keys, WIDE, dtype), float("-inf"))
    best, total, mixed = _take_in(scores, values, best, total, mixed, WIDE, dtype)
    to = output + at_row * output_row + (head * GROUP + g)[:, None] * output_head + d[None]
    tl.store(to, (mixed / total[:, None]).to(dtype), mask=inside)
