# SPDX-License-Identifier: Apache-2.0
"""Blocks of codec gear, for kernels of numba; `vllm_ext.codecs.gear`, the readable form, says what is where.

Arguments as in `kivi_numba`.
"""

from typing import Any

import numba
import numpy as np

from vllm_ext.kernels.codes_numba import LARGEST, decode_rows, encode_rows, set_range
from vllm_ext.kernels.numba_vectors import (
    LANES,
    load_vector,
    splat,
    store_vector,
    sum_of_lanes,
    vector_add,
    vector_multiply,
)

LOOPS = 3  # as in the codec
TINY = np.float32(1e-12)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _places(at: int, of_values: int, head_size: int, block_size: int, numbers: Any) -> Any:
    """Where the keys' or the values' parts begin, in bytes: codes, scales, factors, outliers, their columns."""
    bits, group_size, rank, outliers = numbers
    size, both = head_size * block_size, head_size + block_size
    affine = at + size * bits // 4
    factors = affine + 8 * size // group_size
    kept = factors + 4 * rank * both
    columns = kept + 4 * outliers * both
    before = head_size if of_values else 0  # rows
    return (
        at + of_values * size * bits // 8,
        affine + of_values * 4 * size // group_size,
        factors + of_values * 2 * rank * both,
        kept + 4 * outliers * before,
        columns + 2 * outliers * before,
    )


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
    bits, group_size, rank, outliers = numbers
    error = np.empty(head_size * block_size, np.float32)
    factors = np.empty(rank * (head_size + block_size), np.float32)
    for of_values in range(2):
        if of_values:
            start, stride, rows, columns = values, head_size, block_size, head_size
        else:
            start, stride, rows, columns = keys, key_stride, head_size, block_size
        codes, affine, low_rank, kept, places = _places(at, of_values, head_size, block_size, numbers)
        _keep(pages, side, tiles, start, stride, rows, columns, outliers, places)
        for i in range(0, 2 * outliers * rows, LANES):
            store_vector(halves, kept // 2 + i, load_vector(side, i))
        _ranges(pages, side, tiles, start, stride, rows, columns, bits, group_size, outliers, places)
        encode_rows(
            *(pages, halves, codes, affine, side, tiles, start, stride),
            *(rows, columns, bits, group_size),
        )
        if rank:
            decode_rows(pages, halves, codes, affine, side, error, rows, columns, bits, group_size)
            for row in range(rows):
                for column in range(columns):
                    error[row * columns + column] = (
                        tiles[start + row * stride + column] - error[row * columns + column]
                    )
                for j in range(2 * outliers):
                    error[row * columns + pages[places + j * rows + row]] = np.float32(0.0)
            _factorise(error, factors, rows, columns, rank)
            for i in range(0, rank * (rows + columns), LANES):
                store_vector(halves, low_rank // 2 + i, load_vector(factors, i))


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _keep(
    pages: Any,
    side: Any,
    x: Any,
    start: int,
    stride: int,
    rows: int,
    columns: int,
    outliers: int,
    places: int,
) -> None:
    """Write the columns of the outliers; ``side`` becomes their values."""
    for row in range(rows):
        first = start + row * stride
        for end in range(2):
            sign = np.float32(1 - 2 * end)
            for j in range(outliers):
                best, place = np.float32(-np.inf), 0
                for column in range(columns):
                    value = sign * x[first + column]
                    if value > best:
                        fresh = True
                        for before in range(j):
                            fresh &= column != pages[places + (end * outliers + before) * rows + row]
                        if fresh:
                            best, place = value, column
                pages[places + (end * outliers + j) * rows + row] = place
                side[(end * outliers + j) * rows + row] = min(max(x[first + place], -LARGEST), LARGEST)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _ranges(
    pages: Any,
    side: Any,
    x: Any,
    start: int,
    stride: int,
    rows: int,
    columns: int,
    bits: int,
    group_size: int,
    outliers: int,
    places: int,
) -> None:
    """``side`` becomes the groups' ranges, outliers left out."""
    most = np.float32((1 << bits) - 1)
    num = rows * (columns // group_size)
    inside = np.empty(columns, np.bool_)
    for row in range(rows):
        inside[:] = True
        for j in range(2 * outliers):
            inside[pages[places + j * rows + row]] = False
        for group in range(columns // group_size):
            least, largest = np.float32(np.inf), np.float32(-np.inf)
            for column in range(group * group_size, (group + 1) * group_size):
                if inside[column]:
                    value = x[start + row * stride + column]
                    least, largest = min(least, value), max(largest, value)
            set_range(side, group * rows + row, num, least, largest, most)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _factorise(error: Any, factors: Any, rows: int, columns: int, rank: int) -> None:
    """``factors`` becomes those of the rows, then those of the columns: ``[rank][rows]``, ``[rank][columns]``."""
    right = rank * rows
    for j in range(rank):
        for i in range(columns):
            column = i + 1
            sign = (column * column * (j + 1) * 40503 + column * 9973 * (j + 1)) >> 9 & 1
            factors[right + j * columns + i] = np.float32(1 - 2 * sign)
    for _ in range(LOOPS):
        _orthonormalise(factors, right, columns, rank)
        for j in range(rank):
            for row in range(rows):
                total = splat(np.float32(0.0))
                for i in range(0, columns, LANES):
                    product = vector_multiply(
                        load_vector(error, row * columns + i), load_vector(factors, right + j * columns + i)
                    )
                    total = vector_add(total, product)
                factors[j * rows + row] = sum_of_lanes(total)
        _orthonormalise(factors, 0, rows, rank)
        for j in range(rank):
            factors[right + j * columns : right + (j + 1) * columns] = np.float32(0.0)
            for row in range(rows):
                _add(factors, right + j * columns, error, row * columns, columns, factors[j * rows + row])


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _orthonormalise(x: Any, start: int, size: int, num: int) -> None:
    for j in range(num):
        first = start + j * size
        for before in range(start, first, size):
            dot = np.float32(0.0)
            for i in range(size):
                dot += x[first + i] * x[before + i]
            for i in range(size):
                x[first + i] -= dot * x[before + i]
        square = np.float32(0.0)
        for i in range(size):
            square += x[first + i] * x[first + i]
        factor = np.float32(1.0) / np.sqrt(square) if square > TINY else np.float32(0.0)
        for i in range(size):
            x[first + i] *= factor


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _add(out: Any, at: int, x: Any, start: int, size: int, factor: Any) -> None:
    factor = splat(factor)
    for i in range(0, size, LANES):
        store_vector(
            out,
            at + i,
            vector_add(load_vector(out, at + i), vector_multiply(load_vector(x, start + i), factor)),
        )


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def decode_keys(
    pages: Any, halves: Any, at: int, side: Any, out: Any, head_size: int, block_size: int, numbers: Any
) -> None:
    """``out`` becomes the keys, transposed."""
    places = _places(at, 0, head_size, block_size, numbers)
    _decode_side(pages, halves, places, side, out, head_size, block_size, numbers)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def decode_values(
    pages: Any, halves: Any, at: int, side: Any, out: Any, head_size: int, block_size: int, numbers: Any
) -> None:
    """``out`` becomes the values."""
    places = _places(at, 1, head_size, block_size, numbers)
    _decode_side(pages, halves, places, side, out, block_size, head_size, numbers)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _decode_side(
    pages: Any, halves: Any, places: Any, side: Any, out: Any, rows: int, columns: int, numbers: Any
) -> None:
    bits, group_size, rank, outliers = numbers
    codes, affine, low_rank, kept, columns_of = places
    decode_rows(pages, halves, codes, affine, side, out, rows, columns, bits, group_size)
    for i in range(0, rank * (rows + columns), LANES):
        store_vector(side, i, load_vector(halves, low_rank // 2 + i))
    for row in range(rows):
        for j in range(rank):
            _add(out, row * columns, side, rank * rows + j * columns, columns, side[j * rows + row])
    num = 2 * outliers * rows
    for i in range(0, num, LANES):
        store_vector(side, i, load_vector(halves, kept // 2 + i))
    for j in range(2 * outliers):
        for row in range(rows):
            out[row * columns + pages[columns_of + j * rows + row]] = side[j * rows + row]
