# SPDX-License-Identifier: Apache-2.0
"""What codecs share that keep keys and values as they are, in float16."""

from __future__ import annotations

import torch

from vllm_ext.codecs.base import KVCodec

LARGEST = 65504.0  # of float16


class HalvesCodec(KVCodec):
    """float16 keys, ``head_size`` rows of a block's tokens, and values, a row a token."""

    @property
    def bytes_per_token(self) -> int:
        return 4 * self.head_size

    @property
    def numbers(self) -> tuple[int, ...]:
        return ()

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        both = torch.cat([keys.mT.flatten(-2), values.flatten(-2)], -1)
        return both.clamp(-LARGEST, LARGEST).half().view(torch.uint8)

    def decode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        used = blocks[..., : 4 * self.head_size * self.block_size].contiguous()
        keys, values = used.view(torch.float16).float().chunk(2, -1)
        shape = *blocks.shape[:-1], self.head_size, self.block_size
        return keys.view(shape).mT, values.view(*shape[:-2], shape[-1], shape[-2])
