# SPDX-License-Identifier: Apache-2.0
"""Keys and values of accepted paths, copied to where a chain's would be, in all layers at once, on the device.

V1 on the CPU has `kv_move`; here nothing is known on the host, not even how many tokens move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_ext.kernels.backends import Backend, choose


class Caches:
    """Caches of one form: made once, and good for as long as these are.

    Args:
        caches: ``[num_blocks, num_heads, block_size, width]`` each, of one shape, dtype, device and strides.

    Raises:
        ValueError: they differ in that, or there are none.
    """

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        kinds = {(cache.shape, cache.dtype, cache.device, cache.stride()) for cache in caches}
        if len(kinds) != 1 or caches[0].dim() != 4:
            raise ValueError(
                f"caches of {len(kinds)} kinds {sorted(map(str, kinds))} must be of one, [num_blocks, num_heads, "
                "block_size, width]; make one Caches for each kind"
            )
        self.caches = list(caches)  # keeps the memory
        self.addresses = torch.tensor(
            [cache.data_ptr() for cache in caches], dtype=torch.int64, device=caches[0].device
        )


def move_paths(
    caches: Caches,
    path: torch.Tensor,
    first_row: torch.Tensor,
    slots: torch.Tensor,
    backend: Backend = "auto",
) -> None:
    """Copy each path's tokens to where a chain's would be.

    The contract::

        for request, column in ndindex(path.shape):
            for cache in caches:
                row = first_row[request]
                cache[slot(row + column)] = cache[slot(row + path[request, column])]

    Args:
        caches: of all layers.
        path: int32 ``[requests, columns]`` rows of each path as offsets, ascending; behind the last their own place.
        first_row: int32 ``[requests]`` where in the query the root is.
        slots: int64 ``[query rows]`` of each row a block times the block size, plus the token's place in it. No slot of
            one request is another's.
        backend: "auto" is triton on CUDA, numba on the CPU, else torch.
    """
    form: Any
    match choose(backend, path):
        case "numba":
            from vllm_ext.kernels.path_move_numba import move_paths_numba as form
        case "triton":
            from vllm_ext.kernels.path_move_triton import move_paths_triton as form
        case _:
            from vllm_ext.kernels.path_move_ref import move_paths_ref as form
    form(caches, path, first_row, slots)
