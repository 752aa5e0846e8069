# SPDX-License-Identifier: Apache-2.0
"""`top_k_ids` on the CPU: a vectorised scan for block maxima, then a look into the best blocks.

Floats are compared as integers of their own width, so one kernel serves bfloat16 and float16 and
one float32. With T the k-th largest block maximum, k elements are >= T, each in a block of its own;
so the k best elements are all >= T, and only blocks whose maximum is >= T need a second look.
"""

import functools
from typing import Any

import numba
import numpy as np
import torch

from vllm_ext.kernels import backends
from vllm_ext.kernels.top_k import INTEGER_FORM

# Large enough for the horizontal maximum at a block's end not to matter, small enough for the
# second look (k blocks, scalar) not to: 64 and 512 are slower at 49152 logits.
BLOCK = 256


def top_k_ids_numba(logits: torch.Tensor, k: int) -> torch.Tensor:
    """See `vllm_ext.kernels.top_k.top_k_ids`, which validates."""
    rows, vocab = logits.shape
    out = torch.empty((rows, k), dtype=torch.int32)
    if rows == 0:
        return out
    stride = logits.stride(0)
    dtype, inf = INTEGER_FORM[logits.dtype]
    # One flat array over all rows: a strided 2-D array would lose numba the knowledge that the
    # elements of a row are adjacent, and with it the vector loads.
    flat = logits.view(dtype).as_strided(((rows - 1) * stride + vocab,), (1,)).numpy()
    _compiled()(flat, stride, vocab, inf, out.numpy())
    return out


@functools.cache
def _compiled() -> Any:
    # numba compiles at the first call of each integer width, not here and not at import.
    return backends.compile_cached(numba.njit, nogil=True)(_top_k)


@numba.njit  # type: ignore[untyped-decorator]
def _key(block: Any, i: int, inf: int) -> Any:
    """The i-th float of `block` as an integer that orders like it.

    Floats are sign and magnitude, so the key is the signed magnitude: both zeros are 0. The lowest
    integer is left free as "nothing yet", the next one is NaN.
    """
    # numba computes in 64 bits; each step is narrowed again, or LLVM would use an eighth of a
    # vector register's lanes or so. Branch-free selects, so that it vectorises at all.
    narrow = block.dtype.type
    bits = block[i]
    magnitude = narrow(bits & np.iinfo(block.dtype).max)
    key = narrow(-magnitude) if bits < 0 else magnitude
    return narrow(np.iinfo(block.dtype).min + 1) if magnitude > inf else key


@numba.njit  # type: ignore[untyped-decorator]
def _insert(keys: Any, ids: Any, key: int, i: int) -> None:
    """Put `key` into the descending `keys`, behind its equals, and drop the last."""
    j = keys.shape[0] - 1
    while j > 0 and keys[j - 1] < key:
        keys[j] = keys[j - 1]
        ids[j] = ids[j - 1]
        j -= 1
    keys[j] = key
    ids[j] = i


def _top_k(flat: Any, stride: int, vocab: int, inf: int, out: Any) -> None:
    rows, k = out.shape
    blocks = (vocab + BLOCK - 1) // BLOCK
    nothing = flat.dtype.type(np.iinfo(flat.dtype).min)
    inf = flat.dtype.type(inf)
    maxima = np.empty(blocks, flat.dtype)
    keys = np.empty(k, flat.dtype)
    for row in range(rows):
        logits = flat[row * stride : row * stride + vocab]
        ids = out[row]

        keys[:] = nothing
        for b in range(blocks):
            block = logits[b * BLOCK : (b + 1) * BLOCK]
            best = nothing
            # By index: `for x in block` reads the stride at run time, and gathers.
            for i in range(block.shape[0]):
                best = max(best, _key(block, i, inf))
            maxima[b] = best
            if best > keys[k - 1]:
                _insert(keys, ids, best, b)  # ids is scratch until the second pass
        threshold = keys[k - 1]  # "nothing" where there are fewer than k blocks

        keys[:] = nothing
        for b in range(blocks):
            # Ascending ids and a strict >: of equal logits the lowest id comes first and stays.
            if maxima[b] < threshold or maxima[b] <= keys[k - 1]:
                continue
            block = logits[b * BLOCK : (b + 1) * BLOCK]
            for i in range(block.shape[0]):
                key = _key(block, i, inf)
                if key >= threshold and key > keys[k - 1]:
                    _insert(keys, ids, key, b * BLOCK + i)
