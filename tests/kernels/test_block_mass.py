# SPDX-License-Identifier: Apache-2.0
"""What rows attend to, block by block: the readable form beside float64, and the others beside it.

Without a GPU the triton form runs through triton's interpreter: see `test_triton_forms`.
"""

from __future__ import annotations

import pytest
import torch
from interpreter import IN_INTERPRETER

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.block_mass import AskedRows, add_block_mass

FORMS: list[Backend] = ["triton"] if IN_INTERPRETER or torch.cuda.is_available() else ["torch"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KV_HEADS = 6, 2

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("block_size", "head_size"), [(16, 64), (48, 24)])
# Sums of a few hundred products: each dtype's keys are rounded before, the rest is float32.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_those_of_attention(
    form: Backend, block_size: int, head_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(block_size)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    # Tokens before heads in memory, as vLLM has them, and values beside keys.
    cache = draw(20, block_size, KV_HEADS, 2 * head_size).transpose(1, 2)
    keys, query = cache[..., :head_size], draw(9, HEADS, 2 * head_size)[..., :head_size]
    table = torch.randperm(20, generator=generator)[:15].to(torch.int32).view(3, 5).to(DEVICE)
    # A row of one token, those around a block's end, and a whole table.
    seen = [1, block_size, block_size + 1, 5 * block_size]
    rows, requests = [8, 0, 3, 5], [2, 0, 0, 1]
    mass = torch.full((4, 5), 0.25, device=DEVICE)
    whose, row, sees = (
        torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (requests, rows, seen)
    )
    asked = AskedRows(table, whose, row, sees, mass)
    add_block_mass(query, keys, asked, head_size**-0.5, form)
    for place, (at, request, number) in enumerate(zip(rows, requests, seen, strict=True)):
        expected = torch.zeros(5, dtype=torch.float64)
        for head in range(HEADS):
            own = [
                keys[table[request, token // block_size], head // (HEADS // KV_HEADS), token % block_size]
                for token in range(number)
            ]
            weights = (torch.stack(own).double() @ query[at, head].double() * head_size**-0.5).softmax(0)
            for token in range(number):
                expected[token // block_size] += weights[token].cpu()
        assert torch.allclose(mass[place].cpu().double() - 0.25, expected, atol=1e-5)
        assert torch.equal(
            mass[place, -(-number // block_size) :],
            torch.full_like(mass[place, -(-number // block_size) :], 0.25),
        )


@pytest.mark.parametrize("form", FORMS)
def test_nobody_is_asked(form: Backend) -> None:
    nothing = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    asked = AskedRows(nothing.view(0, 5), nothing, nothing, nothing, torch.zeros(0, 5, device=DEVICE))
    add_block_mass(torch.zeros(3, HEADS, 8, device=DEVICE), torch.zeros(2, KV_HEADS, 16, 8), asked, 1.0, form)
