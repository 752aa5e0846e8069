# SPDX-License-Identifier: Apache-2.0
"""Trees from the host as the device has them: what growing one there would have written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm_ext.engine.v2.speculators import tree_rows
from vllm_ext.kernels.device_trees import EMPTY, SlotTrees
from vllm_ext.kernels.recycling import RecyclingTables, grow
from vllm_ext.proposers.tree import DraftTree

VOCAB, WIDTH, NODES, SLOTS = 40, 3, 70, 5  # rows of more than two words of bits


def grown(slots: list[int], seed: int) -> tuple[SlotTrees, torch.Tensor]:
    """Trees, and their tokens, as the reference grows them from a table without order."""
    draw = torch.Generator().manual_seed(seed)
    table = RecyclingTables.empty(VOCAB, WIDTH, 0, 0, torch.device("cpu"))
    table.successors[:] = torch.stack([torch.randperm(VOCAB, generator=draw)[:WIDTH] for _ in range(VOCAB)])
    table.classes[:] = torch.randint(0, 3, (VOCAB, WIDTH), generator=draw, dtype=torch.int32)
    table.successors[7:11] = EMPTY  # so that trees end
    trees = SlotTrees.of_size(SLOTS, NODES, torch.device("cpu"))
    tokens = torch.zeros((len(slots), NODES), dtype=torch.int64)
    grow(
        table,
        torch.tensor([[[0.2, 0.1], [0.6, 0.5], [0.9, 0.3]]]),
        (torch.arange(SLOTS, dtype=torch.int32) * 3)[:, None],
        torch.ones(SLOTS, dtype=torch.int32),
        torch.tensor(slots),
        torch.tensor([0, 1, 0, 0, 1], dtype=torch.int32),
        torch.tensor([70, 70, 3, 0, 9], dtype=torch.int32),
        None,
        1,
        trees,
        tokens,
        "torch",
    )
    return trees, tokens


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_that_growing_writes(seed: int) -> None:
    """Found: a parent's row one too low, padding of depth 0, bits of words above the first lost."""
    slots = [4, 0, 2, 3]
    expected, tokens = grown(slots, seed)
    trees = []
    for place, slot in enumerate(slots):
        parents = expected.parents[slot, 1:].numpy()
        size = int((parents >= 0).sum())
        chances = np.linspace(0.9, 0.1, size, dtype=np.float32)
        trees.append(DraftTree(tokens[place, :size].int().numpy(), parents[:size] - 1, chances))
    assert max(map(len, trees)) > 64
    packed = tree_rows.pack(trees, np.array(slots, np.int32) * 3, NODES)
    # What a tree before has left is overwritten; other slots are not.
    actual = SlotTrees(*(part + 1 for part in SlotTrees.of_size(SLOTS, NODES, torch.device("cpu"))))
    untouched = [part[1].clone() for part in actual]
    got = tree_rows.put(torch.from_numpy(packed), torch.tensor(slots, dtype=torch.int32), actual)
    assert got.dtype == torch.int64
    assert torch.equal(got, tokens)
    for name in ("parents", "depths", "bits"):
        assert torch.equal(getattr(actual, name)[slots], getattr(expected, name)[slots]), name
    assert all(torch.equal(part[1], before) for part, before in zip(actual, untouched, strict=True))


def test_without_trees_there_is_padding_alone() -> None:
    packed = tree_rows.pack([DraftTree.empty()] * 2, np.array([5, 6], np.int32), 3)
    trees = SlotTrees.of_size(2, 3, torch.device("cpu"))
    tokens = tree_rows.put(torch.from_numpy(packed), torch.tensor([1, 0]), trees)
    assert tokens.tolist() == [[5, 5, 5], [6, 6, 6]]
    for part, empty in zip(trees, SlotTrees.of_size(2, 3, torch.device("cpu")), strict=True):
        assert torch.equal(part, empty)
