# SPDX-License-Identifier: Apache-2.0
"""Codec mustafar: what is kept, and how it lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_ext.codecs.mustafar import Mustafar, MustafarOptions


def codec_of(block_size: int = 32, head_size: int = 64, **options: Any) -> Mustafar:
    return Mustafar(MustafarOptions(**options), block_size, head_size)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


@pytest.mark.parametrize(("sparsity", "kept"), [(0.5, 33), (0.7, 21)])
def test_the_largest_of_each_token_are_kept_as_they_are(sparsity: float, kept: int) -> None:
    codec = codec_of(sparsity=sparsity)
    given = draw(3, 2, 32, 64), draw(3, 2, 32, 64, seed=1)
    encoded = codec.encode(*given)
    assert encoded.shape == (3, 2, 32 * codec.bytes_per_token)
    assert codec.kept == kept
    for x, found in zip(given, codec.decode(encoded), strict=True):
        assert bool(((found != 0).sum(-1) == kept).all())
        assert torch.equal(found[found != 0], x[found != 0])
        smallest = torch.where(found != 0, x.abs(), torch.inf).amin(-1)
        largest_dropped = torch.where(found == 0, x.abs(), 0).amax(-1)
        assert bool((smallest >= largest_dropped).all())


def test_ties_are_kept_in_order() -> None:
    """As many of a token as of any other, the first; zeros too."""
    codec = codec_of(16, 16)
    keys, values = torch.zeros(16, 16), torch.zeros(16, 16)
    keys[:] = 2.0
    values[3, 15] = 1.0
    encoded = codec.encode(keys, values)
    found_keys, found_values = codec.decode(encoded)
    assert codec.kept == 9
    assert torch.equal(found_keys[0], torch.tensor([2.0] * 9 + [0.0] * 7))
    assert torch.equal(found_values, values)
    # Bitmaps: of the keys nine channels of 16 tokens, of a token's values the first nine, the lowest bit first.
    assert encoded[:32].tolist() == [255] * 18 + [0] * 14
    assert encoded[32:34].tolist() == [255, 1]
    assert encoded[38:40].tolist() == [255, 128]


def test_bytes_of_a_token() -> None:
    """Of bfloat16's 256 for a head of 64."""
    assert codec_of().bytes_per_token == 148
    assert codec_of(sparsity=0.7).bytes_per_token == 100


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="a head size of 72 is not allowed"):
        codec_of(32, 72)
