# SPDX-License-Identifier: Apache-2.0
"""`path_move` as it is defined: the readable form the others are tested against."""

from __future__ import annotations

import torch

from vllm_ext.kernels.path_move import Caches


def move_paths_ref(caches: Caches, source: torch.Tensor, target: torch.Tensor) -> None:
    """See `vllm_ext.kernels.path_move.move_paths`."""
    for cache in caches.caches:
        block_size = cache.shape[2]
        for sources, targets in zip(source.tolist(), target.tolist(), strict=True):
            for old, new in zip(sources, targets, strict=True):
                cache[new // block_size, :, new % block_size] = cache[old // block_size, :, old % block_size]
