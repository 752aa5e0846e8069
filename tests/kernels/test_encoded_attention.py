# SPDX-License-Identifier: Apache-2.0
"""Attention over encoded blocks: the numba form beside the readable one, and what both are to be independent of."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from vllm_ext.codecs.base import KVCodec
from vllm_ext.codecs.kivi import Kivi, KiviOptions
from vllm_ext.codecs.mustafar import Mustafar, MustafarOptions
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.encoded_attention import EncodedRows, encoded_attention

HEADS, KV_HEADS, HEAD_SIZE, SCALE = 6, 2, 64, 0.125
CODECS: dict[str, KVCodec] = {
    "kivi 4": Kivi(KiviOptions(), 64, HEAD_SIZE),
    "kivi 4 small groups": Kivi(KiviOptions(group_size=32), 128, HEAD_SIZE),
    "kivi 2": Kivi(KiviOptions(bits=2), 64, HEAD_SIZE),
    "mustafar 50": Mustafar(MustafarOptions(), 64, HEAD_SIZE),
    "mustafar 70": Mustafar(MustafarOptions(sparsity=0.7), 128, HEAD_SIZE),
}


class Cache:
    """The blocks of some requests, whose tables are shuffled."""

    def __init__(self, codec: KVCodec, dtype: torch.dtype, lengths: Sequence[int], backend: Backend) -> None:
        self.codec, self.dtype, self.backend = codec, dtype, backend
        tail = codec.tail_blocks(dtype.itemsize, codec.block_size + 32)
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
        )
        output = torch.full_like(query, torch.nan)
        encoded_attention(query, key, value, self.pages, output, rows, self.codec, SCALE, self.backend)
        return list(torch.split(output, num))


def draw(length: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn((length, heads, HEAD_SIZE), generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def part(qkv: Sequence[torch.Tensor], begin: int, end: int) -> list[torch.Tensor]:
    return [each[begin:end] for each in qkv]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_forms_agree(codec: KVCodec, dtype: torch.dtype) -> None:
    """Prompts in parts of all sizes, decoding across ends of blocks, trees: the same bytes, and near outputs."""
    lengths = [300, 150, 64]
    tokens = [draw(length, seed) for seed, length in enumerate(lengths)]
    caches = [Cache(codec, dtype, lengths, backend) for backend in ("torch", "numba")]
    cuts = [[0, 1, 63, 64, 200, 299, 300], [0, 100, 126, 127, 128, 129, 150], [0, 10, 20, 30, 40, 63, 64]]
    for i in range(6):
        batch = [part(each, cut[i], cut[i + 1]) for each, cut in zip(tokens, cuts, strict=True)]
        outputs = [cache.step([cut[i] for cut in cuts], batch) for cache in caches]
        compare(caches, outputs, dtype)
    tree = [-1, 0, 0, 1, 2, 2]
    settled = [1, 1, 1]
    batch = [draw(6, 50 + i) for i in range(3)]
    outputs = [cache.step(lengths, batch, settled, [tree] * 3) for cache in caches]
    compare(caches, outputs, dtype)


def compare(caches: Sequence[Cache], outputs: Sequence[Any], dtype: torch.dtype) -> None:
    assert torch.equal(caches[0].pages, caches[1].pages)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for reference, found in zip(*outputs, strict=True):
        torch.testing.assert_close(found, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_prompts_in_parts_say_the_same(codec: KVCodec) -> None:
    """Whatever the parts, each row's bits are those of the prompt in one part, also alone in a batch."""
    qkv = draw(300, 0)
    whole = Cache(codec, torch.float32, [300], "numba")
    (expected,) = whole.step([0], [qkv])
    for cuts in ([0, 17, 64, 65, 128, 191, 300], [0, 128, 256, 300], [*range(0, 300, 7), 300]):
        cache = Cache(codec, torch.float32, [300, 300], "numba")
        found = []
        for begin, end in itertools.pairwise(cuts):
            one, _ = cache.step([begin, begin], [part(qkv, begin, end), part(draw(300, 9), begin, end)])
            found.append(one)
        assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_rows_of_drafts_are_what_they_would_be_alone(codec: KVCodec) -> None:
    """A tree's paths, verified at once, and then each token by token; what was not accepted leaves no trace."""
    qkv = draw(200, 0)
    nodes = draw(5, 1)
    tree = [-1, 0, 1, 0, 3]  # the root, and two paths of two
    for path in ([0, 1, 2], [0, 3, 4]):
        cache = Cache(codec, torch.float32, [210], "numba")
        cache.step([0], [qkv])
        (at_once,) = cache.step([200], [nodes], [1], [tree])
        for depth, node in enumerate(path):  # in place of what was drafted
            (alone,) = cache.step([200 + depth], [part(nodes, node, node + 1)])
            # The sums have another order: what is masked lies between.
            torch.testing.assert_close(alone[0], at_once[node], rtol=1e-5, atol=1e-6)


def test_blocks_of_another_request() -> None:
    """A request that begins with blocks another one has filled, in the same step even."""
    codec = CODECS["kivi 4"]
    qkv = draw(200, 0)
    cache = Cache(codec, torch.float32, [200, 200], "numba")
    cache.table[1, :2] = cache.table[0, :2]
    first, second = cache.step([0, 128], [part(qkv, 0, 140), part(qkv, 128, 200)])
    (expected,) = Cache(codec, torch.float32, [200], "numba").step([0], [qkv])
    assert torch.equal(first, expected[:140])
    assert torch.equal(second, expected[128:])


def test_blocks_are_what_is_read() -> None:
    """Zeros in the place of an encoded block change what is behind it, and nothing in it."""
    codec = CODECS["kivi 4"]
    qkv = draw(140, 0)
    one, other = (Cache(codec, torch.float32, [140], "numba") for _ in range(2))
    for cache in (one, other):
        cache.step([0], [part(qkv, 0, 130)])
    other.pages[other.table[0, 0]] = 0
    last = part(qkv, 130, 140)
    assert not torch.allclose(one.step([130], [last])[0], other.step([130], [last])[0], atol=1e-3)


def test_what_does_not_fit_is_refused() -> None:
    codec = CODECS["kivi 4"]
    cache = Cache(codec, torch.float32, [64], "numba")
    qkv = draw(4, 0)
    cache.pages = cache.pages[..., :-1]
    with pytest.raises(ValueError, match=r"pages: torch\.uint8"):
        cache.step([0], [qkv])
    cache = Cache(codec, torch.float32, [64], "triton")
    with pytest.raises(ValueError, match="backend='triton'"):
        cache.step([0], [qkv])
