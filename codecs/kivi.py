# SPDX-License-Identifier: Apache-2.0
"""Codec kivi: keys quantised channel by channel, values token by token, to 2 or 4 bits with a scale and a minimum.

Keys have a few channels of large values, the same ones in all tokens; values have none. So a group, ``group_size``
elements that share a scale, runs along the tokens for keys and along the channels for values.

Source: "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", arXiv 2402.02750, section 3 and algorithm 1.
Deviations: what stays in full precision is the block that fills up, keys and values alike (the paper: the last ``R``
tokens of the values, and the last ``T mod R`` of the keys); scales and minima are float16.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from vllm_ext.codecs.base import CodecOptions, KVCodec

LARGEST = 65504.0  # of float16
LANES = 16  # bytes of codes that kernels take at once


class KiviOptions(CodecOptions):
    """Of a server."""

    bits: Literal[2, 4] = Field(default=4, description="of a code")
    group_size: int = Field(
        default=64,
        ge=16,
        le=256,
        description="elements that share a scale and a minimum, which together take 32 bits",
    )


class Kivi(KVCodec):
    """Codes of the keys, ``head_size`` rows of a block's tokens; of the values, a row a token; then float16 scales and
    minima of the keys, ``[block_size / group_size][head_size]`` each, and of the values,
    ``[head_size / group_size][block_size]``. The byte ``i`` of a row of ``n`` bytes has the codes ``i``, ``i + n``, and
    so on, the first in its lowest bits.
    """

    name = "kivi"
    summary = "2 or 4 bits: keys by channel, values by token"
    paper = "arXiv 2402.02750"
    Options = KiviOptions

    def __init__(self, options: KiviOptions, block_size: int, head_size: int) -> None:
        super().__init__(options, block_size, head_size)
        for name, size in (("block size", block_size), ("head size", head_size)):
            if size % options.group_size:
                raise ValueError(
                    f"group_size={options.group_size} does not divide the {name} {size}; allowed: a number that does"
                )
            if size * options.bits % (8 * LANES):
                raise ValueError(
                    f"bits={options.bits} with {name} {size} is not allowed: a row of codes must be a multiple of "
                    f"{LANES} bytes; allowed: bits=4 with multiples of 32, bits=2 with multiples of 64"
                )

    @property
    def bytes_per_token(self) -> int:
        """See the base class."""
        bits, group_size = self.numbers
        return self.head_size * bits // 4 + 8 * self.head_size // group_size

    @property
    def numbers(self) -> tuple[int, int]:
        """See the base class."""
        return self.options.bits, self.options.group_size

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        # [..., head_size, block_size] and [..., block_size, head_size]: groups run along the last.
        sides = [self._quantised(keys.mT), self._quantised(values)]
        codes = [self._packed(side[0]).flatten(-2) for side in sides]
        affine = [part.mT.flatten(-2).contiguous().view(torch.uint8) for side in sides for part in side[1:]]
        return torch.cat([*codes, *affine], -1)

    def decode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class."""
        tokens, channels, groups = self.block_size, self.head_size, self.options.group_size
        num_codes, num_affine = tokens * channels * self.options.bits // 8, 2 * tokens * channels // groups
        parts = torch.split(blocks, [num_codes] * 2 + [num_affine] * 4, -1)
        sides = []
        for i, (rows, columns) in enumerate(((channels, tokens), (tokens, channels))):
            codes = _unflattened(self._unpacked(_unflattened(parts[i], rows)), columns // groups)
            scale, low = (
                _unflattened(part.contiguous().view(torch.float16), columns // groups).mT[..., None].float()
                for part in parts[2 + 2 * i : 4 + 2 * i]
            )
            sides.append((codes * scale + low).flatten(-2))
        return sides[0].mT, sides[1]

    def _quantised(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes like ``x``, scales and minima ``[..., rows, groups]``."""
        most = 2**self.options.bits - 1
        grouped = _unflattened(x, x.shape[-1] // self.options.group_size)
        least, largest = grouped.amin(-1), grouped.amax(-1)
        low = least.clamp(-LARGEST, LARGEST).half()
        scale = ((largest - least) / most).clamp(max=LARGEST).half()
        step = scale.float()[..., None]
        codes = ((grouped - low.float()[..., None]) / step).round().clamp(0, most)
        return torch.where(step > 0, codes, 0.0).flatten(-2).to(torch.uint8), scale, low

    def _packed(self, codes: torch.Tensor) -> torch.Tensor:
        bits = self.options.bits
        parts = _unflattened(codes, 8 // bits)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
        return (parts << shifts).sum(-2, dtype=torch.uint8)

    def _unpacked(self, packed: torch.Tensor) -> torch.Tensor:
        bits = self.options.bits
        return torch.cat([packed >> (i * bits) & (2**bits - 1) for i in range(8 // bits)], -1)


def _unflattened(x: torch.Tensor, num: int) -> torch.Tensor:
    """The last dimension as ``num`` rows."""
    return x.reshape(*x.shape[:-1], num, x.shape[-1] // num)
