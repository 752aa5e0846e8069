# SPDX-License-Identifier: Apache-2.0
"""`path_move` on the CPU: token after token, in place, as paths ascend."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from vllm_ext.kernels import backends
from vllm_ext.kernels.numba_vectors import pointer_to
from vllm_ext.kernels.path_move import Caches

_ELEMENTS = {1: np.int8, 2: np.int16, 4: np.int32}  # by bytes: copied as they are


def move_paths_numba(
    caches: Caches, path: torch.Tensor, first_row: torch.Tensor, slots: torch.Tensor
) -> None:
    """See `vllm_ext.kernels.path_move.move_paths`."""
    cache = caches.caches[0]
    _, heads, block_size, width = cache.shape
    _compiled()(
        caches.addresses.numpy(),
        path.numpy(),
        first_row.numpy(),
        slots.numpy(),
        heads,
        block_size,
        width,
        cache.stride(),
        _ELEMENTS[cache.element_size()],
    )


@functools.cache
def _compiled() -> Any:
    return backends.compile_cached(numba.njit, nogil=True)(_move)


def _move(
    addresses: Any,
    path: Any,
    first_row: Any,
    slots: Any,
    heads: int,
    block_size: int,
    width: int,
    strides: Any,
    dtype: Any,
) -> None:
    of_block, of_head, of_token, of_element = strides
    for layer in range(len(addresses)):
        # Read and written at offsets that the strides give: the length is nominal.
        cache = numba.carray(pointer_to(addresses[layer], dtype), 1 << 60)
        for request in range(path.shape[0]):
            for column in range(path.shape[1]):
                row = path[request, column]
                if row == column:
                    continue
                old, new = slots[first_row[request] + row], slots[first_row[request] + column]
                source = old // block_size * of_block + old % block_size * of_token
                target = new // block_size * of_block + new % block_size * of_token
                for head in range(heads):
                    before = cache[source + head * of_head :]
                    after = cache[target + head * of_head :]
                    if of_element == 1:  # a loop of its own, so that it vectorises
                        for element in range(width):
                            after[element] = before[element]
                    else:
                        for element in range(width):
                            after[element * of_element] = before[element * of_element]
