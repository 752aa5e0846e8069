# SPDX-License-Identifier: Apache-2.0
"""Keys and values of accepted paths, copied to where a chain's would be, in all layers at once, on the device.

On the CPU `kv_move` does it; here nothing is known on the host, not even how many tokens move.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def move_paths(caches: Caches, source: torch.Tensor, target: torch.Tensor, backend: Backend = "auto") -> None:
    """For each request, in the order of its columns, copy one token to another slot.

    The contract::

        for request, column in ndindex(source.shape):
            for cache in caches:
                cache[slot(target[request, column])] = cache[slot(source[request, column])]

    Args:
        caches: of all layers.
        source: int64 ``[requests, columns]``: a block times the block size, plus the token's place in it.
        target: as ``source``. No slot of one request is another's; a slot may be a target and later no source.
        backend: "auto" is triton on CUDA, else torch.
    """
    chosen = choose(backend, source)
    if chosen == "triton":
        from vllm_ext.kernels.path_move_triton import move_paths_triton as form
    else:
        from vllm_ext.kernels.path_move_ref import move_paths_ref as form
    form(caches, source, target)
