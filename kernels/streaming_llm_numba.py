# SPDX-License-Identifier: Apache-2.0
"""Blocks of codec streaming_llm, for kernels of numba; `vllm_ext.codecs.streaming_llm` says what is where.

Arguments as in `kivi_numba`.
"""

from typing import Any

import numba
import numpy as np

from vllm_ext.kernels.numba_vectors import LANES, load_vector, splat, store_vector, vector_max, vector_min

LARGEST = np.float32(65504.0)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def encode_block(
    pages: Any,
    halves: Any,
    at: int,
    side: Any,
    tiles: Any,
    keys: int,
    key_stride: int,
    values: int,
    head_size: int,
    block_size: int,
    numbers: Any,
) -> None:
    """Write a block's bytes. ``tiles[keys:]`` has the keys transposed, rows ``key_stride`` apart."""
    to = at // 2
    for start, stride, rows, columns in (
        (keys, key_stride, head_size, block_size),
        (values, head_size, block_size, head_size),
    ):
        for row in range(rows):
            for i in range(0, columns, LANES):
                x = vector_max(load_vector(tiles, start + row * stride + i), splat(-LARGEST))
                store_vector(halves, to + row * columns + i, vector_min(x, splat(LARGEST)))
        to += rows * columns


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def decode_keys(
    pages: Any, halves: Any, at: int, side: Any, out: Any, head_size: int, block_size: int, numbers: Any
) -> None:
    """``out`` becomes the keys, transposed."""
    for i in range(0, head_size * block_size, LANES):
        store_vector(out, i, load_vector(halves, at // 2 + i))


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def decode_values(
    pages: Any, halves: Any, at: int, side: Any, out: Any, head_size: int, block_size: int, numbers: Any
) -> None:
    """``out`` becomes the values."""
    size = head_size * block_size
    for i in range(0, size, LANES):
        store_vector(out, i, load_vector(halves, at // 2 + size + i))
