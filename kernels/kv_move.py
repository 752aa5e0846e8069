# SPDX-License-Identifier: Apache-2.0
"""Keys and values of single tokens, copied between slots in all layers at once, on the CPU.

Torch takes some hundred microseconds a layer to gather and scatter a few tokens; all layers' are moved in less.
`kv_move_numba.py` has the loops, `kv_move_ref.py` is their readable form.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_ext.kernels.kv_layouts import sizes

Int64 = npt.NDArray[np.int64]


class Places:
    """Where the tokens of some caches are: made once, and good for as long as these are.

    Args:
        views: of `kv_layouts`, on the CPU, all of one block size, number of KV heads and 16- or 32-bit dtype.

    Raises:
        ValueError: they differ in that, or are elsewhere.
    """

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self.views = list(views)  # keeps the memory
        kinds = {(view.device.type, view.element_size(), *sizes(view)) for view in views}
        if len(kinds) != 1 or not {("cpu", 2), ("cpu", 4)} & {kind[:2] for kind in kinds}:
            raise ValueError(
                f"views: device, bytes of an element, KV heads, block size and head size are {sorted(kinds)}; they "
                "must be the same for all, on cpu, with 2 or 4 bytes; make Places for each kind"
            )
        ((_, self.element_size, self.num_heads, self.block_size, _),) = kinds
        # [num_views, 10] address, then strides of block and head, tokens of a group, strides of group and token, parts
        # of a token, stride of a part, elements of a part, stride of an element.
        self.table = np.array([_place(view) for view in views], np.int64)


def _place(view: torch.Tensor) -> list[int]:
    shape, strides = view.shape, view.stride()
    if view.dim() == 4:  # groups of one token, one part
        return [view.data_ptr(), *strides[:2], 1, strides[2], 0, 1, 0, shape[3], strides[3]]
    return [
        view.data_ptr(),
        *strides[:2],
        shape[3],
        *strides[2:4],
        shape[4],
        strides[4],
        shape[5],
        strides[5],
    ]


def move_tokens(places: Places, source: Int64, target: Int64) -> None:
    """Copy each source slot's keys and values to its target slot; a slot may be both.

    Args:
        places: the caches.
        source: int64 ``[num]``, each a block times the block size, plus the token's place in it.
        target: int64 ``[num]``, distinct.
    """
    dtype = np.int16 if places.element_size == 2 else np.int32
    _compiled()(places.table, places.num_heads, places.block_size, source, target, dtype)


@functools.cache
def _compiled() -> Any:
    from vllm_ext.kernels import kv_move_numba

    return kv_move_numba.compiled()
