# SPDX-License-Identifier: Apache-2.0
"""Keys and values of accepted paths: every form equals the readable one, bit for bit. See `test_device_trees`."""

from __future__ import annotations

import pytest
import torch
from interpreter import IN_INTERPRETER

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.path_move import Caches, move_paths

FORMS: list[Backend] = ["triton"] if IN_INTERPRETER or torch.cuda.is_available() else ["torch", "numba"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2)], ids=str)
def test_tokens_move_as_the_contract_says(dtype: torch.dtype, order: tuple[int, ...], form: Backend) -> None:
    torch.manual_seed(0)
    shape, places = (6, 2, 4, 10), [order.index(dim) for dim in range(4)]  # in memory in that order
    stored = [shape[dim] for dim in order]
    caches = [(torch.randn(stored, device=DEVICE) * 50).to(dtype).permute(places) for _ in range(3)]
    before = [cache.clone() for cache in caches]
    # A path whose steps overlap, across a block's end; nothing; from block to block.
    path = torch.tensor([[0, 2, 3, 5], [0, 1, 2, 3], [0, 1, 4, 3]], dtype=torch.int32, device=DEVICE)
    first_row = torch.tensor([0, 6, 10, 99], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([1, 2, 3, 8, 9, 10, 0, 11, 4, 5, 13, 12, 15, 20, 21, 99], device=DEVICE)
    move_paths(Caches(caches), path, first_row, slots, form)
    for cache, old in zip(caches, before, strict=True):
        expected = old.clone()
        for new, was in ((2, 3), (3, 8), (8, 10), (15, 21)):
            expected[new // 4, :, new % 4] = old[was // 4, :, was % 4]
        assert torch.equal(cache, expected)


def test_caches_of_several_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"caches of 2 kinds .* one Caches for each kind"):
        Caches([torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5)])
