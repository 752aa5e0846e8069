# SPDX-License-Identifier: Apache-2.0
"""Attention over encoded blocks: the numba form beside the readable one, and what both are to be independent of."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from encoded_caches import CODECS, HEAD_SIZE, HEADS, KV_HEADS, SCALE, Cache, draw, part, retrieving

from vllm_ext.codecs.base import KVCodec
from vllm_ext.codecs.chelsea import Chelsea
from vllm_ext.codecs.gear import Gear
from vllm_ext.codecs.registry import CODECS as REGISTERED
from vllm_ext.codecs.selection import lists_of
from vllm_ext.codecs.streaming_llm import StreamingLLM, StreamingLLMOptions
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.encoded_attention import Reading

# Of the codecs' options; the others take the same code with other numbers, and compile for as long.
ONE_OF_EACH = {*REGISTERED, "kivi 2"}
# Whose bytes are the same in both forms; in the others sums have another order, and are rounded to float16.
SAME_BYTES = {"kivi", "mustafar", "streaming_llm", "snapkv", "critic"}


# What is in a block does not depend on the dtype, and each pair is compiled.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            pytest.param(name, torch.float32, marks=() if name in ONE_OF_EACH else pytest.mark.slow)
            for name in CODECS
        ),
        ("kivi", torch.bfloat16),
        pytest.param("actqkv", torch.bfloat16, marks=pytest.mark.slow),
        *(pytest.param(name, torch.float16, marks=pytest.mark.slow) for name in ("kivi", "actqkv")),
    ],
)
def test_the_forms_agree(name: str, dtype: torch.dtype) -> None:
    """Prompts in parts of all sizes, decoding across ends of blocks, trees: the same bytes, and near outputs."""
    codec = CODECS[name]
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
    codec = caches[0].codec
    for one, other in zip(*(cache.pages.flatten(0, 1).flatten(1) for cache in caches), strict=True):
        if codec.name in SAME_BYTES:
            assert torch.equal(one, other)
        elif not torch.equal(one, other):
            for decoded in zip(codec.decode(one), codec.decode(other), strict=True):
                torch.testing.assert_close(*decoded, rtol=0, atol=2e-3)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    if isinstance(codec, Gear):
        tolerance = max(tolerance, 5e-4)
    if isinstance(codec, Chelsea):  # a mean that is rounded to its neighbour weighs as much as many tokens
        tolerance = max(tolerance, 5e-5)
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
    codec = CODECS["kivi"]
    qkv = draw(200, 0)
    cache = Cache(codec, torch.float32, [200, 200], "numba")
    cache.table[1, :2] = cache.table[0, :2]
    first, second = cache.step([0, 128], [part(qkv, 0, 140), part(qkv, 128, 200)])
    (expected,) = Cache(codec, torch.float32, [200], "numba").step([0], [qkv])
    assert torch.equal(first, expected[:140])
    assert torch.equal(second, expected[128:])


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_window_is_a_mask(backend: Backend) -> None:
    """Of keys and values that float16 holds, beside attention over the whole text with the rest masked."""
    codec = StreamingLLM(StreamingLLMOptions(window=128, sinks=10), 64, HEAD_SIZE)
    qkv = [each.half().float() for each in draw(520, 0)]
    cache = Cache(codec, torch.float32, [520], backend)
    found = [*cache.step([0], [part(qkv, 0, 400)]), *cache.step([400], [part(qkv, 400, 520)])]
    block = torch.arange(520) // 64
    seen = torch.ones(520, 520, dtype=torch.bool).tril()
    seen &= (block[:, None] - block <= 2) | (block == 0)
    q, k, v = (each.transpose(0, 1).repeat_interleave(HEADS // each.shape[1], 0) for each in qkv)
    expected = (q @ k.mT * SCALE).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(torch.cat(found), expected.transpose(0, 1), rtol=2e-5, atol=2e-5)
    unmasked = (q @ k.mT * SCALE).masked_fill(~seen.new_ones(520, 520).tril(), -torch.inf).softmax(-1) @ v
    assert not torch.allclose(unmasked, expected, atol=1e-2)


def reading_of(
    codec: KVCodec, contexts: Sequence[int], num_rows: Sequence[int], drafts: bool = False
) -> Reading:
    """Rows behind the second block read two of three blocks; every third row is watched."""
    read: list[Any] = []
    for context, num in zip(contexts, num_rows, strict=True):
        lists = [[i for i in range(block) if i % 3 != 1] for block in range(10)]
        for position in [context] * num if drafts else range(context, context + num):
            block = position // codec.block_size
            read.append(lists[block] if position >= 150 else -1)
    lists_, lengths, list_of_row = (torch.from_numpy(each) for each in lists_of(read))
    watched = torch.full((len(read),), -1, dtype=torch.int32)
    watched[::3] = torch.arange(len(watched[::3]), dtype=torch.int32)
    return Reading(lists_, lengths, list_of_row, watched, torch.zeros(len(watched[::3]), 12))


@pytest.mark.parametrize("name", ["snapkv", "kivi"])
def test_lists_and_what_rows_attend_to(name: str) -> None:
    """Both forms: the same outputs and masses, in parts and trees; a block that is not read may hold anything."""
    codec, lengths = CODECS[name], [500, 260]
    tokens = [draw(length, seed) for seed, length in enumerate(lengths)]
    caches = [Cache(codec, torch.float32, lengths, backend) for backend in ("torch", "numba")]
    for cuts in (
        [(0, 140), (0, 60)],
        [(140, 321), (60, 200)],
        [(321, 480), (200, 250)],
        [(480, 500), (250, 260)],
    ):
        batch = [part(each, *cut) for each, cut in zip(tokens, cuts, strict=True)]
        contexts = [begin for begin, _ in cuts]
        readings = [reading_of(codec, contexts, [end - begin for begin, end in cuts]) for _ in caches]
        outputs = [
            cache.step(contexts, batch, reading=reading)
            for cache, reading in zip(caches, readings, strict=True)
        ]
        compare(caches, outputs, torch.float32)
        torch.testing.assert_close(readings[1].mass, readings[0].mass, rtol=1e-4, atol=1e-5)
        assert cuts[0][1] < 200 or float(readings[1].mass.max()) > 0.1
    for cache in caches:  # behind block 4 block 1 is not read, nor 4 of the longer one
        cache.pages[cache.table[:, 1]] = 255
        cache.pages[cache.table[0, 4]] = 255
    nodes = [draw(6, 50 + i) for i in range(2)]
    readings = [reading_of(codec, lengths, [6, 6], drafts=True) for _ in caches]
    outputs = [
        cache.step(lengths, nodes, [1, 1], [[-1, 0, 0, 1, 2, 2]] * 2, reading)
        for cache, reading in zip(caches, readings, strict=True)
    ]
    assert bool(torch.cat(outputs[1]).isfinite().all())
    compare(caches, outputs, torch.float32)
    torch.testing.assert_close(readings[1].mass, readings[0].mass, rtol=1e-4, atol=1e-5)
    assert float(readings[1].mass[:, [1, 4]].max()) == 0


def structured(length: int, seed: int) -> list[torch.Tensor]:
    """Keys of a block are alike, so that their mean says something, and some queries look for one of them."""
    qkv, generator = draw(length, seed), torch.Generator().manual_seed(seed + 1)
    topics = torch.randn((length // 64 + 1, KV_HEADS, HEAD_SIZE), generator=generator)
    block = torch.arange(length) // 64
    qkv[1] = 0.5 * qkv[1] + 2 * topics[block]
    looked = torch.randint(0, 5, (length,), generator=generator).clamp(max=block)
    qkv[0] = 0.3 * qkv[0] + 2 * topics[looked].repeat_interleave(HEADS // KV_HEADS, 1)
    return qkv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_forms_retrieve_the_same(dtype: torch.dtype) -> None:
    codec, lengths = CODECS["actqkv"], [500, 380]
    tokens = [structured(length, seed) for seed, length in enumerate(lengths)]
    caches = [Cache(codec, dtype, lengths, backend) for backend in ("torch", "numba")]
    for cuts in ([(0, 100), (0, 60)], [(100, 448), (60, 333)], [(448, 500), (333, 380)]):
        batch = [part(each, *cut) for each, cut in zip(tokens, cuts, strict=True)]
        num = sum(end - begin for begin, end in cuts)
        contexts = [begin for begin, _ in cuts]
        outputs = [cache.step(contexts, batch, reading=retrieving(num)) for cache in caches]
        compare(caches, outputs, dtype)
    nodes = [structured(6, 50 + i) for i in range(2)]
    tree = [-1, 0, 0, 1, 2, 2]
    outputs = [cache.step(lengths, nodes, [1, 1], [tree] * 2, retrieving(12)) for cache in caches]
    compare(caches, outputs, dtype)


def test_what_is_retrieved_does_not_depend_on_parts_or_drafts() -> None:
    """A row's probe is of the tokens before it: in one part, in parts, token by token, and as a path of a tree."""
    codec, qkv = CODECS["actqkv"], structured(330, 3)
    found = []
    for cuts in ([0, 330], [0, 17, 64, 65, 128, 191, 300, 330], [*range(0, 330, 7), 330]):
        cache = Cache(codec, torch.float32, [330, 330], "numba")
        rows = [
            cache.step([begin], [part(qkv, begin, end)], reading=retrieving(end - begin))[0]
            for begin, end in itertools.pairwise(cuts)
        ]
        found.append(torch.cat(rows))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    nodes, tree = structured(5, 9), [-1, 0, 1, 0, 3]
    for path in ([0, 1, 2], [0, 3, 4]):
        cache = Cache(codec, torch.float32, [340], "numba")
        cache.step([0], [qkv], reading=retrieving(330))
        (at_once,) = cache.step([330], [nodes], [1], [tree], retrieving(5))
        for depth, node in enumerate(path):
            (alone,) = cache.step([330 + depth], [part(nodes, node, node + 1)], reading=retrieving(1))
            torch.testing.assert_close(alone[0], at_once[node], rtol=1e-5, atol=1e-6)


