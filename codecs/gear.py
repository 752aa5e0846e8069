# SPDX-License-Identifier: Apache-2.0
"""Codec gear: quantised as by KIVI, with what that gets wrong made good: outliers kept apart, and a low-rank sum.

``X = D + L + S``: of each row the elements ``S`` at both ends are kept as they are, so that the range of the codes
``D`` is that of the others; of the error ``E`` that is left, ``L`` is the best of rank ``rank`` that a few steps of a
power iteration find.

Source: "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference of LLM", arXiv
2403.05527, section 3 and algorithm 1, with KIVI's groups as the backbone.
Deviations: a fixed number of outliers of a row (the paper: 2 % of it); where one is, it is the sum, so that ``E`` is 0
there, and codes' ranges leave it out (the authors fill in a mean); keys' rows are channels in ``E`` too, as they lie;
the iteration begins at fixed signs, the same in all blocks and ranks, and orthonormalises in each step, which changes
no span; one rank for prompts and answers; what stays in full precision is the block that fills up.
"""

from __future__ import annotations

import torch
from pydantic import Field

from vllm_ext.codecs.codes import LARGEST, CodesCodec, CodesOptions, split_last

LOOPS = 3
TINY = 1e-12  # squares of columns below are taken for 0


class GearOptions(CodesOptions):
    group_size: int = Field(
        default=64,
        ge=32,
        le=256,
        description="elements that share a scale and a minimum, which together take 32 bits",
    )
    rank: int = Field(default=1, ge=0, le=8, description="of what is added to the codes")
    outliers: int = Field(
        default=2,
        ge=0,
        le=4,
        description="of a channel of a block's keys, and of a token's values, how many of the largest elements, and of "
        "the smallest, are kept as they are",
    )


class Gear(CodesCodec):
    """Codes of the keys and of the values, and scales and minima as in codec kivi; then float16 factors of the rows and
    of the columns, ``[rank][rows]`` and ``[rank][columns]``, of the keys and of the values; float16 outliers,
    ``[2 * outliers][rows]``, largest first and then smallest first, of the keys and of the values; and uint8 columns of
    the outliers.
    """

    name = "gear"
    summary = "2 or 4 bits, outliers, and a low-rank sum of what codes get wrong"
    paper = "arXiv 2403.05527"
    Options = GearOptions

    def __init__(self, options: GearOptions, block_size: int, head_size: int) -> None:
        super().__init__(options, block_size, head_size)
        for name, size in (("block size", block_size), ("head size", head_size)):
            if size > 256:
                raise ValueError(f"a {name} of {size} is not allowed; allowed: up to 256")
        tokens, channels, group_size = block_size, head_size, options.group_size
        both = 2 * (tokens + channels)
        self._parts = [tokens * channels * options.bits // 8] * 2 + [2 * tokens * channels // group_size] * 4
        self._parts += [options.rank * both] * 2
        self._parts += [2 * options.outliers * rows * size for size in (2, 1) for rows in (channels, tokens)]

    @property
    def bytes_per_token(self) -> int:
        return -(-sum(self._parts) // self.block_size)

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.options.bits, self.options.group_size, self.options.rank, self.options.outliers

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        codes, affine, factors, kept, places = [], [], [], [], []
        for x in (keys.mT, values):
            place = self._outliers(x)
            inside = torch.ones_like(x, dtype=torch.bool).scatter_(-1, place, False)
            found = self.quantise(x, inside)
            error = torch.where(inside, x - self.dequantise(*found), 0.0)
            codes.append(self.pack(found[0]).flatten(-2))
            affine += [part.mT.flatten(-2).contiguous().view(torch.uint8) for part in found[1:]]
            sides = torch.cat([part.mT.flatten(-2) for part in factors_of(error, self.options.rank)], -1)
            factors.append(sides.half().view(torch.uint8))
            outliers = x.gather(-1, place).clamp(-LARGEST, LARGEST).half()
            kept.append(outliers.mT.flatten(-2).contiguous().view(torch.uint8))
            places.append(place.mT.flatten(-2).to(torch.uint8))
        parts = [*codes, *affine, *factors, *kept, *places]
        left = self.block_size * self.bytes_per_token - sum(self._parts)
        return torch.cat([*parts, parts[0].new_zeros(*parts[0].shape[:-1], left)], -1)

    def decode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [part.contiguous() for part in torch.split(blocks[..., : sum(self._parts)], self._parts, -1)]
        halves = [part.view(torch.float16) for part in parts[2:10]]
        sides = []
        for i, (rows, columns) in enumerate(
            ((self.head_size, self.block_size), (self.block_size, self.head_size))
        ):
            groups = columns // self.options.group_size
            scale, low = (split_last(part, groups).mT for part in halves[2 * i : 2 * i + 2])
            x = self.dequantise(self.unpack(split_last(parts[i], rows)), scale, low)
            if self.options.rank:
                factors = torch.split(
                    halves[4 + i].float(), [self.options.rank * n for n in (rows, columns)], -1
                )
                of_rows, of_columns = (split_last(part, self.options.rank) for part in factors)
                x = x + of_rows.mT @ of_columns
            if num := 2 * self.options.outliers:
                place = split_last(parts[10 + i], num).mT.long()
                x = x.scatter(-1, place, split_last(halves[6 + i], num).mT.float())
            sides.append(x)
        return sides[0].mT, sides[1]

    def _outliers(self, x: torch.Tensor) -> torch.Tensor:
        """Columns, int64 ``[..., rows, 2 * outliers]``; of equal ones the first."""
        ends = [
            x.sort(dim=-1, descending=descending, stable=True).indices[..., : self.options.outliers]
            for descending in (True, False)
        ]
        return torch.cat(ends, -1)


def factors_of(error: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., rows, rank]``, orthonormal, and ``[..., columns, rank]``, whose product is near the best of its rank."""
    columns = error.shape[-1]
    right = start(columns, rank).expand(*error.shape[:-2], columns, rank)
    for _ in range(LOOPS):
        left = orthonormal(error @ orthonormal(right))
        right = error.mT @ left
    return left, right


def start(columns: int, rank: int) -> torch.Tensor:
    """Signs, float32 ``[columns, rank]``, by a hash."""
    column, j = torch.arange(columns)[:, None] + 1, torch.arange(rank) + 1
    return 1.0 - 2.0 * ((column * column * j * 40503 + column * 9973 * j) >> 9 & 1).float()


def orthonormal(x: torch.Tensor) -> torch.Tensor:
    """Columns by Gram and Schmidt; one that is in the span of those before is 0."""
    found: list[torch.Tensor] = []
    for column in x.unbind(-1):
        for before in found:
            column = column - (column * before).sum(-1, keepdim=True) * before
        square = column.square().sum(-1, keepdim=True)
        found.append(torch.where(square > TINY, column * square.clamp(min=TINY).rsqrt(), 0.0))
    return torch.stack(found, -1) if found else x
