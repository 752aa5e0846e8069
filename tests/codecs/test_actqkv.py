# SPDX-License-Identifier: Apache-2.0
"""Codec actqkv: the probe, what is retrieved by it, and where that is cut off."""

from __future__ import annotations

import pytest
import torch

from vllm_ext.codecs.actqkv import ActQKV, ActQKVOptions
from vllm_ext.codecs.selection import ALL, RETRIEVED

BLOCK, HEAD = 16, 32


def codec(**options: float) -> ActQKV:
    given = {"budget": 8 * BLOCK, "window": BLOCK, "sinks": 4, **options}
    return ActQKV(ActQKVOptions.model_validate(given), BLOCK, HEAD)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def blocks_of(which: ActQKV, topics: torch.Tensor) -> torch.Tensor:
    """Encoded blocks whose keys are all their topic."""
    keys = topics[:, None].expand(-1, BLOCK, -1)
    return which.encode(keys.contiguous(), keys.contiguous())


def test_mean_keys_lie_in_the_block() -> None:
    which = codec()
    keys, values = draw(3, 2, BLOCK, HEAD), draw(3, 2, BLOCK, HEAD, seed=1)
    encoded = which.encode(keys, values)
    assert encoded.shape == (3, 2, BLOCK * which.bytes_per_token)
    torch.testing.assert_close(which.mean_keys(encoded), keys.mean(-2), rtol=0, atol=1e-3)
    for found, given in zip(which.decode(encoded), (keys, values), strict=True):
        assert torch.equal(found, given.half().float())


def test_the_probe_is_what_stands_out() -> None:
    """One query alone is itself; of many alike and another one, it is mostly the other; equal ones are themselves."""
    which, query = codec(), draw(HEAD)
    torch.testing.assert_close(which.probe(query[None]), query)
    torch.testing.assert_close(which.probe(query.expand(5, -1)), query)
    many = query + 0.01 * draw(7, HEAD, seed=1)
    other = draw(1, HEAD, seed=2)
    probe = which.probe(torch.cat([many, other]))
    mean = torch.cat([many, other]).mean(0)
    assert float((probe - other[0]).norm()) < 0.7 * float((mean - other[0]).norm())
    assert bool(probe.isfinite().all())


def test_what_is_looked_for_is_read() -> None:
    """One block of those in the middle fits: it is read, with the first and the last, and no other."""
    which, topics = codec(coverage=0.9), torch.nn.functional.normalize(draw(20, HEAD), dim=1)
    for block in (3, 11, 17):
        read = which.retrieve(40 * topics[block][None], blocks_of(which, topics), 1.0)
        assert read == sorted({0, block, 19})


def test_the_cut_off_follows_the_scores() -> None:
    """Scores that are concentrated need few blocks, those alike need many: the budget is their end."""
    which, topics = codec(), torch.nn.functional.normalize(draw(40, HEAD), dim=1)
    blocks, query = blocks_of(which, topics), topics[7][None]
    sizes = [len(which.retrieve(factor * query, blocks, 1.0)) for factor in (60.0, 4.0, 0.0)]
    assert sizes[0] < sizes[1] <= sizes[2] == 8
    many = codec(budget=4000)
    assert len(many.retrieve(0 * query, blocks, 1.0)) == pytest.approx(2 + 0.95 * 38, abs=1)
    assert codec(budget=4000, coverage=1.0).retrieve(0 * query, blocks, 1.0) == list(range(40))


@pytest.mark.parametrize("sinks", [0, 4, 20])
@pytest.mark.parametrize("window", [1, 40])
def test_the_ends_are_always_read(sinks: int, window: int) -> None:
    which = codec(sinks=sinks, window=window)
    for block in range(30):
        topics = draw(block, HEAD, seed=block)
        read = which.retrieve(draw(3, HEAD), blocks_of(which, topics), 1.0) if block else []
        first, last = -(-sinks // BLOCK), -(-window // BLOCK)
        assert {*range(min(first, block)), *range(max(block - last, 0), block)} <= set(read)
        assert read == sorted(set(read))
        assert len(read) <= 8


def test_only_the_last_queries_ask() -> None:
    which = codec(probe=3)
    blocks, queries = blocks_of(which, draw(30, HEAD)), draw(9, HEAD, seed=1)
    expected = which.retrieve(queries[-3:], blocks, 1.0)
    assert which.retrieve(queries, blocks, 1.0) == expected
    assert which.retrieve(queries[:-1], blocks, 1.0) != expected


def test_a_prompt_reads_all_of_itself() -> None:
    choice = codec().choice(50)
    assert [choice.read_at(position) for position in (0, 49, 50, 1000)] == [ALL, ALL, RETRIEVED, RETRIEVED]
    assert not choice.watched(0, 100)
    assert choice.settle(100) == []


def test_a_budget_that_its_ends_use_up_is_refused() -> None:
    with pytest.raises(ValueError, match=r"budget=16 is not allowed.*allowed: 32 or more"):
        codec(budget=16)
