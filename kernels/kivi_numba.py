# SPDX-License-Identifier: Apache-2.0
"""Blocks of codec kivi, for kernels of numba; `vllm_ext.codecs.kivi`, the readable form, says what is where.

All three take ``pages`` as bytes and as float16, where the block begins in bytes, ``side``, float32 room for
``head_size * block_size`` numbers, and `BlockFormat.numbers`.
"""

from typing import Any

import numba
import numpy as np

from vllm_ext.kernels.codes_numba import decode_rows, encode_rows, set_range


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
    """Write a block's bytes.

    ``tiles[keys:]`` has the keys transposed, rows ``key_stride`` apart, and ``tiles[values:]`` the values.
    """
    bits, group_size = numbers[0], numbers[1]
    most = np.float32((1 << bits) - 1)
    codes, affine = at, at + head_size * block_size * bits // 4
    for start, stride, rows, columns in (
        (keys, key_stride, head_size, block_size),
        (values, head_size, block_size, head_size),
    ):
        num = rows * (columns // group_size)
        for row in range(rows):
            for group in range(columns // group_size):
                first = start + row * stride + group * group_size
                least = largest = tiles[first]
                for i in range(first + 1, first + group_size):
                    least, largest = min(least, tiles[i]), max(largest, tiles[i])
                set_range(side, group * rows + row, num, least, largest, most)
        encode_rows(
            *(pages, halves, codes, affine, side, tiles, start, stride),
            *(rows, columns, bits, group_size),
        )
        codes += head_size * block_size * bits // 8
        affine += 4 * num


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def decode_keys(
    pages: Any, halves: Any, at: int, side: Any, out: Any, head_size: int, block_size: int, numbers: Any
) -> None:
    """``out`` becomes the keys, transposed."""
    bits, group_size = numbers[0], numbers[1]
    affine = at + head_size * block_size * bits // 4
    decode_rows(pages, halves, at, affine, side, out, head_size, block_size, bits, group_size)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def decode_values(
    pages: Any, halves: Any, at: int, side: Any, out: Any, head_size: int, block_size: int, numbers: Any
) -> None:
    """``out`` becomes the values."""
    bits, group_size = numbers[0], numbers[1]
    size = head_size * block_size
    codes, affine = at + size * bits // 8, at + size * bits // 4 + 4 * size // group_size
    decode_rows(pages, halves, codes, affine, side, out, block_size, head_size, bits, group_size)
