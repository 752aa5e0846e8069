# SPDX-License-Identifier: Apache-2.0
"""Blocks of codec mustafar, for kernels of numba; `vllm_ext.codecs.mustafar`, the readable form, says what is where.

Arguments as in `kivi_numba`; ``kept`` is how many elements of a token there are.
"""

from typing import Any

import numba
import numpy as np

from vllm_ext.kernels.numba_vectors import LANES, count_bits, expand_vector, load_vector, store_vector

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
    kept, bitmap = numbers[0], head_size * block_size // 8
    keep = np.empty(head_size * block_size, np.uint8)
    size = np.empty(head_size, np.int32)
    # Of the keys a token is a column.
    for token in range(block_size):
        _choose(tiles, keys + token, key_stride, keep, token, block_size, size, head_size, kept)
    _pack(pages, halves, at, at + 2 * bitmap, side, tiles, keys, key_stride, keep, head_size, block_size)
    for token in range(block_size):
        _choose(tiles, values + token * head_size, 1, keep, token * head_size, 1, size, head_size, kept)
    first = at + 2 * bitmap + 2 * block_size * kept
    _pack(pages, halves, at + bitmap, first, side, tiles, values, head_size, keep, block_size, head_size)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _choose(
    x: Any, start: int, step: int, keep: Any, first: int, stride: int, size: Any, num: int, kept: int
) -> None:
    """Mark the ``kept`` largest magnitudes of ``num`` elements, those of lower index of equal ones."""
    for i in range(num):
        size[i] = np.float32(abs(x[start + i * step])).view(
            np.int32
        )  # floats above 0 are ordered as their bits
    # The largest bits that so many have or exceed.
    low, high = np.int64(0), np.int64(0x7FFFFFFF)
    while low < high:
        middle = (low + high + 1) // 2
        count = 0
        for i in range(num):
            count += size[i] >= middle
        if count >= kept:
            low = middle
        else:
            high = middle - 1
    equal = kept
    for i in range(num):
        equal -= size[i] > low
    for i in range(num):
        chosen = size[i] > low
        if size[i] == low and equal > 0:
            chosen = True
            equal -= 1
        keep[first + i * stride] = chosen


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _pack(
    pages: Any,
    halves: Any,
    bitmap: int,
    first: int,
    side: Any,
    x: Any,
    start: int,
    stride: int,
    keep: Any,
    rows: int,
    columns: int,
) -> None:
    num = 0
    for row in range(rows):
        for column in range(0, columns, 8):
            byte = 0
            for bit in range(8):
                if keep[row * columns + column + bit]:
                    byte |= 1 << bit
                    side[num] = min(max(x[start + row * stride + column + bit], -LARGEST), LARGEST)
                    num += 1
            pages[bitmap + (row * columns + column) // 8] = byte
    for i in range(0, num, LANES):
        store_vector(halves, first // 2 + i, load_vector(side, i))


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def decode_keys(
    pages: Any,
    halves: Any,
    at: int,
    side: Any,
    out: Any,
    head_size: int,
    block_size: int,
    numbers: Any,
) -> None:
    """``out`` becomes the keys, transposed."""
    _expand(
        pages,
        halves,
        at,
        at + head_size * block_size // 4,
        side,
        out,
        head_size * block_size,
        block_size * numbers[0],
    )


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def decode_values(
    pages: Any,
    halves: Any,
    at: int,
    side: Any,
    out: Any,
    head_size: int,
    block_size: int,
    numbers: Any,
) -> None:
    """``out`` becomes the values."""
    kept, size = numbers[0], head_size * block_size
    first = at + size // 4 + 2 * block_size * kept
    _expand(pages, halves, at + size // 8, first, side, out, size, block_size * kept)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _expand(
    pages: Any, halves: Any, bitmap: int, first: int, side: Any, out: Any, size: int, num: int
) -> None:
    for i in range(0, num, LANES):
        store_vector(side, i, load_vector(halves, first // 2 + i))
    taken = np.int64(0)
    for i in range(0, size, LANES):
        bits = np.int64(pages[bitmap + i // 8]) | np.int64(pages[bitmap + i // 8 + 1]) << 8
        store_vector(out, i, expand_vector(side, taken, bits))
        taken += count_bits(bits)
