# SPDX-License-Identifier: Apache-2.0
"""Codec spherical: angles and back, products without keys, and which token gets which tier."""

from __future__ import annotations

import itertools

import pytest
import torch

from vllm_ext.codecs.spherical import LANES, Spherical, SphericalOptions, from_polar, to_polar


def codec_of(bits: int = 4, block_size: int = 64, head_size: int = 64) -> Spherical:
    return Spherical(SphericalOptions(bits=bits), block_size, head_size)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_polar_and_back() -> None:
    """The radius is the norm; a first angle is the pair's, which rotates as it does; the others do not."""
    keys = draw(7, 64)
    radius, first, others = to_polar(keys)
    torch.testing.assert_close(radius, keys.norm(dim=1))
    torch.testing.assert_close(from_polar(radius, first, others), keys, rtol=0, atol=1e-5)
    turn = torch.rand(32)
    x, y = keys.chunk(2, 1)
    rotated = torch.cat([x * turn.cos() - y * turn.sin(), x * turn.sin() + y * turn.cos()], 1)
    moved = to_polar(rotated)
    torch.testing.assert_close(moved[0], radius)
    torch.testing.assert_close(moved[2], others, rtol=0, atol=1e-4)
    apart = (moved[1] - first - turn) / (2 * torch.pi)
    torch.testing.assert_close(apart, apart.round(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 32), (64, 128)])
def test_scores_by_tables_are_those_of_decoded_keys(bits: int, sizes: tuple[int, int]) -> None:
    codec = codec_of(bits, *sizes)
    keys, query = draw(*sizes) * 3, draw(sizes[1], seed=1)
    block = codec.encode(keys, keys)
    found = codec.scores(query, block)
    decoded = codec.decode(block)[0] @ query
    assert len(found) == codec.most or bits > 4
    torch.testing.assert_close(found, decoded[: len(found)], rtol=1e-4, atol=1e-3)
    assert not decoded[len(found) :].any()


def test_more_bits_are_nearer() -> None:
    keys = draw(64, 64) + 3 * draw(64, seed=1)  # a mean of its own in each channel
    errors = []
    for bits in (2, 3, 4, 5, 6, 8):
        codec = codec_of(bits)
        block = codec.encode(keys, keys)
        found = codec.decode(block)[0]
        there = codec.log_counts(block) == 0
        # Tokens lie in the order of their tiers.
        nearest = torch.cdist(found[there], keys).amin(1)
        missing = int((~there).sum())
        errors.append(float(nearest.square().sum()) + missing * float(keys.square().sum(1).mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01 * float(keys.square().sum()) < errors[0]


def test_the_norm_is_kept() -> None:
    codec, keys = codec_of(), draw(64, 64) * 5
    found = codec.decode(codec.encode(keys, keys))[0]
    torch.testing.assert_close(
        found.norm(dim=1).sort().values, keys.norm(dim=1).sort().values, rtol=1e-3, atol=0
    )


def test_tiers_are_the_best_there_is_room_for() -> None:
    """Beside all numbers of units, and of tokens all exchanges of two."""
    generator = torch.Generator().manual_seed(3)
    for units in (2, 3, 4, 5, 6):
        codec = codec_of(units)
        dropped, low, high = (scale * torch.rand(64, generator=generator) for scale in (30.0, 3.0, 0.1))
        high_tokens, kept = codec.tiers(dropped, low, high)
        assert set(high_tokens.tolist()) <= set(kept.tolist())
        assert len(high_tokens) % LANES == 0 == len(kept) % LANES
        assert (len(high_tokens) + len(kept)) // LANES <= units

        tier = torch.zeros(64, dtype=torch.int64)
        tier[kept], tier[high_tokens] = 1, 2
        errors = torch.stack([dropped, low, high])
        total = float(errors.gather(0, tier[None]).sum())
        for one, other in itertools.combinations(range(64), 2):
            if {int(tier[one]), int(tier[other])} != {0, 2}:  # the greedy choice is exact for neighbours
                swapped = tier.clone()
                swapped[one], swapped[other] = tier[other], tier[one]
                assert float(errors.gather(0, swapped[None]).sum()) >= total - 1e-3


def test_where_a_few_weigh_much_they_get_more() -> None:
    """Sixteen keys ten times as long as the others are in the high tier, and as many of the least are dropped."""
    codec, keys = codec_of(), 0.3 * draw(64, 64)
    keys[8:24] *= 30
    values = 0.1 * draw(64, 64, seed=1)
    block = codec.encode(keys, values)
    assert block[sum(codec._parts) - 2 : sum(codec._parts)].tolist() == [1, 2]
    found = codec.decode(block)[0]
    torch.testing.assert_close(
        found[:16], keys[8:24], rtol=0, atol=0.02 * float(keys[8:24].norm(dim=1).max())
    )
    assert codec.log_counts(block).isinf().tolist() == [False] * 48 + [True] * 16
    even = codec.encode(draw(64, 64), draw(64, 64, seed=1))
    assert even[sum(codec._parts) - 2 : sum(codec._parts)].tolist() == [0, 4]


def test_what_is_zero_or_too_large_stays_finite() -> None:
    codec = codec_of()
    keys = torch.zeros(64, 64)
    assert not codec.decode(codec.encode(keys, keys))[0].any()
    keys[3, 5], keys[4, 6] = 1e6, -1e6
    assert all(bool(each.isfinite().all()) for each in codec.decode(codec.encode(keys, keys)))


def test_bytes_of_a_token() -> None:
    """Those of kivi with as many bits, at 4."""
    assert [codec_of(bits).bytes_per_token for bits in (2, 3, 4, 6, 8)] == [37, 55, 72, 88, 104]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((64, 80), "a head size of 80 is not allowed"), ((96, 64), "a block size of 96 is not allowed")],
)
def test_sizes_that_are_refused(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        codec_of(4, *sizes)
