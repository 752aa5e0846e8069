# SPDX-License-Identifier: Apache-2.0
"""Uniform asymmetric quantisation of rows, in groups that run along them, and codes packed into bytes.

What codecs of small integers share. Scales and minima are float16; the byte ``i`` of a row of ``n`` bytes has the codes
``i``, ``i + n``, and so on, the first in its lowest bits.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from vllm_ext.codecs.base import CodecOptions, KVCodec

LARGEST = 65504.0  # of float16
LANES = 16  # bytes of codes that kernels take at once


class CodesOptions(CodecOptions):
    bits: Literal[2, 4] = Field(default=4, description="of a code")
    group_size: int = Field(
        default=64,
        ge=16,
        le=256,
        description="elements that share a scale and a minimum, which together take 32 bits",
    )


class CodesCodec(KVCodec):
    """Keys quantised channel by channel, values token by token: of the keys a row is a channel of all a block's tokens,
    of the values it is a token.
    """

    def __init__(self, options: CodesOptions, block_size: int, head_size: int) -> None:
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
    def code_bytes_per_token(self) -> int:
        """Of codes, scales and minima."""
        bits, group_size = self.options.bits, self.options.group_size
        return int(self.head_size * bits // 4 + 8 * self.head_size // group_size)

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """uint8 ``[..., columns]`` as uint8 ``[..., columns * bits / 8]``."""
        bits = self.options.bits
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
        return (split_last(codes, 8 // bits) << shifts).sum(-2, dtype=torch.uint8)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """What `pack` took."""
        bits = self.options.bits
        return torch.cat([packed >> (i * bits) & (2**bits - 1) for i in range(8 // bits)], -1)

    def quantise(
        self, x: torch.Tensor, inside: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes like ``x`` as uint8; scales and minima, float16 ``[..., rows, groups]``.

        Args:
            x: float32 ``[..., rows, columns]``.
            inside: bool like ``x``: whose elements the range is of, some of each group. None: of all.
        """
        most, groups = 2**self.options.bits - 1, x.shape[-1] // self.options.group_size
        ends = [
            split_last(x if inside is None else x.masked_fill(~inside, end), groups)
            for end in (torch.inf, -torch.inf)
        ]
        least, largest = ends[0].amin(-1), ends[1].amax(-1)
        low = least.clamp(-LARGEST, LARGEST).half()
        scale = ((largest - least) / most).clamp(max=LARGEST).half()
        step = scale.float()[..., None]
        codes = ((split_last(x, groups) - low.float()[..., None]) / step).round().clamp(0, most)
        return torch.where(step > 0, codes, 0.0).flatten(-2).to(torch.uint8), scale, low

    def dequantise(self, codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """float32 ``[..., rows, columns]`` of what `quantise` returned."""
        groups = split_last(codes, codes.shape[-1] // self.options.group_size)
        return (groups * scale[..., None].float() + low[..., None].float()).flatten(-2)


def split_last(x: torch.Tensor, num: int) -> torch.Tensor:
    """The last dimension as ``num`` rows."""
    return x.reshape(*x.shape[:-1], num, x.shape[-1] // num)
