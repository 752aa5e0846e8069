# SPDX-License-Identifier: Apache-2.0
"""What rows attend to, block by block: the readable form beside float64, and the others beside it.

Without a GPU the triton form runs through triton's interpreter: see `test_triton_forms`.
"""

from __future__ import annotations

import pytest
import torch
from interpreter import IN_INTERPRETER

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.block_mass import AskedRows, AskedTrees, add_block_mass

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
@pytest.mark.parametrize("context", [0, 1, 15, 16, 40])
def test_a_node_sees_its_ancestors_and_what_its_root_sees(form: Backend, context: int) -> None:
    """Rows of a tree of forty nodes, over two blocks and more; a row without a tree is asked beside them."""
    generator = torch.Generator().manual_seed(context)
    rows, block_size, head_size, nodes = 41, 16, 16, (0, 1, 31, 32, 40)
    blocks, tokens = -(-(context + rows) // block_size), context + rows
    keys = torch.randn(20, KV_HEADS, block_size, head_size, generator=generator).to(DEVICE)
    query = torch.randn(rows + 3, HEADS, head_size, generator=generator).to(DEVICE)
    table = torch.randperm(20, generator=generator)[: 2 * blocks].to(torch.int32).view(2, blocks).to(DEVICE)
    seen_by = [{0}]
    for row in range(1, rows):
        seen_by.append({row} | seen_by[int(torch.randint(row, (1,), generator=generator))])
    words = [
        [sum(1 << (i % 32) for i in seen_by[row] if i // 32 == word) for word in (0, 1)] for row in nodes
    ]
    bits = torch.tensor([*words, [0, 0]]).to(torch.int32).to(DEVICE)  # nothing is asked of the last

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    asked = AskedRows(
        table,
        ints(*[1] * len(nodes), 0),
        ints(*(2 + row for row in nodes), 0),
        ints(*[tokens] * len(bits)),
        torch.zeros(len(bits), blocks, device=DEVICE),
        AskedTrees(ints(*[context] * len(nodes), tokens), bits),
    )
    add_block_mass(query, keys, asked, 0.3, form)
    for place, request in enumerate(asked.request.tolist()):
        flat = keys[table[request].long()].transpose(1, 2).flatten(0, 1)[:tokens].double()
        hidden = [context + i for i in range(rows) if place < len(nodes) and i not in seen_by[nodes[place]]]
        expected = torch.zeros(blocks, dtype=torch.float64)
        for head in range(HEADS):
            scores = flat[:, head // (HEADS // KV_HEADS)] @ query[asked.row[place], head].double() * 0.3
            scores[hidden] = -torch.inf
            weights = torch.nn.functional.pad(scores.softmax(0), (0, blocks * block_size - tokens))
            expected += weights.view(blocks, block_size).sum(1).cpu()
        assert torch.allclose(asked.mass[place].cpu().double(), expected, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_nobody_is_asked(form: Backend) -> None:
    nothing = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    asked = AskedRows(nothing.view(0, 5), nothing, nothing, nothing, torch.zeros(0, 5, device=DEVICE))
    add_block_mass(torch.zeros(3, HEADS, 8, device=DEVICE), torch.zeros(2, KV_HEADS, 16, 8), asked, 1.0, form)
