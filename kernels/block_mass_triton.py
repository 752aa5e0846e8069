# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""`block_mass` on CUDA: for each row and head the logarithm of its weights' sum, then for each block the weights.

Sums are made in one order, without atomic additions: the choice that is made of them must not depend on chance.
"""

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.block_mass import AskedRows

TOKENS = 32  # at a time, at most


def add_block_mass_triton(query: torch.Tensor, keys: torch.Tensor, asked: AskedRows, scale: float) -> None:
    """See `vllm_ext.kernels.block_mass.add_block_mass`."""
    (_, heads, head_size), block_size = query.shape, keys.shape[2]
    number, blocks = asked.mass.shape
    lse = torch.empty(number, heads, dtype=torch.float32, device=query.device)
    common = {
        "TOKENS": min(TOKENS, triton.next_power_of_2(block_size)),
        "HEAD": triton.next_power_of_2(head_size),
    }
    sizes = (
        query.stride(0),
        query.stride(1),
        *keys.stride(),
        asked.table.stride(0),
        block_size,
        head_size,
        heads // keys.shape[1],
        scale,
        0 if asked.trees is None else asked.trees.bits.stride(0),
    )
    whole, bits = (None, None) if asked.trees is None else asked.trees
    pointers = (query, keys, asked.table, asked.request, asked.row, asked.seen, whole, bits)
    with torch.cuda.device_of(query):
        _sum[(number, heads)](*pointers, lse, *sizes, heads, **common)
        _add[(number, blocks)](*pointers, lse, asked.mass, *sizes, heads, blocks, **common)


@triton.jit
def _scores(
    query,
    keys,
    table,
    row,
    head,
    block,
    first,
    seen,
    whole,
    bits,
    query_row,
    query_head,
    key_block,
    key_head,
    key_token,
    key_dim,
    block_size,
    head_size,
    group,
    scale,
    TOKENS: tl.constexpr,
    HEAD: tl.constexpr,
):
    """float32 ``[TOKENS]`` of a block's tokens from ``first`` on; -inf for those that are not seen."""
    dim, token = tl.arange(0, HEAD), first + tl.arange(0, TOKENS)
    place = block * block_size + token
    inside = (token < block_size) & (place < seen)
    if bits is not None:
        node = tl.maximum(place - whole, 0)
        words = tl.load(bits + node // 32, mask=inside & (place >= whole), other=-1)
        inside &= ((words >> (node % 32)) & 1) == 1
    q = tl.load(query + row * query_row + head * query_head + dim, mask=dim < head_size, other=0).to(
        tl.float32
    )
    base = tl.load(table + block).to(tl.int64) * key_block + (head // group) * key_head
    at = token[:, None] * key_token + dim[None, :] * key_dim
    k = tl.load(keys + base + at, mask=inside[:, None] & (dim < head_size)[None, :], other=0).to(tl.float32)
    return tl.where(inside, tl.sum(k * q[None, :], 1) * scale, float("-inf"))


@triton.jit
def _sum(
    query,
    keys,
    table,
    request,
    rows,
    seen_of,
    whole_of,
    bits_of,
    lse,
    query_row,
    query_head,
    key_block,
    key_head,
    key_token,
    key_dim,
    stride,
    block_size,
    head_size,
    group,
    scale,
    bits_row,
    heads,
    TOKENS: tl.constexpr,
    HEAD: tl.constexpr,
):
    place, head = tl.program_id(0), tl.program_id(1)
    row, seen = tl.load(rows + place).to(tl.int64), tl.load(seen_of + place)
    if bits_of is not None:
        whole, bits = tl.load(whole_of + place), bits_of + place * bits_row
    else:
        whole, bits = seen, None
    table += tl.load(request + place).to(tl.int64) * stride
    best, total = float("-inf"), 0.0
    for block in range(tl.cdiv(seen, block_size)):
        for first in range(0, tl.minimum(block_size, seen - block * block_size), TOKENS):
            scores = _scores(
                query,
                keys,
                table,
                row,
                head,
                block,
                first,
                seen,
                whole,
                bits,
                query_row,
                query_head,
                key_block,
                key_head,
                key_token,
                key_dim,
                block_size,
                head_size,
                group,
                scale,
                TOKENS,
                HEAD,
            )
            top = tl.maximum(best, tl.max(scores, 0))
            # Of a tree a row may see none of these.
            base = tl.where(top > float("-inf"), top, 0.0)
            total = total * tl.exp(best - base) + tl.sum(tl.exp(scores - base), 0)
            best = top
    tl.store(lse + place * heads + head, best + tl.log(total))


@triton.jit
def _add(
    query,
    keys,
    table,
    request,
    rows,
    seen_of,
    whole_of,
    bits_of,
    lse,
    mass,
    query_row,
    query_head,
    key_block,
    key_head,
    key_token,
    key_dim,
    stride,
    block_size,
    head_size,
    group,
    scale,
    bits_row,
    heads,
    blocks,
    TOKENS: tl.constexpr,
    HEAD: tl.constexpr,
):
    place, block = tl.program_id(0), tl.program_id(1)
    row, seen = tl.load(rows + place).to(tl.int64), tl.load(seen_of + place)
    if bits_of is not None:
        whole, bits = tl.load(whole_of + place), bits_of + place * bits_row
    else:
        whole, bits = seen, None
    if block * block_size < seen:
        table += tl.load(request + place).to(tl.int64) * stride
        weight = 0.0
        for head in range(heads):
            total = tl.load(lse + place * heads + head)
            for first in range(0, tl.minimum(block_size, seen - block * block_size), TOKENS):
                scores = _scores(
                    query,
                    keys,
                    table,
                    row,
                    head,
                    block,
                    first,
                    seen,
                    whole,
                    bits,
                    query_row,
                    query_head,
                    key_block,
                    key_head,
                    key_token,
                    key_dim,
                    block_size,
                    head_size,
                    group,
                    scale,
                    TOKENS,
                    HEAD,
                )
                weight += tl.sum(tl.exp(scores - total), 0)
        at = mass + place * blocks + block
        tl.store(at, tl.load(at) + weight)
