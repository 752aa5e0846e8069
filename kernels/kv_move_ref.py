# SPDX-License-Identifier: Apache-2.0
"""`move_tokens` as it is defined, one token at a time: the readable form the other is tested against."""

from collections.abc import Sequence

import torch

from vllm_ext.kernels.kv_layouts import sizes, token, tokens_at
from vllm_ext.kernels.kv_move import Int64


def move_tokens_ref(views: Sequence[torch.Tensor], source: Int64, target: Int64) -> None:
    """See `vllm_ext.kernels.kv_move.move_tokens`; any views of `kv_layouts`."""
    for view in views:
        _, block_size, _ = sizes(view)
        for copy, slot in zip(tokens_at(view, torch.from_numpy(source)), target.tolist(), strict=True):
            place = token(view[slot // block_size], slot % block_size)
            place.copy_(copy.view(place.shape))
