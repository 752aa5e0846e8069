# SPDX-License-Identifier: Apache-2.0
"""Encoded KV caches of some requests, without an engine, for tests of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_ext.codecs.base import KVCodec
from vllm_ext.codecs.registry import CODECS as REGISTERED
from vllm_ext.codecs.registry import load_codec
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.encoded_attention import EncodedRows, Reading, encoded_attention

HEADS, KV_HEADS, HEAD_SIZE, SCALE = 6, 2, 64, 0.125


def make(name: str, block_size: int = 64, **options: Any) -> KVCodec:
    """A registered codec."""
    codec = load_codec(name)
    return codec(codec.Options(**options), block_size, HEAD_SIZE)


# Every registered codec under its name, and more of what some can do.
CODECS: dict[str, KVCodec] = {
    **{name: make(name, **load_codec(name).EXAMPLES[0]) for name in REGISTERED},
    "kivi small groups": make("kivi", 128, group_size=32),
    "kivi 2": make("kivi", bits=2),
    "gear small groups": make("gear", 128, group_size=32, rank=3, outliers=2),
    "gear without sums": make("gear", rank=0, outliers=2),
    "gear 2 without outliers": make("gear", bits=2, outliers=0),
    "mustafar 70": make("mustafar", 128, sparsity=0.7),
    "a window of kivi": make("kivi", window=64, sinks=65),
    "chelsea": make("chelsea", window=64, ratio=2),  # shorter, so that texts of five blocks are merged
    "chelsea without sinks": make("chelsea", window=1, sinks=0, ratio=3, rounds=1),
    "actqkv of all": make("actqkv", budget=6400, coverage=1.0),
    "spherical 3": make("spherical", bits=3),
    "spherical 5, long": make("spherical", 128, bits=5),
    "a window that ends in a block": make("streaming_llm", window=100),
    "no sinks": make("streaming_llm", window=128, sinks=0),
}


class Cache:
    """The blocks of some requests, whose tables are shuffled."""

    def __init__(self, codec: KVCodec, dtype: torch.dtype, lengths: Sequence[int], backend: Backend) -> None:
        self.codec, self.dtype, self.backend = codec, dtype, backend
        tail = codec.format.tail_blocks(dtype.itemsize, codec.block_size + 32)
        width = max(lengths) // codec.block_size + 1 + tail
        order = torch.randperm(len(lengths) * width, generator=torch.Generator().manual_seed(5))
        self.table = order.view(len(lengths), width).to(torch.int32)
        self.pages = torch.full(
            (len(order), KV_HEADS, codec.block_size, codec.bytes_per_token), 255, dtype=torch.uint8
        )

    def step(
        self,
        contexts: Sequence[int],
        qkv: Sequence[Sequence[torch.Tensor]],
        settled: Sequence[int] | None = None,
        parents: Sequence[Sequence[int]] | None = None,
        reading: Reading | None = None,
    ) -> list[torch.Tensor]:
        """``qkv``: by request, its rows' queries, keys and values."""
        num = [len(each[0]) for each in qkv]
        parents = [range(-1, n - 1) for n in num] if parents is None else parents
        query, key, value = (torch.cat(list(parts)).to(self.dtype) for parts in zip(*qkv, strict=True))
        counts = torch.tensor(num, dtype=torch.int32)
        rows = EncodedRows(
            self.table[: len(num)],
            (counts.cumsum(0) - counts).to(torch.int32),
            counts,
            torch.tensor(num if settled is None else settled, dtype=torch.int32),
            torch.tensor(contexts, dtype=torch.int32),
            torch.tensor([p for each in parents for p in each], dtype=torch.int32),
            reading,
        )
        output = torch.full_like(query, torch.nan)
        encoded_attention(query, key, value, self.pages, output, rows, self.codec.format, SCALE, self.backend)
        return list(torch.split(output, num))


def draw(length: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn((length, heads, HEAD_SIZE), generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def part(qkv: Sequence[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
    return [each[begin:end] for each in qkv]


def retrieving(num: int) -> Reading:
    """All rows choose what they read."""
    nothing = torch.zeros(1, dtype=torch.int32)
    of_row = torch.full((num,), -2, dtype=torch.int32)
    return Reading(nothing[None], nothing, of_row, of_row + 1, torch.zeros(0, 12))
