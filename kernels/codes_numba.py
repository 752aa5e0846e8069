# SPDX-License-Identifier: Apache-2.0
"""Quantised rows in blocks, for kernels of numba; `vllm_ext.codecs.codes`, the readable form, says what is where.

All take where the scales begin in bytes, the minima behind them; ``side``, float32 room, has both as numbers.
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
def set_range(side: Any, place: int, num: int, least: Any, largest: Any, most: Any) -> None:
    """Of the group at ``place``, one of ``num``."""
    side[place] = min((largest - least) / most, LARGEST)
    side[num + place] = min(max(least, -LARGEST), LARGEST)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def encode_rows(
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
    """Write scales, minima and codes of rows of ``x``, whose groups have their ranges in ``side``."""
    num = rows * (columns // group_size)
    most = np.float32((1 << bits) - 1)
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
def decode_rows(
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
    """``out`` becomes the rows."""
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
