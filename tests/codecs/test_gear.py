# SPDX-License-Identifier: Apache-2.0
"""Codec gear: what outliers and the low-rank sum make good, what is in a block, what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from vllm_ext.codecs.gear import Gear, GearOptions, factors_of, orthonormal, start
from vllm_ext.codecs.kivi import Kivi, KiviOptions


def codec_of(block_size: int = 64, head_size: int = 64, **options: Any) -> Gear:
    return Gear(GearOptions(**options), block_size, head_size)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error_of(codec: Any, keys: torch.Tensor, values: torch.Tensor) -> float:
    found = codec.decode(codec.encode(keys, values))
    return sum(float((a - b).square().mean()) for a, b in zip(found, (keys, values), strict=True))


def test_without_rank_and_outliers_it_is_kivi() -> None:
    keys, values = draw(3, 2, 128, 64), draw(3, 2, 128, 64, seed=1)
    gear, kivi = codec_of(128, rank=0, outliers=0), Kivi(KiviOptions(), 128, 64)
    assert torch.equal(gear.encode(keys, values), kivi.encode(keys, values))
    assert gear.bytes_per_token == kivi.bytes_per_token


@pytest.mark.parametrize("bits", [2, 4])
def test_each_part_makes_the_error_smaller(bits: int) -> None:
    keys, values = draw(4, 64, 64), draw(4, 64, 64, seed=1)
    by_rank = [error_of(codec_of(bits=bits, rank=rank, outliers=0), keys, values) for rank in (0, 1, 2, 4, 8)]
    by_outliers = [error_of(codec_of(bits=bits, rank=0, outliers=num), keys, values) for num in (0, 1, 2, 4)]
    for errors in (by_rank, by_outliers):
        assert all(after < 0.99 * before for before, after in itertools.pairwise(errors))


def test_outliers_are_exact_and_leave_the_range_to_the_others() -> None:
    keys = draw(64, 64) * 0.1
    keys[9, 5], keys[11, 5] = 40.0, -30.0
    found = codec_of(rank=0).decode(codec_of(rank=0).encode(keys, keys))
    for each in found:
        assert float(each[9, 5]) == 40.0
        assert float(each[11, 5]) == -30.0
        assert float((each - keys).abs().max()) < 0.03
    assert (
        float(
            (Kivi(KiviOptions(), 64, 64).decode(codec_of(rank=0, outliers=0).encode(keys, keys))[0] - keys)
            .abs()
            .max()
        )
        > 1
    )


def test_the_power_iteration_finds_what_is_of_the_rank() -> None:
    """Near the best there is, by a singular value decomposition; and exactly where the error is of that rank."""
    matrix = draw(5, 64, 2) @ draw(5, 2, 128, seed=1)
    left, right = factors_of(matrix, 2)
    torch.testing.assert_close(left @ right.mT, matrix, rtol=0, atol=1e-3)
    noisy = matrix + 0.3 * draw(5, 64, 128, seed=2)
    left, right = factors_of(noisy, 2)
    best = torch.linalg.svdvals(noisy)[:, 2:].square().sum(-1)
    assert bool(((noisy - left @ right.mT).square().sum((-1, -2)) < 1.02 * best).all())
    torch.testing.assert_close(left.mT @ left, torch.eye(2).expand(5, 2, 2), rtol=0, atol=1e-5)


def test_where_the_iteration_starts() -> None:
    """Columns that are not near each other, for all sizes there are."""
    for columns in (32, 64, 128, 256):
        signs = start(columns, 8)
        assert set(signs.flatten().tolist()) == {-1.0, 1.0}
        assert float((orthonormal(signs).square().sum(0) - 1).abs().max()) < 1e-5
        assert float((signs.T @ signs / columns - torch.eye(8)).abs().max()) < 0.6


def test_what_is_constant_or_too_large_stays_finite() -> None:
    codec = codec_of()
    keys = torch.full((64, 64), 2.5)
    assert all(torch.equal(each, keys) for each in codec.decode(codec.encode(keys, keys)))
    keys[3, 5], keys[4, 6] = 1e6, -1e6
    assert all(bool(each.isfinite().all()) for each in codec.decode(codec.encode(keys, keys)))


def test_bytes_of_a_token() -> None:
    """Codes, scales and minima are kivi's 72; a rank is 4 of both sides' factors, an outlier at each end 2 times 3."""
    assert codec_of(rank=0, outliers=0).bytes_per_token == 72
    assert codec_of(rank=2, outliers=0).bytes_per_token == 72 + 2 * 2 * 2 * 2
    assert codec_of(rank=0, outliers=1).bytes_per_token == 72 + 2 * 2 * 3
    encoded = codec_of(rank=3, outliers=1).encode(draw(2, 64, 64), draw(2, 64, 64))
    assert encoded.shape == (2, 64 * codec_of(rank=3, outliers=1).bytes_per_token)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((64, 80), {}, "group_size=64 does not divide the head size 80"),
        ((512, 64), {}, "a block size of 512 is not allowed; allowed: up to 256"),
    ],
)
def test_sizes_that_do_not_go_with_options(
    sizes: tuple[int, int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        codec_of(*sizes, **options)
