# SPDX-License-Identifier: Apache-2.0
"""Penalties and bad words along the paths of trees: every form equals the readable one; a chain has vLLM's.

Without a GPU the triton form runs through triton's interpreter: see `test_triton_forms`.
"""

from __future__ import annotations

import pytest
import torch
from interpreter import IN_INTERPRETER

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.path_penalties import forbid, penalise

FORMS: list[Backend] = ["triton"] if IN_INTERPRETER or torch.cuda.is_available() else ["torch", "numba"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, SLOTS = 50, 4

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

# Two requests: a tree of 5 nodes whose last is padding, and a chain of 40, in slots 2 and 0.
PARENTS = [-1, 0, 0, 1, 3, -1, *range(-1, 40)]
OFFSETS = [*range(6), *range(41)]
ROWS_OF = [2] * 6 + [0] * 41


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def bits() -> torch.Tensor:
    found = torch.zeros(len(PARENTS), 2, dtype=torch.int64)
    for row, (parent, offset) in enumerate(zip(PARENTS, OFFSETS, strict=True)):
        if parent >= 0:
            found[row] = found[row - offset + parent]
        found[row, offset // 32] |= 1 << offset % 32
    return found.to(torch.int32).to(DEVICE)


@pytest.mark.parametrize("form", FORMS)
def test_penalties_are_those_of_the_path(form: Backend) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (len(PARENTS),), generator=generator, dtype=torch.int32).to(DEVICE)
    logits = torch.randn(len(PARENTS), VOCAB, generator=generator).to(DEVICE)
    in_prompt = torch.randint(-(2**31), 2**31, (SLOTS, 2), generator=generator).to(torch.int32).to(DEVICE)
    counts = torch.randint(0, 3, (SLOTS, VOCAB), generator=generator, dtype=torch.int32).to(DEVICE)

    def values(*of_slots: float) -> torch.Tensor:
        return torch.tensor(of_slots, dtype=torch.float32, device=DEVICE)

    results = []
    backends: list[Backend] = [form, "torch"]
    for backend in backends:
        own = logits.clone()
        penalise(
            own,
            torch.tensor(ROWS_OF, device=DEVICE),
            tokens,
            ints(OFFSETS),
            bits(),
            values(1.3, 1.0, 1.0, 1.0),
            values(0.0, 0.0, 0.3, 0.0),
            values(0.0, 0.0, 0.2, 0.0),
            in_prompt,
            counts,
            backend,
        )
        results.append(own)
    assert torch.equal(*results)
    # Of the tree's fourth node, whose path is its parents' and its own: three tokens behind the root.
    row = 4
    count = counts[2].float()
    for node in (1, 3, 4):
        count[tokens[node]] += 1
    expected = logits[row] - 0.3 * count - 0.2 * (count > 0)
    assert torch.allclose(results[0][row], expected)


@pytest.mark.parametrize("form", FORMS)
def test_words_are_those_of_the_path(form: Backend) -> None:
    tokens = ints([7, 8, 9, 10, 11, 12, 5, *[3, 4] * 20])
    text = torch.full((SLOTS, 12), 1, dtype=torch.int32, device=DEVICE)
    text[2, :6] = ints([8, 10, 30, 31, 6, 7])
    text[0, :3] = ints([3, 4, 5])
    # Of the tree's request: a token; behind the path 1, 3; behind the root and its second child; behind text and the
    # root; one that only the prompt would complete.
    words = [[20], [8, 10, 21], [7, 9, 22], [31, 6, 7, 23], [10, 30, 31, 6, 7, 24]]
    flat = [token for word in words for token in word]
    starts = [0, *torch.tensor([len(word) for word in words]).cumsum(0).tolist()]
    table = torch.zeros((SLOTS, 40), dtype=torch.int32, device=DEVICE)
    table[2, : len(flat)] = ints(flat)
    table[0, :3] = ints([3, 4, 25])
    word_starts = torch.zeros((SLOTS, 8), dtype=torch.int32, device=DEVICE)
    word_starts[2, : len(starts)] = ints(starts)
    word_starts[0, :2] = ints([0, 3])
    results = []
    backends: list[Backend] = [form, "torch"]
    for backend in backends:
        logits = torch.zeros(len(PARENTS), VOCAB, device=DEVICE)
        forbid(
            logits,
            torch.tensor(ROWS_OF, device=DEVICE),
            tokens,
            ints(OFFSETS),
            ints(PARENTS),
            table,
            word_starts,
            ints([1, 0, len(words), 0]),
            text,
            ints([2, 0, 3, 0]),
            ints([3, 0, 6, 0]),
            len(words),
            backend,
        )
        results.append(logits)
    assert torch.equal(*results)
    forbidden = [sorted((row == float("-inf")).nonzero()[:, 0].tolist()) for row in results[0]]
    # Row 3 (tokens 8, 10) is behind rows 1 and the root; row 2 (token 9) is the root's.
    assert forbidden[:6] == [[20, 23], [20], [20, 22], [20, 21], [20], [20]]
    assert forbidden[6:9] == [[], [], [25]]
