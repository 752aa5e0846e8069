# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""`ancestor_bits` on CUDA: one program for each request and 32 rows, which all climb at once."""

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.ancestor_bits import MAX_ROWS, WORDS

ROWS = 32


def ancestor_bits_triton(parents: torch.Tensor, row_start: torch.Tensor, out: torch.Tensor) -> None:
    """See `vllm_ext.kernels.ancestor_bits.ancestor_bits`, which validates."""
    requests = len(row_start) - 1
    if requests < 1 or len(parents) == 0:
        return
    tiles = triton.cdiv(min(len(parents), MAX_ROWS), ROWS)
    with torch.cuda.device_of(parents):
        _ancestor_bits[(requests, tiles)](
            parents, row_start, out, ROWS=ROWS, WORDS=WORDS, WORDS_UP=triton.next_power_of_2(WORDS)
        )


@triton.jit
def _ancestor_bits(parents, row_start, out, ROWS: tl.constexpr, WORDS: tl.constexpr, WORDS_UP: tl.constexpr):
    request = tl.program_id(0)
    start = tl.load(row_start + request)
    rows = tl.load(row_start + request + 1) - start
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, WORDS_UP)
    bits = tl.zeros([ROWS, WORDS_UP], tl.int32)
    at = tl.where(row < rows, row, -1)
    while tl.max(at, 0) >= 0:
        bit = tl.where(at >= 0, 1 << (tl.maximum(at, 0) % 32), 0)
        bits |= tl.where((tl.maximum(at, 0) // 32)[:, None] == word[None, :], bit[:, None], 0)
        at = tl.load(parents + start + at, mask=at >= 0, other=-1)
    tl.store(
        out + (start + row)[:, None].to(tl.int64) * WORDS + word[None, :],
        bits,
        mask=(row < rows)[:, None] & (word < WORDS)[None, :],
    )
