# SPDX-License-Identifier: Apache-2.0
"""The Triton form of attention over encoded blocks beside the readable one: see `test_triton_forms`."""

from __future__ import annotations

import pytest
import torch
from encoded_caches import CODECS, Cache, draw, part
from interpreter import IN_INTERPRETER

pytest.importorskip("triton")


def filled(name: str, dtype: torch.dtype, lengths: list[int]) -> tuple[Cache, Cache]:
    """Two caches with the same prompts; the second one decodes by Triton."""
    caches = Cache(CODECS[name], dtype, lengths, "torch"), Cache(CODECS[name], dtype, lengths, "torch")
    for cache in caches:
        cache.step([0] * len(lengths), [draw(length, seed) for seed, length in enumerate(lengths)])
    caches[1].backend = "triton"
    return caches


@pytest.mark.skipif(not IN_INTERPRETER, reason="runs in a process of its own")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("kivi", torch.bfloat16),
        ("kivi 2", torch.float16),
        ("a window of kivi", torch.float32),
    ],
)
def test_rows_that_decode(name: str, dtype: torch.dtype) -> None:
    """In the first block and far behind it, over a block's end, and trees, requests of all kinds at once."""
    lengths = [3, 190, 127]
    caches = filled(name, dtype, lengths)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for step in range(2):
        batch = [draw(1, 100 + 10 * step + i) for i in range(3)]
        contexts = [length + step for length in lengths]
        for expected, found in zip(*(cache.step(contexts, batch) for cache in caches), strict=True):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(caches[0].pages, caches[1].pages)
    tree = [-1, 0, 0, 2]
    batch = [draw(4, 50 + i) for i in range(3)]
    contexts = [length + 2 for length in lengths]
    outputs = [cache.step(contexts, batch, [1] * 3, [tree] * 3) for cache in caches]
    for expected, found in zip(*outputs, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not IN_INTERPRETER, reason="runs in a process of its own")
def test_blocks_are_what_is_read() -> None:
    """Other bytes in an encoded block are other outputs."""
    _, cache = filled("kivi", torch.float32, [190])
    (before,) = cache.step([190], [draw(1, 5)])
    cache.pages[cache.table[0, 1]] = 0
    (after,) = cache.step([190], [draw(1, 5)])
    assert not torch.allclose(before, after, atol=1e-3)


def test_what_it_has_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name, says in (
        ("gear", "codec 'gear'"),
        ("kivi", "100 rows behind 0 tokens go over a block's end"),
    ):
        cache = Cache(CODECS[name], torch.float32, [100], "triton")
        with pytest.raises(ValueError, match=says):
            cache.step([0], [part(draw(100, 0), 0, 100)])
