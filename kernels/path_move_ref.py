# SPDX-License-Identifier: Apache-2.0
"""`path_move` as it is defined: the readable form the others are tested against."""

from __future__ import annotations

import torch

from vllm_ext.kernels.path_move import Caches


def move_paths_ref(caches: Caches, path: torch.Tensor, first_row: torch.Tensor, slots: torch.Tensor) -> None:
    """See `vllm_ext.kernels.path_move.move_paths`."""
    for cache in caches.caches:
        block_size = cache.shape[2]
        for row, rows in zip(first_row.tolist(), path.tolist(), strict=False):
            for column, offset in enumerate(rows):
                if column != offset:
                    old, new = int(slots[row + offset]), int(slots[row + column])
                    kept = cache[old // block_size, :, old % block_size]
                    cache[new // block_size, :, new % block_size] = kept
