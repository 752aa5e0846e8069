# SPDX-License-Identifier: Apache-2.0
"""Blocks of codec actqkv, for kernels of numba; `vllm_ext.codecs.actqkv` says what is where.

Arguments as in `kivi_numba`. Keys and values lie as in `streaming_llm_numba`.
"""

from typing import Any

import numba
import numpy as np

from vllm_ext.kernels import streaming_llm_numba
from vllm_ext.kernels.numba_vectors import LANES, load_vector, splat, store_vector, vector_max, vector_min

LARGEST = np.float32(65504.0)

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
    """Write a block's bytes."""
    streaming_llm_numba.encode_block(
        *(pages, halves, at, side, tiles, keys, key_stride, values, head_size, block_size, numbers)
    )
    for d in range(head_size):
        total = np.float32(0.0)
        for t in range(block_size):
            total += tiles[keys + d * key_stride + t]
        side[d] = total / np.float32(block_size)
    mean = at // 2 + 2 * head_size * block_size
    for d in range(0, head_size, LANES):
        x = vector_max(load_vector(side, d), splat(-LARGEST))
        store_vector(halves, mean + d, vector_min(x, splat(LARGEST)))
