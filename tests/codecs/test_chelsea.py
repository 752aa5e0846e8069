# SPDX-License-Identifier: Apache-2.0
"""Codec chelsea: what is merged, with what weight, and what attention over it makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from vllm_ext.codecs.chelsea import Chelsea, ChelseaOptions

BLOCK, HEAD = 16, 32


def codec(**options: Any) -> Chelsea:
    return Chelsea(ChelseaOptions(**options), BLOCK, HEAD)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """As float16 has them."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half().float()


def attended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return torch.softmax(query @ keys.mT + bias, -1) @ values


@pytest.mark.parametrize("ratio", [2, 3, 4, 8, 17])
@pytest.mark.parametrize("rounds", [1, 4, 16])
def test_every_token_counts_once(ratio: int, rounds: int) -> None:
    """Counts sum to the tokens of a span, and the weighted means to their sum."""
    which = codec(ratio=ratio, rounds=rounds, spread=0.0)
    keys, values = random(2, ratio, BLOCK, HEAD), random(2, ratio, BLOCK, HEAD, seed=1)
    merged = which.merge(which.encode(keys, values))
    assert merged.shape == (2, BLOCK * which.bytes_per_token)
    counts = which.log_counts(merged).exp()
    torch.testing.assert_close(counts.sum(-1), torch.full((2,), float(ratio * BLOCK)))
    assert bool((counts > 0.99).all())
    for means, given in zip(which.decode(merged), (keys, values), strict=True):
        torch.testing.assert_close((means * counts[..., None]).sum(-2), given.sum((-3, -2)), rtol=0, atol=0.1)


def test_copies_merge_without_loss() -> None:
    """Tokens that come ``ratio`` times: attention over their means is attention over them all, by the counts."""
    which = codec(ratio=2)
    keys, values = (random(BLOCK, HEAD, seed=i).repeat_interleave(2, 0) for i in range(2))
    spans = which.encode(keys.view(2, BLOCK, HEAD), values.view(2, BLOCK, HEAD))
    merged = which.merge(spans)
    found, query = which.decode(merged), random(5, HEAD, seed=2) / 4
    dense = attended(query, keys, values, torch.zeros(2 * BLOCK))
    torch.testing.assert_close(attended(query, *found, which.log_counts(merged)), dense, rtol=0, atol=2e-3)


def test_counts_matter() -> None:
    """One token among many copies of another: without the counts both would weigh the same."""
    which = codec(ratio=4, rounds=16)
    keys, values = (random(1, HEAD, seed=i).repeat(4 * BLOCK, 1) for i in range(2))
    keys[1::8], values[1::8] = random(1, HEAD, seed=3), random(1, HEAD, seed=4)
    merged = which.merge(which.encode(keys.view(4, BLOCK, HEAD), values.view(4, BLOCK, HEAD)))
    found, query = which.decode(merged), torch.zeros(1, HEAD)
    dense = attended(query, keys, values, torch.zeros(4 * BLOCK))
    counted = attended(query, *found, which.log_counts(merged))
    torch.testing.assert_close(counted, dense, rtol=0, atol=1e-2)
    assert float((attended(query, *found, torch.zeros(BLOCK)) - dense).abs().max()) > 0.1


def test_means_weigh_more_by_how_far_their_keys_are_apart() -> None:
    """In the mean over queries of the variance that is assumed, what tokens weigh together is nearer to what it was."""
    keys, values = random(4 * BLOCK, HEAD), random(4 * BLOCK, HEAD, seed=1)
    queries = random(4000, HEAD, seed=2) * 1.25**0.5

    def lost(spread: float) -> float:
        which = codec(ratio=4, spread=spread)
        merged = which.merge(which.encode(keys.view(4, BLOCK, HEAD), values.view(4, BLOCK, HEAD)))
        weigh = torch.logsumexp(
            queries @ which.decode(merged)[0].mT / HEAD**0.5 + which.log_counts(merged), -1
        )
        return float((torch.logsumexp(queries @ keys.mT / HEAD**0.5, -1) - weigh).mean())

    assert lost(0.0) > 0.3
    assert abs(lost(1.25)) < 0.3 * lost(0.0)


def test_what_is_like_nothing_else_remains() -> None:
    """An odd one among near copies stays as it is, in whichever place it stands."""
    which = codec(ratio=2, rounds=16)
    for place in (0, 7, 18, 31):
        keys = random(1, HEAD) + 0.01 * random(2 * BLOCK, HEAD, seed=1)
        keys[place] = -3 * keys[place]
        keys = keys.half().float()
        spans = which.encode(keys.view(2, BLOCK, HEAD), keys.view(2, BLOCK, HEAD))
        merged = which.merge(spans)
        found, counts = which.decode(merged)[0], which.log_counts(merged).exp()
        nearest = int((found - keys[place]).norm(dim=-1).argmin())
        torch.testing.assert_close(found[nearest], keys[place], rtol=0, atol=0)
        assert float(counts[nearest]) == 1


def test_which_blocks_are_read() -> None:
    which = codec(window=2 * BLOCK, ratio=4)
    assert which.format.blocks_read(6) == [0, 1, 2, 3, 4, 5]  # three before the window: not a span yet
    assert which.format.blocks_read(7) == [0, 1, 5, 6]
    assert which.format.blocks_read(8) == [0, 1, 5, 6, 7]
    assert which.format.blocks_read(11) == [0, 1, 5, 9, 10]
    assert [which.format.num_spans(block) for block in (0, 6, 7, 10, 11)] == [0, 0, 1, 1, 2]
    assert list(which.format.blocks_of(1)) == [5, 6, 7, 8]


@pytest.mark.parametrize(
    "options", [{"ratio": 1}, {"ratio": 33}, {"rounds": 0}, {"spread": -1.0}, {"window": 0}, {"bits": 4}]
)
def test_options_that_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ChelseaOptions.model_validate(options)
