# SPDX-License-Identifier: Apache-2.0
"""Codec mustafar: of each token's key and value the elements of the largest magnitude, and a bitmap of where they are.

Source: "MUSTAFAR: Promoting Unstructured Sparsity for KV Cache Pruning in LLM Inference", arXiv 2505.22913: per-token
magnitude pruning of keys and values, section 3, and the bitmap format of section 4. As in the authors' code
``head_size - int(sparsity * head_size) + 1`` elements are kept, and keys lie in tiles of one channel's tokens.
Deviations: exactly so many for each token, ties by the lower channel, so that blocks have one size; no padding and no
offsets, as a block's values are read one after the other; a bitmap's lowest bit is its first element; what stays dense
is the block that fills up, not the last tokens; values are float16, also of a bfloat16 model's.
"""

from __future__ import annotations

import torch
from pydantic import Field

from vllm_ext.codecs.base import CodecOptions, KVCodec

LARGEST = 65504.0  # of float16
LANES = 16  # elements that kernels take at once


class MustafarOptions(CodecOptions):
    sparsity: float = Field(
        default=0.5,
        ge=0.1,
        le=0.9,
        description="the part of a key's elements, and of a value's, that are dropped",
    )


class Mustafar(KVCodec):
    """Bitmaps of the keys, ``head_size`` rows of a block's tokens; of the values, a row a token; then float16 keys and
    float16 values, in the order of the bitmaps.
    """

    name = "mustafar"
    summary = "of each key and value the elements of the largest magnitude"
    paper = "arXiv 2505.22913"
    Options = MustafarOptions
    # What a token sees as it is does it the most good: 256 tokens in the mean, about the paper's window.
    BLOCK_SIZE = 512

    def __init__(self, options: MustafarOptions, block_size: int, head_size: int) -> None:
        super().__init__(options, block_size, head_size)
        for name, size in (("block size", block_size), ("head size", head_size)):
            if size % LANES:
                raise ValueError(f"a {name} of {size} is not allowed; allowed: multiples of {LANES}")
        self.kept = head_size - int(options.sparsity * head_size) + 1

    @property
    def bytes_per_token(self) -> int:
        return 2 * (self.head_size // 8 + 2 * self.kept)

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.kept,)

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        maps, kept = [], []
        for x, is_key in ((keys, True), (values, False)):
            order = x.abs().sort(dim=-1, descending=True, stable=True).indices[..., : self.kept]
            mask = torch.zeros_like(x, dtype=torch.bool).scatter_(-1, order, True)
            x, mask = (x.mT, mask.mT) if is_key else (x, mask)
            bits = mask.reshape(*mask.shape[:-2], -1, 8).to(torch.uint8)
            maps.append((bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8))
            found = x.masked_select(mask).clamp(-LARGEST, LARGEST).half()
            kept.append(found.view(*x.shape[:-2], -1).view(torch.uint8))
        return torch.cat([*maps, *kept], -1)

    def decode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, channels = self.block_size, self.head_size
        parts = torch.split(blocks, [tokens * channels // 8] * 2 + [2 * tokens * self.kept] * 2, -1)
        sides = []
        for bitmap, kept, shape in zip(
            parts[:2], parts[2:], ((channels, tokens), (tokens, channels)), strict=True
        ):
            mask = (bitmap[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).bool()
            mask = mask.reshape(*blocks.shape[:-1], *shape)
            values = kept.contiguous().view(torch.float16).float()
            sides.append(torch.zeros(mask.shape).masked_scatter_(mask, values))
        return sides[0].mT, sides[1]
