# SPDX-License-Identifier: Apache-2.0
"""Blocks of codec kivi, for kernels of numba; `vllm_ext.codecs.kivi` is the readable form and says what is where.

All three take ``pages`` as bytes and as float16, where the block begins in bytes, and ``side``, float32 room for
``head_size * block_size`` numbers, of which scales and minima take a part.
"""

from typing import Any

import numba
import numpy as np

from vllm_ext.kernels.numba_vectors import (
    LANES,
    load_codes,
    load_vector,
    splat,
    store_vector,
    vector_add,
    vector_multiply,
)

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
    bits: int,
    group_size: int,
) -> None:
    """Write a block's bytes.

    ``tiles[keys:]`` has the keys transposed, rows ``key_stride`` apart, and ``tiles[values:]`` the values.
    """
    num_codes = head_size * block_size * bits // 8
    affine = at + 2 * num_codes
    _encode_side(
        pages, halves, at, affine, side, tiles, keys, key_stride, head_size, block_size, bits, group_size
    )
    affine += 4 * head_size * block_size // group_size
    _encode_side(
        pages,
        halves,
        at + num_codes,
        affine,
        side,
        tiles,
        values,
        head_size,
        block_size,
        head_size,
        bits,
        group_size,
    )


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _encode_side(
    pages: Any,
    halves: Any,
    codes: int,
    affine: int,
    side: Any,
    x: Any,
    start: int,
    stride: int,
    rows: int,
    columns: int,
    bits: int,
    group_size: int,
) -> None:
    most = np.float32((1 << bits) - 1)
    num = rows * (columns // group_size)
    for row in range(rows):
        for group in range(columns // group_size):
            first = start + row * stride + group * group_size
            least = largest = x[first]
            for i in range(first + 1, first + group_size):
                least, largest = min(least, x[i]), max(largest, x[i])
            side[group * rows + row] = min((largest - least) / most, LARGEST)
            side[num + group * rows + row] = min(max(least, -LARGEST), LARGEST)
    # Codes are of what the float16 numbers are.
    for i in range(0, 2 * num, LANES):
        store_vector(halves, affine // 2 + i, load_vector(side, i))
        store_vector(side, i, load_vector(halves, affine // 2 + i))
    width = columns * bits // 8
    for row in range(rows):
        for i in range(width):
            byte = np.int64(0)
            for part in range(8 // bits):
                column = part * width + i
                group = column // group_size * rows + row
                step = side[group]
                if step > np.float32(0.0):
                    code = np.rint((x[start + row * stride + column] - side[num + group]) / step)
                    byte |= np.int64(min(max(code, np.float32(0.0)), most)) << (part * bits)
            pages[codes + row * width + i] = byte


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def decode_keys(
    pages: Any,
    halves: Any,
    at: int,
    side: Any,
    out: Any,
    head_size: int,
    block_size: int,
    bits: int,
    group_size: int,
) -> None:
    """``out`` becomes the keys, transposed."""
    affine = at + 2 * (head_size * block_size * bits // 8)
    _decode_side(pages, halves, at, affine, side, out, head_size, block_size, bits, group_size)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def decode_values(
    pages: Any,
    halves: Any,
    at: int,
    side: Any,
    out: Any,
    head_size: int,
    block_size: int,
    bits: int,
    group_size: int,
) -> None:
    """``out`` becomes the values."""
    num_codes = head_size * block_size * bits // 8
    affine = at + 2 * num_codes + 4 * head_size * block_size // group_size
    _decode_side(pages, halves, at + num_codes, affine, side, out, block_size, head_size, bits, group_size)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _decode_side(
    pages: Any,
    halves: Any,
    codes: int,
    affine: int,
    side: Any,
    out: Any,
    rows: int,
    columns: int,
    bits: int,
    group_size: int,
) -> None:
    num = rows * (columns // group_size)
    for i in range(0, 2 * num, LANES):
        store_vector(side, i, load_vector(halves, affine // 2 + i))
    width, mask = columns * bits // 8, (1 << bits) - 1
    for row in range(rows):
        for part in range(8 // bits):
            for i in range(0, width, LANES):
                column = part * width + i
                group = column // group_size * rows + row
                code = load_codes(pages, codes + row * width + i, part * bits, mask)
                code = vector_add(vector_multiply(code, splat(side[group])), splat(side[num + group]))
                store_vector(out, row * columns + column, code)
