# SPDX-License-Identifier: Apache-2.0
"""`move_tokens` against its reference, in both layouts and dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm_ext.kernels.kv_layouts import amx_layout, in_order, vec_layout
from vllm_ext.kernels.kv_move import Places, move_tokens
from vllm_ext.kernels.kv_move_ref import move_tokens_ref

BLOCKS, HEADS, BLOCK_SIZE, HEAD_SIZE = 5, 3, 32, 64


def slots(*values: int) -> Any:
    return np.array(values, np.int64)


@pytest.mark.parametrize("layout", [vec_layout, amx_layout])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (slots(70), slots(3)),
        (slots(5, 6, 9), slots(4, 5, 6)),  # 5 and 6 are both
        (slots(33, 2), slots(2, 33)),
        (slots(159, 31, 32), slots(32, 64, 127)),  # ends of blocks
        (slots(), slots()),
    ],
    ids=str,
)
def test_tokens_move_in_all_caches(layout: Any, dtype: torch.dtype, source: Any, target: Any) -> None:
    # Of different strides: a cache of its own, and a slice of a larger one.
    wide = torch.randn(2, BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE).to(dtype)
    caches = [torch.randn(BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE).to(dtype), wide.transpose(0, 1)[:, 1]]
    copies = [cache.clone() for cache in caches]
    views, expected = ([view for cache in some for view in layout(cache)] for some in (caches, copies))
    before = [in_order(view).clone() for view in expected]
    move_tokens_ref(expected, source, target)
    for old, new in zip(before, expected, strict=True):
        moved = old[source // BLOCK_SIZE, :, source % BLOCK_SIZE].clone()
        old[target // BLOCK_SIZE, :, target % BLOCK_SIZE] = moved
        assert torch.equal(old, in_order(new))
    if len(source):
        assert not torch.equal(in_order(views[0]), in_order(expected[0]))
    move_tokens(Places(views), source, target)
    for got, want in zip(views, expected, strict=True):
        assert torch.equal(in_order(got), in_order(want))


def test_it_refuses_views_of_different_kinds() -> None:
    cache = torch.zeros(2, 1, 16, 32)
    with pytest.raises(ValueError, match=r"views: .*must be the same for all"):
        Places([*vec_layout(cache), *vec_layout(cache.half())])
    with pytest.raises(ValueError, match="2 or 4 bytes"):
        Places(vec_layout(cache.double()))