def test_retrieval_of_all_is_attention() -> None:
    """With room and coverage for all, and with a budget for all, what is read is all."""
    qkv = structured(400, 1)
    (expected,) = Cache(CODECS["snapkv"], torch.float32, [400], "numba").step([0], [qkv])
    (whole,) = Cache(CODECS["actqkv of all"], torch.float32, [400], "numba").step(
        [0], [qkv], reading=retrieving(400)
    )
    assert torch.equal(whole, expected)
    (less,) = Cache(CODECS["actqkv"], torch.float32, [400], "numba").step([0], [qkv], reading=retrieving(400))
    assert torch.equal(less[:256], expected[:256])  # up to three blocks and its own
    assert not torch.allclose(less[320:], expected[320:], atol=1e-2)


def test_masses_are_attention_that_can_be_seen() -> None:
    """Each head gives a weight of one in all, its own block's part left out; in a second call they are added."""
    codec = CODECS["snapkv"]
    qkv = draw(150, 0)
    cache = Cache(codec, torch.float32, [200], "numba")
    cache.step([0], [qkv])
    q, k, _ = draw(1, 1)
    k[:] = -100 * q.view(KV_HEADS, -1, HEAD_SIZE).mean(
        1
    )  # its own block it does not like, but for what lies there
    nothing = torch.zeros(1, dtype=torch.int32)
    reading = Reading(nothing[None], nothing, nothing - 1, nothing, torch.zeros(1, 12))
    for _ in range(2):
        cache.step([150], [[q, k, k]], reading=reading)
    found = reading.mass[0] / 2
    keys = torch.cat([qkv[1], k]).transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0)
    weights = (q.transpose(0, 1) @ keys.mT * SCALE).softmax(-1)[:, 0]
    expected = weights[:, :128].view(HEADS, 2, 64).sum((0, 2))
    torch.testing.assert_close(found[:2], expected, rtol=2e-3, atol=1e-3)
    assert float(found[2:].max()) == 0


