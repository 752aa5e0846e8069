# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Where a context or a pair stands in the tables: `recycling_ref.text_place` and `pair_place`, in Triton."""

import triton
import triton.language as tl

from vllm_ext.kernels import recycling

BASE, SCRAMBLE = tl.constexpr(recycling.BASE), tl.constexpr(recycling.SCRAMBLE)


@triton.jit
def with_token(hashed, token):
    """The hash of a context that is longer by this token."""
    return (hashed ^ token) * BASE


@triton.jit
def text_place(hashed, length, texts):
    """Where the successor of a context stands, and its key there."""
    mixed = _scrambled(with_token(hashed, length))
    return (mixed >> 40) & (texts - 1), (((mixed >> 8) & 0x3FFFFFFF) + 1).to(tl.int32)


@triton.jit
def pair_place(previous, token, pairs):
    """Where the row of a pair stands behind the tokens' rows, and its key there."""
    mixed = _scrambled(with_token(with_token(tl.zeros_like(token), token), previous))
    return (mixed >> 40) & (pairs - 1), (previous << 32) + token + 1


@triton.jit
def _scrambled(value):
    value = value * SCRAMBLE
    return (value ^ ((value >> 32) & 0xFFFFFFFF)) * SCRAMBLE
