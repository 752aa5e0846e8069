# SPDX-License-Identifier: Apache-2.0
"""Codec kivi: what is in a block, how far what comes out is from what went in, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_ext.codecs.kivi import Kivi, KiviOptions


def codec_of(block_size: int = 64, head_size: int = 64, **options: Any) -> Kivi:
    return Kivi(KiviOptions(**options), block_size, head_size)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("group_size", [16, 32, 64])
def test_what_comes_out_is_within_half_a_step(bits: int, group_size: int) -> None:
    codec = codec_of(128, 64, bits=bits, group_size=group_size)
    keys, values = draw(3, 2, 128, 64), draw(3, 2, 128, 64, seed=1)
    encoded = codec.encode(keys, values)
    assert encoded.dtype == torch.uint8
    assert encoded.shape == (3, 2, 128 * codec.bytes_per_token)
    for found, given in zip(codec.decode(encoded), (keys.mT, values), strict=True):
        found = found.mT if given is not values else found
        groups = given.reshape(*given.shape[:-1], -1, group_size)
        step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
        error = (found - given).abs().reshape(groups.shape).amax(-1)
        assert bool((error <= step * 0.505 + 2e-3).all())


def test_by_hand() -> None:
    """16 tokens of keys that are their own number, in one channel: four bits say them exactly."""
    codec = codec_of(32, 32, group_size=16)
    keys = torch.zeros(32, 32)
    keys[:, 3] = torch.arange(32.0)
    values = torch.zeros(32, 32)
    values[5] = torch.arange(32.0) / 15
    encoded = codec.encode(keys, values)
    row = encoded[3 * 16 : 4 * 16]  # of channel 3: the byte i has the tokens i and 16 + i
    assert row.tolist() == [i | i << 4 for i in range(16)]
    scales = encoded[2 * 512 : 2 * 512 + 2 * 64].view(torch.float16).view(2, 32)
    assert scales[:, 3].tolist() == [1.0, 1.0]
    assert scales.sum() == 2
    found_keys, found_values = codec.decode(encoded)
    assert torch.equal(found_keys, keys)
    torch.testing.assert_close(found_values, values, rtol=0, atol=1e-3)
    assert codec.bytes_per_token == (2 * 32 * 4 // 8) + 2 * 2 * 2 * 2


def test_a_channel_of_large_values_costs_the_others_nothing() -> None:
    """What the paper is about: quantised token by token, keys with such a channel are mostly lost."""
    keys = draw(64, 64)
    keys[:, 7] += 50.0
    codec = codec_of(bits=2)
    rest = torch.arange(64) != 7
    error = (codec.decode(codec.encode(keys, keys))[0] - keys)[:, rest].square().mean()
    as_values = (codec.decode(codec.encode(keys, keys))[1] - keys)[:, rest].square().mean()
    assert float(error) < 0.25 < 0.75 < float(as_values)


def test_what_is_constant_or_too_large_stays_finite() -> None:
    codec = codec_of()
    keys = torch.full((64, 64), 2.5)
    found = codec.decode(codec.encode(keys, keys))
    assert all(torch.equal(each, keys) for each in found)
    keys[3, 5], keys[4, 6] = 1e6, -1e6
    assert all(bool(each.isfinite().all()) for each in codec.decode(codec.encode(keys, keys)))


def test_bytes_of_a_token() -> None:
    """Of bfloat16's 256 for a head of 64."""
    assert codec_of().bytes_per_token == 72
    assert codec_of(group_size=32).bytes_per_token == 80
    assert codec_of(bits=2).bytes_per_token == 40
    assert codec_of().format.raw_tokens_per_block(2) == 18
    assert codec_of().format.tail_blocks(2, 64) == 4
    assert codec_of().format.tail_blocks(4, 64) == 8  # nine tokens a block, none in two


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((64, 80), {}, "group_size=64 does not divide the head size 80"),
        ((32, 64), {}, "group_size=64 does not divide the block size 32"),
        ((32, 64), {"bits": 2, "group_size": 32}, "bits=2 with block size 32 is not allowed"),
    ],
)
def test_sizes_that_do_not_go_with_options(
    sizes: tuple[int, int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        codec_of(*sizes, **options)
