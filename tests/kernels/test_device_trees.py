# SPDX-License-Identifier: Apache-2.0
"""Trees on the device: the triton form equals the readable one, integer for integer; the table is as its contract.

Without a GPU the triton form runs through triton's interpreter, in a process of its own: see `test_top_k`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.kernels import best_first_tree
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.device_trees import (
    EMPTY,
    RecycledTable,
    RowLayout,
    SlotTrees,
    grow,
    lay_out,
    record,
    seed,
    walk,
)
from vllm_ext.proposers import token_recycling_template
from vllm_ext.samplers.tree_walk import greedy_walk

IN_INTERPRETER = os.environ.get("DEVICE_TREES_TEST_BACKEND") == "triton"
BACKEND: Backend = "triton" if IN_INTERPRETER or torch.cuda.is_available() else "torch"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, DEPTHS, CLASSES = 7, 3, 5

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def random_table(vocab: int, width: int, sparse: float) -> RecycledTable:
    table = RecycledTable.empty(vocab, width, DEVICE)
    for token in range(vocab):
        known = int((torch.rand(width) > sparse).sum())
        table.successors[token, :known] = torch.randperm(vocab)[:known].to(torch.int32)
    table.classes[:] = torch.randint(0, CLASSES, table.classes.shape)
    return table


def grown(
    table: RecycledTable, nodes: int, backend: Backend, template: torch.Tensor | None = None
) -> tuple[SlotTrees, torch.Tensor]:
    """Trees of three slots of seven: any, a chain, and one of depth 2."""
    torch.manual_seed(1)
    trees = SlotTrees.of_size(SLOTS, nodes, DEVICE)
    for part in trees:
        part.fill_(77)  # what was there before
    tokens = torch.full((3, nodes), -5, dtype=torch.int64, device=DEVICE)
    vocab = len(table.newest) - 1
    grow(
        table,
        torch.rand(CLASSES, DEPTHS, device=DEVICE),
        torch.randint(0, vocab, (SLOTS,), device=DEVICE),
        torch.tensor([5, 0, 3], device=DEVICE),
        ints(1, 0, 0, 0, 0, 0, 0),
        ints(9, 9, 9, 2, 9, 99, 9),
        template,
        trees,
        tokens,
        backend,
    )
    return trees, tokens


@pytest.mark.parametrize(("nodes", "width"), [(1, 1), (6, 8), (16, 3), (40, 8)])
@pytest.mark.parametrize("sparse", [0.0, 0.6])
@pytest.mark.parametrize("static", [False, True])
def test_grow_equals_its_reference(nodes: int, width: int, sparse: float, static: bool) -> None:
    torch.manual_seed(nodes)
    table = random_table(50, width, sparse)
    template = torch.from_numpy(token_recycling_template.positions(width)).to(DEVICE) if static else None
    trees, tokens = grown(table, nodes, BACKEND, template)
    expected_trees, expected_tokens = grown(table, nodes, "torch", template)
    assert torch.equal(tokens, expected_tokens)
    for name, part, expected in zip(SlotTrees._fields, trees, expected_trees, strict=True):
        assert torch.equal(part, expected), name
    assert (trees.parents[1] == 77).all()  # of another slot
    assert trees.depths[3].max() <= 2
    rows = torch.arange(1 + nodes, device=DEVICE)
    chain = trees.parents[0] >= 0
    assert torch.equal(trees.parents[0][chain], (rows - 1)[chain].to(torch.int32))


def test_trees_are_those_of_the_host() -> None:
    """The same table and estimates, grown by the kernel that V1's drafter has."""
    nodes, width = 12, 4
    torch.manual_seed(5)
    table = random_table(40, width, 0.3)
    estimates = torch.rand(CLASSES, DEPTHS)
    roots = torch.randint(0, 40, (SLOTS,), device=DEVICE)
    trees, tokens = (
        SlotTrees.of_size(SLOTS, nodes, DEVICE),
        torch.zeros(SLOTS, nodes, dtype=torch.int64, device=DEVICE),
    )
    everything = torch.arange(SLOTS, device=DEVICE)
    no, deep = (
        torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE),
        torch.full((SLOTS,), 5, dtype=torch.int32, device=DEVICE),
    )
    grow(table, estimates.to(DEVICE), roots, everything, no, deep, None, trees, tokens, BACKEND)
    host = best_first_tree.SuccessorTables.empty(40, width, 0, 0)
    host.successors[:] = table.successors[:-1].cpu()
    host.bases[:] = table.classes[:-1].cpu()
    made = best_first_tree.grow_trees(
        host,
        estimates[None].numpy(),
        roots[:, None].cpu().numpy().astype(np.int32),
        np.full(SLOTS, nodes),
        np.full(SLOTS, 5),
        np.zeros(SLOTS, np.bool_),
        np.empty((0, width), np.int32),
    )
    for slot in range(SLOTS):
        count = int(made.counts[slot])
        assert count == int((trees.parents[slot] >= 0).sum()) > 0
        assert tokens[slot, :count].tolist() == made.tokens[slot, :count].tolist()
        assert (trees.parents[slot, 1 : 1 + count] - 1).tolist() == made.parents[slot, :count].tolist()


