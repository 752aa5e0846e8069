# SPDX-License-Identifier: Apache-2.0
"""Blocks of codec chelsea, for kernels of numba; `vllm_ext.codecs.chelsea` says what is where.

Arguments as in `kivi_numba`. Keys and values lie as in `streaming_llm_numba`.
"""

from typing import Any

import numba
import numpy as np

from vllm_ext.kernels import streaming_llm_numba
from vllm_ext.kernels.attention_parts_numba import LOG2_E, matrix_product, round_up
from vllm_ext.kernels.numba_vectors import (
    LANES,
    load_vector,
    splat,
    store_vector,
    vector_add,
    vector_multiply,
)

decode_keys, decode_values = streaming_llm_numba.decode_keys, streaming_llm_numba.decode_values


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
    """Write a block's bytes, of which each token stands for itself."""
    streaming_llm_numba.encode_block(
        *(pages, halves, at, side, tiles, keys, key_stride, values, head_size, block_size, numbers)
    )
    logs = at + 4 * head_size * block_size
    for i in range(4 * block_size):
        pages[logs + i] = 0


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def add_counts(
    pages: Any,
    floats: Any,
    at: int,
    scores: Any,
    start: int,
    stride: int,
    rows: int,
    head_size: int,
    block_size: int,
    numbers: Any,
) -> None:
    """To ``rows`` rows of scores (base 2), ``stride`` apart, what a block's tokens stand for."""
    logs = at // 4 + head_size * block_size
    for t in range(0, block_size, LANES):
        counts = vector_multiply(load_vector(floats, logs + t), splat(np.float32(LOG2_E)))
        for row in range(rows):
            place = start + row * stride + t
            store_vector(scores, place, vector_add(load_vector(scores, place), counts))


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def merge_span(halves: Any, floats: Any, starts: Any, head_size: int, block_size: int, numbers: Any) -> None:
    """The blocks that begin at the bytes ``starts`` become one, where the first is."""
    left: Any = len(starts) * block_size
    width = 2 * head_size
    sums = np.empty(left * width, np.float32)  # of keys and values, by token
    counts, squares = np.ones(left, np.float32), np.zeros(left, np.float32)
    for i in range(len(starts)):
        at = starts[i] // 2
        side = np.empty(head_size * block_size, np.float32)
        for j in range(0, head_size * block_size, LANES):
            store_vector(side, j, load_vector(halves, at + j))
        for t in range(block_size):
            token = (i * block_size + t) * width
            for d in range(head_size):
                sums[token + d] = side[d * block_size + t]
                squares[i * block_size + t] += sums[token + d] * sums[token + d]
            for d in range(0, head_size, LANES):
                value = load_vector(halves, at + (block_size + t) * head_size + d)
                store_vector(sums, token + head_size + d, value)
    while left > block_size:
        left = _merge_some(sums, counts, squares, left, head_size, block_size, numbers[0])

    logs = starts[0] // 4 + head_size * block_size
    side = np.empty(width * block_size, np.float32)
    weight = np.float32(numbers[1] / (2e6 * head_size))
    for t in range(block_size):
        share = np.float32(1.0) / counts[t]
        apart = squares[t] * share
        for d in range(head_size):
            key = sums[t * width + d] * share
            apart -= key * key
            side[d * block_size + t] = key
            side[(block_size + t) * head_size + d] = sums[t * width + head_size + d] * share
        if counts[t] == 1:  # not what is rounded
            apart = np.float32(0.0)
        floats[logs + t] = np.float32(np.log(counts[t])) + weight * max(apart, np.float32(0.0))
    for j in range(0, width * block_size, LANES):
        store_vector(halves, starts[0] // 2 + j, load_vector(side, j))


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _merge_some(
    sums: Any, counts: Any, squares: Any, num: int, head_size: int, block_size: int, rounds: int
) -> int:
    """One round among the first ``num``; returns how many are left, which come first then."""
    width = 2 * head_size
    evens, odds = (num + 1) // 2, num // 2
    columns = round_up(odds, LANES)
    even = np.zeros(round_up(evens, 2) * head_size, np.float32)
    odd = np.zeros(head_size * columns, np.float32)  # transposed
    for i in range(num):
        square = np.float32(0.0)
        for d in range(head_size):
            square += sums[i * width + d] * sums[i * width + d]
        share = np.float32(1.0) / max(np.sqrt(square), np.float32(1e-12))
        for d in range(head_size):
            x = sums[i * width + d] * share
            if i % 2:
                odd[d * columns + i // 2] = x
            else:
                even[i // 2 * head_size + d] = x
    cosines = np.empty(round_up(evens, 2) * columns, np.float32)
    matrix_product(
        *(even, 0, head_size, odd, 0, columns, LANES, cosines, 0, columns),
        *(round_up(evens, 2), head_size, columns, False),
    )
    distance, best = np.empty(evens, np.float32), np.empty(evens, np.int64)
    for i in range(evens):
        best[i] = np.argmax(cosines[i * columns : i * columns + odds])
        distance[i] = -cosines[i * columns + best[i]]
    order = np.argsort(distance, kind="mergesort")
    gone = np.zeros(num, np.bool_)
    merged = min(num - block_size, -(-odds // rounds))
    for i in order[:merged]:
        token, other = 2 * i, 2 * best[i] + 1
        for d in range(width):
            sums[other * width + d] += sums[token * width + d]
        counts[other] += counts[token]
        squares[other] += squares[token]
        gone[token] = True
    left: Any = 0
    for i in range(num):
        if not gone[i]:
            sums[left * width : (left + 1) * width] = sums[i * width : (i + 1) * width]
            counts[left], squares[left] = counts[i], squares[i]
            left += 1
    return int(left)
