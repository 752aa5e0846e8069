# SPDX-License-Identifier: Apache-2.0
"""`top_k_ids` on CUDA: each block of a row finds its k best, a second launch merges them.

A logit and its id become one int64 that orders as the contract asks, so a round is one maximum and
no two are equal.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.top_k import INTEGER_FORM

BLOCK = 1024

_NOTHING = tl.constexpr(-(2**63))  # below every logit: beyond the row, or already taken
_NAN = tl.constexpr(-(2**31) + 1)  # below -inf
_ID = tl.constexpr(0x7FFFFFFF)  # the bits of an id; stored inverted, so the lowest id wins


def top_k_ids_triton(logits: torch.Tensor, k: int) -> torch.Tensor:
    """See `vllm_ext.kernels.top_k.top_k_ids`, which validates."""
    rows, vocab = logits.shape
    out = torch.empty((rows, k), dtype=torch.int32, device=logits.device)
    if rows == 0:
        return out
    dtype, inf = INTEGER_FORM[logits.dtype]
    bits, width = logits.view(dtype), 8 * logits.element_size()
    blocks = triton.cdiv(vocab, BLOCK)
    best = torch.empty((rows, blocks * k), dtype=torch.int64, device=logits.device)
    with torch.cuda.device_of(logits):  # triton launches on the current device; no-op on the CPU
        _block_top_k[(rows, blocks)](
            bits, bits.stride(0), vocab, best, blocks * k, k, inf, 2 ** (width - 1) - 1, BLOCK
        )
        # At least 32 wide: a reduction over fewer elements than a warp has lanes is untried.
        _merge[(rows,)](best, blocks * k, out, k, max(32, triton.next_power_of_2(blocks * k)))
    return out


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
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(logits + row * row_stride + ids, mask=ids < vocab, other=0).to(tl.int32)
    # Signed magnitude: orders like the float, and both zeros are 0.
    magnitude = bits & MAX
    key = tl.where(bits < 0, -magnitude, magnitude)
    key = tl.where(magnitude > INF, _NAN, key)
    packed = (key.to(tl.int64) << 32) | (ids ^ _ID)
    packed = tl.where(ids < vocab, packed, _NOTHING)
    best += row * best_stride + block * k
    for i in range(k):
        top = tl.max(packed, axis=0)
        tl.store(best + i, top)
        packed = tl.where(packed == top, _NOTHING, packed)


@triton.jit
def _merge(best, count, out, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    packed = tl.load(best + row * count + offsets, mask=offsets < count, other=_NOTHING)
    for i in range(k):
        top = tl.max(packed, axis=0)
        tl.store(out + row * k + i, ((top & _ID) ^ _ID).to(tl.int32))
        packed = tl.where(packed == top, _NOTHING, packed)
