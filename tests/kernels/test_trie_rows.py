# SPDX-License-Identifier: Apache-2.0
"""Tries behind rows of trees: every form equals the readable one, which equals a dictionary of prefixes.

Without a GPU the triton form runs through triton's interpreter: see `test_triton_forms`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from interpreter import IN_INTERPRETER

from vllm_ext.kernels import trie, trie_ref
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.trie_rows import NO_TRIE, SlotTries, catch_up, join, mask_trie_rows

FORMS: list[Backend] = ["triton"] if IN_INTERPRETER or torch.cuda.is_available() else ["torch", "numba"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, SLOTS, END, PROMPT = 90, 5, 3, 2

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

# By slot: which set, the output, and the tree below its last token, as parents and what tokens follow.
PARENTS = [-1, 0, 0, 1, 3, -1]  # the last is padding


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def sets() -> list[list[list[int]]]:
    draw = np.random.default_rng(0)
    few = [draw.integers(5, 9, size=draw.integers(1, 6)).tolist() for _ in range(60)]
    wide = [[token, *draw.integers(5, 9, size=2).tolist()] for token in range(5, VOCAB)]
    return [few, [[7]], wide]


def padded(sequences: list[list[int]]) -> trie.Int32:
    longest = max(map(len, sequences))
    return np.array([each + [trie.NO_TOKEN] * (longest - len(each)) for each in sequences], np.int32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("as_tree", [True, False])
def test_rows_have_what_their_paths_allow(form: Backend, as_tree: bool) -> None:
    given = sets()
    tries = join([trie.build(padded(each)) for each in given], DEVICE)
    readable = [trie_ref.build(each) for each in given]
    # Slot 3 is under none; slot 4 has ended; slot 0 goes beside its set in one of its branches.
    outputs = [given[0][4][:1], given[2][30][:2], [], [5, 5], [7, END]]
    which = [0, 2, 2, NO_TRIE, 1]
    paths = [[0, *given[0][4][1:2], 4, 5, 6, 8], [0, *range(5, 10)], [0, 20, 21, 6, 7, 5]]
    draw = torch.Generator().manual_seed(1)
    text = torch.full((SLOTS, 20), -9, dtype=torch.int32)
    for slot, output in enumerate(outputs):
        text[slot, PROMPT : PROMPT + len(output)] = torch.tensor(output, dtype=torch.int32)
    of_slots = SlotTries.of_size(SLOTS, DEVICE)
    of_slots.which.copy_(ints(which))
    of_slots.end.fill_(END)
    prompt_len = ints([PROMPT] * SLOTS)
    batch = torch.tensor([1, 0, 4, 3, 2], device=DEVICE)
    # In two goes: the state that is kept is taken up again.
    for length in (1, 20):
        total = ints([PROMPT + min(length, len(output)) for output in outputs])
        catch_up(tries, of_slots, batch, text.to(DEVICE), prompt_len, total, form)
    rows = [(slot, offset) for slot in (2, 0, 1) for offset in range(6)] + [(3, 0), (4, 0)]
    tokens = [([0, *paths[slot][1:]] if slot < 3 else [0])[offset] for slot, offset in rows]
    bits = torch.zeros(len(rows), 2, dtype=torch.int64)
    expected = torch.randn(len(rows), VOCAB, generator=draw)
    actual = expected.clone().to(DEVICE)
    for row, (slot, offset) in enumerate(rows):
        path = list(range(1, offset + 1))
        if as_tree:
            path, at = [], offset
            while at > 0:
                path.insert(0, at)
                at = PARENTS[at]
        for other in path:
            bits[row, other // 32] |= 1 << other % 32
        if which[slot] == NO_TRIE:
            continue
        output = outputs[slot] + [paths[slot][other] for other in path]
        allowed = trie_ref.allowed(readable[which[slot]], output, END) or {END}
        expected[row, [token for token in range(VOCAB) if token not in allowed]] = -torch.inf
    mask_trie_rows(
        actual,
        tries,
        of_slots,
        torch.tensor([slot for slot, _ in rows], device=DEVICE),
        ints(tokens),
        ints([offset for _, offset in rows]),
        bits.to(torch.int32).to(DEVICE) if as_tree else None,
        form,
    )
    assert torch.equal(actual.cpu(), expected)
    assert int((expected > -torch.inf).sum(1).min()) == 1
    assert int((expected[:-2] > -torch.inf).sum(1).max()) > 60  # the root of the wide one


def test_what_does_not_fit_into_its_numbers_is_refused() -> None:
    class Huge(trie.Trie):
        num_states = 2**31

    with pytest.raises(ValueError, match="2147483648 states together"):
        join([Huge(*trie.build(np.array([[1]], np.int32)))], DEVICE)
