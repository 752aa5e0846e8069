# SPDX-License-Identifier: Apache-2.0
"""Trees on the device: every form equals the readable one, integer for integer.

Without a GPU the triton form runs through triton's interpreter: see `test_triton_forms`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import IN_INTERPRETER

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.device_trees import RowLayout, SlotTrees, Walked, keep_first, lay_out, walk
from vllm_ext.samplers.tree_walk import greedy_walk

FORMS: list[Backend] = ["triton"] if IN_INTERPRETER or torch.cuda.is_available() else ["torch", "numba"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = 7

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def random_trees(nodes: int) -> SlotTrees:
    """Of all slots; some nodes are padding."""
    trees = SlotTrees.of_size(SLOTS, nodes, DEVICE)
    for slot in range(SLOTS):
        for node in range(1, 1 + int(torch.randint(0, nodes + 1, (1,)))):
            parent = int(torch.randint(0, node, (1,)))
            trees.parents[slot, node] = parent
            trees.depths[slot, node] = trees.depths[slot, parent] + 1
            trees.bits[slot, node] |= trees.bits[slot, parent]
            trees.groups[slot, node] = int(torch.randint(0, 50, (1,)))
    return trees


def test_the_first_nodes_stay() -> None:
    torch.manual_seed(4)
    trees = random_trees(6)
    before = SlotTrees(*(values.clone() for values in trees))
    most = {5: 0, 1: 2, 3: 6}
    keep_first(trees, torch.tensor([*most], device=DEVICE), torch.tensor([*most.values()], device=DEVICE))
    padding = SlotTrees.of_size(1, 6, DEVICE)
    for values, was, empty in zip(trees, before, padding, strict=True):
        for slot in range(SLOTS):
            stays = 1 + most.get(slot, 6)
            assert torch.equal(values[slot, :stays], was[slot, :stays])
            assert torch.equal(values[slot, stays:], empty[0, stays:])


@pytest.mark.parametrize("form", FORMS)
def test_lay_out_equals_its_reference(form: Backend) -> None:
    torch.manual_seed(2)
    trees = random_trees(6)
    slots = torch.tensor([5, 3, 0, 5], device=DEVICE)
    # A whole tree; a tree that was cut; one whose rows stand behind a prompt's; none.
    query_start, row_start = ints(0, 7, 10, 19, 20), ints(0, 7, 10, 14, 15)
    seq_lens = ints(107, 13, 59, 31)
    results = []
    backends: list[Backend] = [form, "torch"]
    for backend in backends:
        layout = RowLayout.of_size(6, 6 * 7, DEVICE)
        for part in layout:
            part.fill_(9)
        positions = torch.full((25,), -3, dtype=torch.int64, device=DEVICE)
        lay_out(trees, slots, query_start, row_start, seq_lens, positions, layout, backend)
        results.append((positions, layout))
    (positions, layout), (expected_positions, expected) = results
    assert torch.equal(positions, expected_positions)
    for name, part, other in zip(RowLayout._fields, layout, expected, strict=True):
        assert torch.equal(part, other), name
    assert layout.num_rows.tolist() == [7, 3, 4, 1, 0, 0]
    assert layout.first_row.tolist()[:4] == [0, 7, 15, 19]
    assert positions[10:15].tolist() == [-3] * 5  # prompt rows stay


@st.composite
def forests(draw: Any) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Parents, tokens and what is sampled at each row; few tokens, so that much matches. Siblings are distinct."""
    parents, tokens, sampled = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(1, 9))
        of, ids, taken = [-1], [0], set()
        for row in range(1, rows):
            parent, token = draw(st.integers(-1, row - 1)), draw(st.integers(0, 3))
            if (parent, token) in taken:
                parent = -1
            taken.add((parent, token))
            of.append(parent)
            ids.append(token)
        parents.append(of)
        tokens.append(ids)
        sampled.append([draw(st.integers(0, 3)) for _ in range(rows)])
    return parents, tokens, sampled


@pytest.mark.parametrize("form", FORMS)
@given(forest=forests())
@settings(max_examples=40, deadline=None)
def test_walk_is_the_hosts(
    form: Backend, forest: tuple[list[list[int]], list[list[int]], list[list[int]]]
) -> None:
    parents, tokens, sampled = (np.concatenate([np.array(part) for part in parts]) for parts in forest)
    row_start = np.cumsum([0, *map(len, forest[0])]).astype(np.int32)
    paths, emitted = greedy_walk(
        row_start, tokens.astype(np.int32), parents.astype(np.int32), sampled.astype(np.int32)
    )
    requests, most = len(paths), 9
    walked = Walked.of_size(requests, len(tokens), most, DEVICE)
    totals = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    walk(
        torch.from_numpy(row_start).to(DEVICE),
        torch.arange(requests, device=DEVICE),
        torch.from_numpy(tokens.astype(np.int32)).to(DEVICE),
        torch.full((len(tokens),), 5, device=DEVICE),
        torch.from_numpy(parents.astype(np.int32)).to(DEVICE),
        torch.from_numpy(sampled).to(DEVICE),
        None,
        ints(*[5] * requests),
        ints(*[6] * requests),
        walked,
        totals,
        form,
    )
    for request, (rows, expected) in enumerate(zip(paths, emitted, strict=True)):
        assert walked.num_emitted[request] == len(expected)
        assert walked.emitted[request].tolist() == expected + [0] * (most - len(expected))
        assert walked.path[request].tolist() == [0, *rows, *range(len(expected), most)]
        start, end = row_start[request : request + 2]
        assert walked.num_rejected[request] == end - start - len(expected)
        assert walked.accepted[start:end].nonzero()[:, 0].tolist() == [0, *rows]
    accepted = sum(map(len, paths))
    assert totals.tolist() == [int((parents >= 0).sum()), accepted, accepted + requests, requests]


@pytest.mark.parametrize("form", FORMS)
def test_walk_stays_where_it_may_not_go(form: Backend) -> None:
    """A chain of three in each request: its second node is invalid; its rows are padding; its prompt is incomplete."""
    tokens, parents = ints(*[1, 2, 3, 4] * 4), ints(*[-1, 0, 1, 2] * 4)
    sampled = torch.tensor([2, 3, 4, 5] * 4, device=DEVICE)
    invalid = torch.zeros(16, dtype=torch.bool, device=DEVICE)
    invalid[2] = True
    results = []
    backends: list[Backend] = [form, "torch"]
    for backend in backends:
        walked = Walked.of_size(4, 16, 5, DEVICE)
        totals = torch.ones(4, dtype=torch.int64, device=DEVICE)
        walk(
            ints(0, 4, 8, 12, 16),
            torch.tensor([3, 1, 0, 2], device=DEVICE),
            tokens,
            torch.tensor([7, 7, 7, 7] * 4, device=DEVICE),
            parents,
            sampled,
            invalid,
            ints(13, 8, 7, 2),
            ints(11, 11, 11, 11),
            walked,
            totals,
            backend,
        )
        results.append([*walked, totals])
    for part, other in zip(*results, strict=True):
        assert torch.equal(part, other)
    _, num_emitted, num_rejected, path, accepted, totals = results[0]
    # By slot: its third row is invalid; its root is prompt, the rest padding; its prompt goes on; a whole chain.
    assert num_emitted.tolist() == [2, 1, 0, 4]
    assert num_rejected.tolist() == [2, 3, 0, 0]
    assert path.tolist()[0] == [0, 1, 2, 3, 4]
    assert accepted.tolist() == [1, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1]
    assert totals.tolist() == [1 + 6, 1 + 4, 1 + 7, 1 + 3]
