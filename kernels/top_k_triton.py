# SPDX-License-Identifier: Apache-2.0
"""`top_k_ids` on CUDA: each block of a row finds its k best, a second launch merges them.

A logit and its id become one integer that orders as the contract asks, so a round is one maximum and no two are equal.
Inside a block 16-bit logits and their places fit 32 bits, which take half the instructions of 64.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.top_k import INTEGER_FORM

BLOCKS = {2: 4096, 4: 1024}  # by bytes of a logit

NOTHING = tl.constexpr(-(2**63))  # below every logit: beyond the row, or already taken
ID = tl.constexpr(0x7FFFFFFF)  # the bits of an id; stored inverted, so the lowest id wins
_NOTHING_SHORT = tl.constexpr(-(2**31))
_PLACE = tl.constexpr(0xFFFF)


def top_k_ids_triton(logits: torch.Tensor, k: int) -> torch.Tensor:
    """See `vllm_ext.kernels.top_k.top_k_ids`, which validates."""
    out = torch.empty((len(logits), k), dtype=torch.int32, device=logits.device)
    if len(logits) == 0:
        return out
    with torch.cuda.device_of(logits):  # triton launches on the current device; no-op on the CPU
        best = block_top_k(logits, k)
        count = best.shape[1]
        # At least 32 wide: a reduction over fewer elements than a warp has lanes is untried.
        _merge[(len(logits),)](best, count, out, k, max(32, triton.next_power_of_2(count)))
    return out


def block_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The k best of each block of each row: int64 ``[rows, blocks * k]`` in the logits' order, ids in the low bits.

    Args:
        logits: see `vllm_ext.kernels.top_k.top_k_ids`, on the current device; one row at least.
        k: likewise.
    """
    rows, vocab = logits.shape
    dtype, inf = INTEGER_FORM[logits.dtype]
    size = logits.element_size()
    bits = logits.view(dtype)
    blocks = triton.cdiv(vocab, BLOCKS[size])
    best = torch.empty((rows, blocks * k), dtype=torch.int64, device=logits.device)
    _block_top_k[(rows, blocks)](
        bits,
        bits.stride(0),
        vocab,
        best,
        blocks * k,
        k,
        inf,
        2 ** (8 * size - 1) - 1,
        SHORT=size == 2,
        BLOCK=BLOCKS[size],
    )
    return best


@triton.jit
def _block_top_k(
    logits,
    row_stride,
    vocab,
    best,
    best_stride,
    k,
    INF: tl.constexpr,
    MAX: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < vocab - block * BLOCK
    bits = tl.load(logits + row * row_stride + block * BLOCK + place, mask=inside, other=0).to(tl.int32)
    # Signed magnitude: orders like the float, and both zeros are 0.
    magnitude = bits & MAX
    key = tl.where(bits < 0, -magnitude, magnitude)
    key = tl.where(magnitude > INF, -MAX, key)  # NaN: below -inf
    best += row * best_stride + block * k
    if SHORT:
        short = tl.where(inside, (key << 16) | (_PLACE - place), _NOTHING_SHORT)
        for i in range(k):
            top = tl.max(short, axis=0)
            whole = ((top >> 16).to(tl.int64) << 32) | (((block * BLOCK + _PLACE - (top & _PLACE)) & ID) ^ ID)
            tl.store(best + i, tl.where(top == _NOTHING_SHORT, NOTHING, whole))
            short = tl.where(short == top, _NOTHING_SHORT, short)
    else:
        packed = (key.to(tl.int64) << 32) | ((block * BLOCK + place) ^ ID)
        packed = tl.where(inside, packed, NOTHING)
        for i in range(k):
            top = tl.max(packed, axis=0)
            tl.store(best + i, top)
            packed = tl.where(packed == top, NOTHING, packed)


@triton.jit
def _merge(best, count, out, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    packed = tl.load(best + row * count + offsets, mask=offsets < count, other=NOTHING)
    for i in range(k):
        top = tl.max(packed, axis=0)
        tl.store(out + row * k + i, ((top & ID) ^ ID).to(tl.int32))
        packed = tl.where(packed == top, NOTHING, packed)
