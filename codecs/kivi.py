# SPDX-License-Identifier: Apache-2.0
"""Codec kivi: keys quantised channel by channel, values token by token, to 2 or 4 bits with a scale and a minimum.

Keys have a few channels of large values, the same ones in all tokens; values have none. So a group, ``group_size``
elements that share a scale, runs along the tokens for keys and along the channels for values.

Source: "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", arXiv 2402.02750, section 3 and algorithm 1.
Deviations: what stays in full precision is the block that fills up, keys and values alike (the paper: the last ``R``
tokens of the values, and the last ``T mod R`` of the keys); scales and minima are float16.
"""

from __future__ import annotations

import torch

from vllm_ext.codecs.codes import CodesCodec, CodesOptions, split_last


class KiviOptions(CodesOptions):
    """Those of `codes`, as kivi has them."""


class Kivi(CodesCodec):
    """Codes of the keys, ``head_size`` rows of a block's tokens; of the values, a row a token; then float16 scales and
    minima of the keys, ``[block_size / group_size][head_size]`` each, and of the values,
    ``[head_size / group_size][block_size]``.
    """

    name = "kivi"
    summary = "2 or 4 bits: keys by channel, values by token"
    paper = "arXiv 2402.02750"
    Options = KiviOptions
    EXAMPLES = ({}, {"bits": 2, "window": 128})

    @property
    def bytes_per_token(self) -> int:
        return self.code_bytes_per_token

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.options.bits, self.options.group_size

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        sides = [self.quantise(keys.mT), self.quantise(values)]
        codes = [self.pack(side[0]).flatten(-2) for side in sides]
        affine = [part.mT.flatten(-2).contiguous().view(torch.uint8) for side in sides for part in side[1:]]
        return torch.cat([*codes, *affine], -1)

    def decode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, channels, group_size = self.block_size, self.head_size, self.options.group_size
        num_codes, num_affine = (
            tokens * channels * self.options.bits // 8,
            2 * tokens * channels // group_size,
        )
        parts = torch.split(blocks, [num_codes] * 2 + [num_affine] * 4, -1)
        sides = []
        for i, (rows, columns) in enumerate(((channels, tokens), (tokens, channels))):
            codes = self.unpack(split_last(parts[i], rows))
            scale, low = (
                split_last(part.contiguous().view(torch.float16), columns // group_size).mT
                for part in parts[2 + 2 * i : 4 + 2 * i]
            )
            sides.append(self.dequantise(codes, scale, low))
        return sides[0].mT, sides[1]