def test_lay_out_equals_its_reference() -> None:
    torch.manual_seed(2)
    table = random_table(50, 4, 0.4)
    trees, _ = grown(table, 6, "torch")
    slots = torch.tensor([5, 3, 0, 5], device=DEVICE)
    # A whole tree; a tree that was cut; one whose rows stand behind a prompt's; none.
    query_start, row_start = ints(0, 7, 10, 19, 20), ints(0, 7, 10, 14, 15)
    seq_lens = ints(107, 13, 59, 31)
    results = []
    backends: list[Backend] = [BACKEND, "torch"]
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


@given(forests())
@settings(max_examples=40, deadline=None)
def test_walk_is_the_hosts(forest: tuple[list[list[int]], list[list[int]], list[list[int]]]) -> None:
    parents, tokens, sampled = (np.concatenate([np.array(part) for part in parts]) for parts in forest)
    row_start = np.cumsum([0, *map(len, forest[0])]).astype(np.int32)
    paths, emitted = greedy_walk(
        row_start, tokens.astype(np.int32), parents.astype(np.int32), sampled.astype(np.int32)
    )
    requests, most = len(paths), 9
    out = torch.full((requests, most), 7, dtype=torch.int64, device=DEVICE)
    count = torch.full((requests,), 7, dtype=torch.int32, device=DEVICE)
    path = torch.full((requests, most), 7, dtype=torch.int32, device=DEVICE)
    accepted = torch.full((len(tokens),), 7, dtype=torch.int32, device=DEVICE)
    walk(
        torch.from_numpy(row_start).to(DEVICE),
        torch.from_numpy(tokens).to(DEVICE),
        torch.from_numpy(parents.astype(np.int32)).to(DEVICE),
        torch.from_numpy(sampled).to(DEVICE),
        out,
        count,
        path,
        accepted,
        BACKEND,
    )
    for request, (rows, expected) in enumerate(zip(paths, emitted, strict=True)):
        assert count[request] == len(expected)
        assert out[request].tolist() == expected + [0] * (most - len(expected))
        assert path[request].tolist() == [0, *rows, *range(len(expected), most)]
        start, end = row_start[request : request + 2]
        assert accepted[start:end].nonzero()[:, 0].tolist() == [0, *rows]


@pytest.mark.skipif(IN_INTERPRETER, reason="torch alone: it has no triton form")
class TestTable:
    def test_record_keeps_the_row_of_the_largest_priority(self) -> None:
        torch.manual_seed(3)
        vocab, width, rows = 20, 4, 60
        shares = torch.tensor([0.1, 0.3, 0.6])
        table = RecycledTable.empty(vocab, width, DEVICE)
        for _ in range(3):
            tokens = torch.randint(-1, vocab + 2, (rows,))
            priority = torch.randperm(rows)
            priority[::7] = EMPTY
            ids = torch.stack([torch.randperm(vocab)[:width] for _ in range(rows)]).to(torch.int32)
            logits = torch.randn(rows, width).sort(descending=True).values * 3
            before = table.successors.clone()
            record(table, shares, tokens, priority, ids, logits)
            for token in range(vocab):
                rows_of = [row for row in range(rows) if tokens[row] == token and priority[row] >= 0]
                if not rows_of:
                    assert torch.equal(table.successors[token], before[token])
                    continue
                best = max(rows_of, key=lambda row: int(priority[row]))
                assert torch.equal(table.successors[token], ids[best])
                share = (logits[best] / 1.0).softmax(0)
                assert table.classes[token].tolist() == [1 + int((shares < s).sum()) for s in share]
            assert (table.newest == EMPTY).all()

    def test_seed_fills_what_is_empty_with_the_last_successor(self) -> None:
        table = RecycledTable.empty(10, 2, DEVICE)
        table.successors[4] = ints(9, 8)
        seed(table, ints(1, 2, 1, 3, 4, 5, 12, 6, -1, 7))
        assert table.successors[:8, 0].tolist() == [-1, 3, 1, 4, 9, -1, -1, -1]
        assert table.successors[4].tolist() == [9, 8]
        assert (table.newest == EMPTY).all()


@pytest.mark.skipif(IN_INTERPRETER, reason="the parent process starts the other")
def test_the_triton_form_passes_this_file_through_the_interpreter() -> None:
    env = os.environ | {"DEVICE_TREES_TEST_BACKEND": "triton", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(
        command, env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