@pytest.mark.parametrize("name", ["snapkv", "kivi 2"])
def test_masses_do_not_depend_on_parts(name: str) -> None:
    """Bit for bit: choices are made of them."""
    codec = CODECS[name]
    qkv = draw(300, 0)
    masses = []
    for cuts in ([0, 300], [0, 17, 64, 65, 128, 191, 300], [*range(0, 300, 7), 300]):
        cache = Cache(codec, torch.float32, [300, 300], "numba")
        rows = []
        for begin, end in itertools.pairwise(cuts):
            watched = torch.arange(end - begin, dtype=torch.int32)
            reading = Reading(
                *(torch.zeros((1, 1), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)),
                *(watched - watched - 1, watched, torch.zeros(end - begin, 12)),
            )
            cache.step([begin], [part(qkv, begin, end)], reading=reading)
            rows.append(reading.mass)
        masses.append(torch.cat(rows))
    assert float(masses[0].max()) > 0.1
    assert torch.equal(masses[0], masses[1])
    assert torch.equal(masses[0], masses[2])


def test_blocks_are_what_is_read() -> None:
    """Zeros instead of an encoded block change what is behind it, and nothing in it."""
    codec = CODECS["kivi"]
    qkv = draw(140, 0)
    one, other = (Cache(codec, torch.float32, [140], "numba") for _ in range(2))
    for cache in (one, other):
        cache.step([0], [part(qkv, 0, 130)])
    other.pages[other.table[0, 0]] = 0
    last = part(qkv, 130, 140)
    assert not torch.allclose(one.step([130], [last])[0], other.step([130], [last])[0], atol=1e-3)


def test_what_does_not_fit_is_refused() -> None:
    codec = CODECS["kivi"]
    cache = Cache(codec, torch.float32, [64], "numba")
    qkv = draw(4, 0)
    cache.pages = cache.pages[..., :-1]
    with pytest.raises(ValueError, match=r"pages: torch\.uint8"):
        cache.step([0], [qkv])
