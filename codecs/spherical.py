# SPDX-License-Identifier: Apache-2.0
"""Codec spherical: keys as a radius and angles, of which tokens that matter more get more bits, and others none.

A key's pairs of channels that rotate together are each an angle and a length; lengths are paired in turn, until one
is left, the key's own. So ``head_size - 1`` angles and a radius are the key. In two tiers an angle of a first pair has
5 or 8 bits and one of the others 3 or 8; the third tier is nothing at all: the token is forgotten. Which token is in
which tier is what makes the sum of squared errors least in the room there is (rate-distortion retention).

Source: "Spherical KV", arXiv 2605.18856: angle-domain keys, and rate-distortion retention by tiers; of its coding only
the abstract was at hand. Angles of angles are as in PolarQuant, arXiv 2502.02617.
Deviations: tiers are of LANES tokens of a block, and blocks have one size; a token's utility is its own squared error,
as a block knows no queries (the paper: expected attention); values are in 4 bits as in codec kivi. Scores by table
look-ups, without keys, are `scores` here; the kernel makes keys by the same tables, for all query heads at once.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field

from vllm_ext.codecs.base import CodecOptions, KVCodec

LARGEST = 65504.0  # of float16
LANES = 16  # tokens of a tier's unit
HIGH, LOW = (8, 8), (5, 3)  # bits of a first angle and of another one


class SphericalOptions(CodecOptions):
    bits: int = Field(
        default=4,
        ge=2,
        le=8,
        description="of an angle, in the mean over a block's tokens; tokens have 8, 4 or none",
    )


class Spherical(KVCodec):
    """A block has room for ``units`` of LANES tokens in the low tier, two of which are one in the high tier.

    Codes of the keys, high tier first: of the first angles ``[head_size / 2][tokens]`` and of the others behind them,
    of the low tier both in a byte, the first ones' in its lower bits; codes of the values, ``[tokens][head_size / 2]``,
    scales and minima, float16 ``[tokens]`` each; radii, float16 ``[tokens]``; where the ranges of the others begin and
    their width, float16 ``[head_size / 2 - 1]`` each; and how many units are high and how many low, uint8.
    """

    name = "spherical"
    summary = "keys as radius and angles in bits by weight, values in 4 bits"
    paper = "arXiv 2605.18856"
    Options = SphericalOptions

    def __init__(self, options: SphericalOptions, block_size: int, head_size: int) -> None:
        super().__init__(options, block_size, head_size)
        if head_size & (head_size - 1) or head_size < 2 * LANES:
            raise ValueError(
                f"a head size of {head_size} is not allowed; allowed: powers of two from {2 * LANES} on"
            )
        if block_size % (4 * LANES):
            raise ValueError(
                f"a block size of {block_size} is not allowed; allowed: multiples of {4 * LANES}"
            )
        self.groups = block_size // LANES
        self.units = self.groups * options.bits // 4
        self.most = min(self.groups, self.units) * LANES  # tokens that are kept
        self._parts = [self.units * LANES * head_size // 2, self.most * head_size // 2]
        self._parts += [2 * self.most] * 3 + [head_size - 2] * 2 + [2]

    @property
    def bytes_per_token(self) -> int:
        return -(-sum(self._parts) // self.block_size)

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.units,)

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        shape = keys.shape[:-2]
        flat = [
            self._encode(*each)
            for each in zip(
                keys.reshape(-1, *keys.shape[-2:]), values.reshape(-1, *values.shape[-2:]), strict=True
            )
        ]
        return torch.stack(flat).view(*shape, -1)

    def decode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class; of what is forgotten 0."""
        flat = [self._decode(each) for each in blocks.reshape(-1, blocks.shape[-1])]
        size = (*blocks.shape[:-1], self.block_size, self.head_size)
        if not flat:
            return torch.zeros(size), torch.zeros(size)
        return tuple(torch.stack(side).view(size) for side in zip(*flat, strict=True))  # type: ignore[return-value]

    def log_counts(self, blocks: torch.Tensor) -> torch.Tensor:
        """See the base class: what is not there has no weight."""
        kept = LANES * blocks[..., sum(self._parts) - 2 : sum(self._parts)].sum(-1, dtype=torch.int64)
        there = torch.arange(self.block_size) < kept[..., None]
        return torch.where(there, 0.0, -torch.inf)

    def scores(self, query: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """Products of a query, float32 ``[head_size]``, with a block's keys, ``[tokens kept]``, by look-ups in tables.

        A pair's part of the product is its length times what the query has at its angle, a number of a table; pairs
        come together as their lengths do.
        """
        radius, first, others, bits = self._polar(block)
        x, y = query.chunk(2)
        found = []
        for token in range(len(radius)):
            turn = 2 * math.pi / 2 ** int(bits[token, 0])
            table = torch.outer(x, (torch.arange(2 ** int(bits[token, 0])) * turn).cos())
            table += torch.outer(y, (torch.arange(2 ** int(bits[token, 0])) * turn).sin())
            parts = table[torch.arange(len(x)), first[token].long()]
            start = 0
            while len(parts) > 1:
                half = len(parts) // 2
                angle = others[token, start : start + half]
                parts = parts[:half] * angle.cos() + parts[half:] * angle.sin()
                start += half
            found.append(radius[token] * parts[0])
        return torch.stack(found)

    def _encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Of one block: ``[block_size, head_size]`` each."""
        radius, first, others = to_polar(keys)
        radius = radius.clamp(max=LARGEST).half()
        low = others.amin(0).half().float()
        width = (others.amax(0) - low).clamp(min=0).half().float()
        codes, errors = [], [keys.square().sum(1) + values.square().sum(1)]
        for bits in (LOW, HIGH):
            code = self._quantise(first, others, low, width, bits)
            codes.append(code)
            made = from_polar(radius.float(), *self._angles(*code, low, width, bits))
            errors.append((keys - made).square().sum(1))
        quantised = quantise_rows(values)
        errors[1:] = [each + (values - dequantise_rows(*quantised)).square().sum(1) for each in errors[1:]]
        high, kept = self.tiers(*errors)
        rest = torch.tensor([i for i in kept.tolist() if i not in set(high.tolist())], dtype=torch.int64)
        order = torch.cat([high, rest])
        bytes_ = [codes[1][i][high].T.flatten() for i in range(2)]
        # The last one of the others is none.
        bytes_[1] = torch.cat([bytes_[1], bytes_[1].new_zeros(len(high))])
        small, large = codes[0][0][rest].T, codes[0][1][rest].T
        both = small.clone()
        both[:-1] += large << LOW[0]
        of_keys = torch.cat([*bytes_, both.flatten()])
        packed, scale, least = (part[order] for part in quantised)
        parts = [
            fill(of_keys, self._parts[0]),
            fill(
                (packed[:, : self.head_size // 2] | packed[:, self.head_size // 2 :] << 4).flatten(),
                self._parts[1],
            ),
            *(
                fill(part.contiguous().view(torch.uint8), 2 * self.most)
                for part in (scale, least, radius[order])
            ),
            *(part.half().view(torch.uint8) for part in (low, width)),
            torch.tensor([len(high) // LANES, len(rest) // LANES], dtype=torch.uint8),
        ]
        return fill(torch.cat(parts), self.block_size * self.bytes_per_token)

    def tiers(
        self, dropped: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Errors of each token in each tier, float32 ``[block_size]``, to the tokens in the high tier and all kept.

        Of all numbers of units in both tiers that there is room for the least sum of errors; of tokens those in the
        high tier that gain the most by it, and those dropped that lose the least. Ascending both.
        """
        gain = (low - high).sort(descending=True, stable=True)
        best: tuple[float, torch.Tensor, torch.Tensor] | None = None
        for num_high in range(self.units // 2 + 1):
            num_low = min(self.units - 2 * num_high, self.groups - num_high)
            if num_low < 0:
                continue
            top = gain.indices[: num_high * LANES]
            others = torch.ones(self.block_size, dtype=torch.bool)
            others[top] = False
            left = others.nonzero().flatten()
            loss = (dropped - low)[left].sort(descending=True, stable=True)
            rest = left[loss.indices[: num_low * LANES]]
            others[rest] = False
            error = float(high[top].sum() + low[rest].sum() + dropped[others].sum())
            if best is None or error < best[0]:
                best = error, top.sort().values, torch.cat([top, rest]).sort().values
        assert best is not None
        return best[1], best[2]

    def _quantise(
        self,
        first: torch.Tensor,
        others: torch.Tensor,
        low: torch.Tensor,
        width: torch.Tensor,
        bits: tuple[int, int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        turns, most = 2 ** bits[0], 2 ** bits[1] - 1
        code = (first * (turns / (2 * math.pi))).round().long() % turns
        step = torch.where(width > 0, width / most, 1.0)
        return code.to(torch.uint8), ((others - low) / step).round().clamp(0, most).to(torch.uint8)

    def _angles(
        self,
        first: torch.Tensor,
        others: torch.Tensor,
        low: torch.Tensor,
        width: torch.Tensor,
        bits: tuple[int, int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        turn, most = 2 * math.pi / 2 ** bits[0], 2 ** bits[1] - 1
        return first.float() * turn, low + others.float() * (width / most)

    def _polar(self, block: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of a block's kept tokens: radii, codes of the first angles, the other angles, and bits by token."""
        parts = torch.split(block[: sum(self._parts)], self._parts)
        num_high, num_low = (int(n) * LANES for n in parts[7])
        half = self.head_size // 2
        high = parts[0][: num_high * self.head_size].view(2, half, num_high)
        at = num_high * self.head_size
        both = parts[0][at : at + num_low * half].view(half, num_low)
        low, width = (part.contiguous().view(torch.float16).float() for part in parts[5:7])
        firsts = torch.cat([high[0].T, both.T & (2 ** LOW[0] - 1)])
        angles = [
            self._angles(codes[:, :0], codes[:, :-1], low, width, bits)[1]
            for codes, bits in ((high[1].T, HIGH), (both.T >> LOW[0], LOW))
        ]
        bits = torch.tensor([HIGH] * num_high + [LOW] * num_low).view(-1, 2)
        radius = parts[4].contiguous().view(torch.float16).float()[: num_high + num_low]
        return radius, firsts, torch.cat(angles), bits

    def _decode(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        radius, firsts, others, bits = self._polar(block)
        first = firsts.float() * (2 * math.pi / 2.0 ** bits[:, :1])
        parts = torch.split(block[: sum(self._parts)], self._parts)
        codes = parts[1].view(self.most, -1)
        scale, least = (part.contiguous().view(torch.float16) for part in parts[2:4])
        values = dequantise_rows(torch.cat([codes & 15, codes >> 4], 1), scale, least)[: len(radius)]
        made = torch.zeros(2, self.block_size, self.head_size)
        made[0, : len(radius)] = from_polar(radius, first, others)
        made[1, : len(radius)] = values
        return made[0], made[1]


def to_polar(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Radii ``[tokens]``, first angles ``[tokens, head_size / 2]``, the other ones ``[tokens, head_size / 2 - 1]``."""
    x, y = keys.chunk(2, -1)
    first, length, others = torch.atan2(y, x), torch.hypot(x, y), []
    while length.shape[-1] > 1:
        x, y = length.chunk(2, -1)
        others.append(torch.atan2(y, x))
        length = torch.hypot(x, y)
    return length[..., 0], first, torch.cat(others, -1)


def from_polar(radius: torch.Tensor, first: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The keys."""
    length, end = radius[..., None], others.shape[-1]
    while end:
        angle = others[..., end - length.shape[-1] : end]
        end -= length.shape[-1]
        length = torch.cat([length * angle.cos(), length * angle.sin()], -1)
    return torch.cat([length * first.cos(), length * first.sin()], -1)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """4 bits: codes like ``x`` as uint8, and float16 scales and minima of the rows."""
    least = x.amin(-1)
    scale = ((x.amax(-1) - least) / 15).clamp(max=LARGEST).half()
    least = least.clamp(-LARGEST, LARGEST).half()
    step = scale.float()[:, None]
    codes = ((x - least.float()[:, None]) / step).round().clamp(0, 15)
    return torch.where(step > 0, codes, 0.0).to(torch.uint8), scale, least


def dequantise_rows(codes: torch.Tensor, scale: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """What `quantise_rows` took."""
    return codes.float() * scale.float()[:, None] + least.float()[:, None]


def fill(part: torch.Tensor, size: int) -> torch.Tensor:
    """With zeros behind it."""
    return torch.cat([part, part.new_zeros(size - len(part))])
