# SPDX-License-Identifier: Apache-2.0
"""What tree attention does on a device alone: shares of keys, buffers for captured graphs, FlashAttention before it.

`test_tree_attention` has what holds for all forms. Without a GPU this file runs through Triton's interpreter: see
`test_triton_forms`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attention import flash_attn_varlen_func
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import IN_INTERPRETER
from tree_cases import (
    DTYPES,
    MIXED,
    SENTINEL,
    TENSORS,
    TOLERANCE,
    Case,
    binary,
    chain,
    dense,
    each,
    ints,
    make,
    move,
    random_tree,
    star,
)

from vllm_ext.kernels import backends
from vllm_ext.kernels.ancestor_bits import MAX_ROWS, WORDS, ancestor_bits
from vllm_ext.kernels.attend_nodes import attend_nodes
from vllm_ext.kernels.attend_nodes_ref import attend_context_ref
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.tree_attention import Scoring, TreeRows, tree_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
device_only = pytest.mark.skipif(not IN_INTERPRETER and DEVICE == "cpu", reason="run in the interpreter")
FORMS: list[Backend] = ["torch", "triton"] if IN_INTERPRETER or DEVICE == "cuda" else ["torch"]
BITS_FORMS: list[Backend] = [*FORMS, "numba"] if DEVICE == "cpu" else FORMS

pytestmark = [
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning:triton"),
]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty comes filled with NaN: what is read before it is written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def on_device(case: Case) -> Case:
    return Case(
        move(case.query, DEVICE),
        move(case.keys, DEVICE),
        move(case.values, DEVICE),
        each(case.trees, lambda tensor: tensor.to(DEVICE)),
        case.scale,
        case.scoring._replace(sinks=None if case.scoring.sinks is None else case.scoring.sinks.to(DEVICE)),
    )


def shared_out(case: Case, splits: int) -> torch.Tensor:
    """`Case.run`, each request's keys in so many shares."""
    from vllm_ext.kernels.tree_attention_triton import tree_attention_triton

    there = on_device(case)
    output = torch.full_like(there.query, SENTINEL)
    tensors = (there.query, there.keys, there.values, output)
    tree_attention_triton(*tensors, there.trees, there.scale, {}, splits, scoring=there.scoring)
    return output.cpu()


def context_by_flash(case: Case, version: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the contexts, by what keeps FlashAttention's contract; all rows have queries."""
    trees = case.trees
    asked = torch.cat(
        [
            case.query[first : first + rows]
            for first, rows in zip(trees.first_row.tolist(), trees.num_rows.tolist(), strict=True)
        ]
    )
    output, lse = flash_attn_varlen_func(
        q=asked,
        k=case.keys.transpose(1, 2),
        v=case.values.transpose(1, 2),
        out=torch.empty_like(asked),
        max_seqlen_q=int(trees.num_rows.max()),
        cu_seqlens_q=trees.row_start,
        max_seqlen_k=int(trees.context_len.max()),
        seqused_k=trees.context_len,
        softmax_scale=case.scale,
        causal=False,
        block_table=trees.block_table,
        return_softmax_lse=True,
        fa_version=version,
    )
    return output, lse


def continued(
    case: Case, form: Backend, context: Callable[[Case], Any] = context_by_flash, **changes: Any
) -> torch.Tensor:
    """`Case.run` by `attend_nodes`."""
    context_output, context_lse = context(case)
    there = on_device(case)
    output = torch.full_like(there.query, SENTINEL)
    arguments = {
        "context_output": context_output.to(DEVICE),
        "context_lse": context_lse.to(DEVICE),
        "output": output,
        **changes,
    }
    attend_nodes(
        there.query,
        there.keys,
        there.values,
        trees=there.trees,
        scale=there.scale,
        backend=form,
        **arguments,
    )
    return output.cpu()


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, context_rounded: bool = False) -> None:
    tolerance = dict(TOLERANCE[dtype])
    if context_rounded and dtype != torch.float32:
        # Rounded twice: what came of the context, of size 1, and the sum.
        tolerance["atol"] += torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want.double(), **tolerance)


LONG = [(420, binary(40)), (0, [-1]), (129, chain(7)), (128, star(9)), (127, random_tree(12)), (1, [-1])]


@device_only
@pytest.mark.parametrize("window", [0, 1, 40, 200, 600])
@pytest.mark.parametrize("splits", [2, 3, 7])
def test_shares_of_windowed_layers_with_sinks(splits: int, window: int) -> None:
    """A sink counts once, and shares begin where the window does."""
    sinks = torch.tensor([1.0, 2.0, -1.0, 0.0, 3.0, 9.0])
    case = make([(700, binary(9)), (0, chain(3)), (130, star(5))], heads=(6, 2))
    case = replace(case, scoring=Scoring(window, 4.0, sinks))
    torch.testing.assert_close(shared_out(case, splits), case.run("torch"), **TOLERANCE[torch.float32])


@device_only
@pytest.mark.parametrize(
    ("dtype", "splits"),
    [
        (DTYPES[0], 2),
        pytest.param(DTYPES[0], 7, marks=pytest.mark.slow),
        (DTYPES[1], 3),
        pytest.param(DTYPES[2], 12, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_shares_add_up(dtype: torch.dtype, splits: int) -> None:
    case = make(LONG, dtype, heads=(6, 2), block_size=16)
    close(shared_out(case, splits), case.run("torch"), dtype)


@device_only
@pytest.mark.parametrize(
    ("head_size", "block_size", "heads"),
    [
        (32, 16, (2, 2)),
        pytest.param(80, 32, (9, 3), marks=pytest.mark.slow),
        (128, 48, (4, 1)),
        pytest.param(256, 16, (16, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_shares_of_other_heads_and_blocks(head_size: int, block_size: int, heads: tuple[int, int]) -> None:
    case = make([(300, binary(9)), (40, star(70))], heads=heads, head_size=head_size, block_size=block_size)
    close(shared_out(case, 3), case.run("torch"), torch.float32)


@device_only
def test_shares_whose_keys_are_all_hidden() -> None:
    """Nodes alone, two shares: the last chain sees nothing of the first, the middle one not all steps of it."""
    forest = [-1, *range(39), -1, *range(40, 129), -1, *range(130, 139)]
    for past in ([0, 0], [110, 3]):
        case = make([(0, forest), (20, [-1, -1, -1, 0, 1, 2] + [5] * 110)], heads=(4, 2), past=past)
        close(shared_out(case, 2), case.run("torch"), torch.float32)


@device_only
def test_rows_computed_before_and_shares() -> None:
    case = make([*MIXED[:4], (333, [-1, -1, 0, 1, 1])], heads=(9, 3), past=[15, 0, 3, 1, 2])
    close(shared_out(case, 4), case.run("torch"), torch.float32)


@device_only
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_trees_and_shares(data: st.DataObject) -> None:
    trees, past = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        rows = data.draw(st.integers(1, 24))
        parents = [-1] + [data.draw(st.integers(-1, row - 1)) for row in range(1, rows)]
        trees.append((data.draw(st.integers(0, 400)), parents))
        past.append(data.draw(st.integers(0, rows)))
    case = make(trees, data.draw(st.sampled_from(DTYPES)), past=past)
    close(shared_out(case, data.draw(st.integers(2, 9))), case.run("torch"), case.query.dtype)


FOREST = [-1, -1, 0, 1, 1, -1, 4, 2, 3, 0, 7, 5]


@pytest.mark.parametrize("form", BITS_FORMS)
def test_bits_of_ancestors(form: Backend) -> None:
    trees = [
        [-1],
        binary(31),
        chain(32),
        star(33),
        random_tree(MAX_ROWS),
        chain(MAX_ROWS),
        [],
        FOREST,
        binary(65),
    ]
    starts = [0]
    for parents in trees:
        starts.append(starts[-1] + len(parents))
    flat = ints([parent for parents in trees for parent in parents])
    # Of a buffer that stays, rows of no request keep what they have.
    out = torch.full((len(flat) + 3, WORDS), 77, dtype=torch.int32, device=DEVICE)
    padded = torch.cat([flat, ints([5, 5, 5])])
    got = ancestor_bits(padded.to(DEVICE), ints(starts).to(DEVICE), out, form)
    assert got is out
    assert (got[len(flat) :] == 77).all()
    for start, parents in zip(starts, trees, strict=False):
        for row in range(len(parents)):
            path, at = set(), row
            while at != -1:
                path.add(at)
                at = parents[at]
            words = [sum(1 << (seen % 32) for seen in path if seen // 32 == word) for word in range(WORDS)]
            assert [word % 2**32 for word in got[start + row].tolist()] == words
    assert torch.equal(
        got[: len(flat)], ancestor_bits(flat.to(DEVICE), ints(starts).to(DEVICE), backend=form)
    )


def test_what_bits_refuse() -> None:
    parents, starts = ints([-1, 0]), ints([0, 2])
    with pytest.raises(ValueError, match=r"parents: torch\.int64 .* pass parents\.to"):
        ancestor_bits(parents.long(), starts)
    with pytest.raises(ValueError, match=r"out: .* must be contiguous int32 \[2, 5\]; leave it out"):
        ancestor_bits(parents, starts, torch.zeros(2, 4, dtype=torch.int32))
    case = make([(5, [-1])])
    with pytest.raises(ValueError, match=r"max_rows=0 must be 1 at least"):
        replace(case.trees, max_rows=0)
    if "triton" in FORMS:
        with pytest.raises(ValueError, match=r"max_rows=161: backend='triton' takes 160"):
            replace(case, trees=replace(case.trees, max_rows=161)).run("triton")


@device_only
def test_large_heads_are_refused() -> None:
    """They would not fit the shared memory."""
    case = make([(5, chain(3))], heads=(1, 1), head_size=512, layout="flash")
    with pytest.raises(
        ValueError, match=r"512\): backend='triton' takes a head_size of 256 at most; .*'torch'"
    ):
        case.run("triton")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [*(((6, 2), dtype) for dtype in DTYPES), ((4, 4), DTYPES[0]), ((16, 2), DTYPES[0])],
    ids=str,
)
def test_nodes_behind_flash_attention_are_the_definition(
    heads: tuple[int, int], dtype: torch.dtype, form: Backend
) -> None:
    case = make(LONG[1:] if heads == (6, 2) else MIXED, dtype, heads=heads, layout="flash")
    want = dense(case)
    for version in (2, 3):
        got = continued(case, form, functools.partial(context_by_flash, version=version))
        close(got, want, dtype, context_rounded=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head_size", [32, 80, 128])
def test_the_largest_trees_behind_flash_attention(head_size: int, form: Backend) -> None:
    trees = [(40, random_tree(129)), (3, star(2)), (17, chain(65))]
    case = make(trees, heads=(4, 2), head_size=head_size)
    close(continued(case, form), case.run("torch"), torch.float32)


@pytest.mark.parametrize("form", FORMS)
def test_rows_computed_before_behind_another_context_kernel(form: Backend) -> None:
    def reference(case: Case) -> Any:
        return attend_context_ref(case.query, case.keys, case.values, case.trees, case.scale)

    case = make([*MIXED[:4], (33, FOREST)], heads=(9, 3), past=[15, 0, 3, 1, 11])
    close(continued(case, form, reference), case.run("torch"), torch.float32)


@pytest.mark.parametrize("form", FORMS)
def test_a_context_that_weighs_nothing_and_one_that_weighs_all(form: Backend) -> None:
    """The nodes' weight beside the context's is what the logarithm says, far from 1 too."""
    case = make([(60, binary(7)), (60, binary(7))], heads=(2, 2))
    query = case.query.clone()
    query[: case.trees.first_row[1]] *= 40.0
    case = replace(case, query=query)
    # Scores up to 200 have 1.5e-5 between them and the next float32.
    torch.testing.assert_close(continued(case, form).double(), dense(case), atol=1e-4, rtol=1e-4)
    context_output, context_lse = context_by_flash(case)

    def heavier(case: Case) -> Any:
        return context_output, context_lse + 200.0

    got = continued(case, form, heavier)
    first = int(case.trees.first_row[0])
    torch.testing.assert_close(got[first : first + 7], context_output[:7], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"context_output": torch.zeros(16, 2, 64)},
            r"context_output: .* must be torch\.float32 \(16, 3, 64\)",
        ),
        ({"context_lse": torch.zeros(16, 3)}, r"context_lse: .* must be torch\.float32 \(3, 16\)"),
        ({"context_lse": torch.zeros(3, 16).double()}, r"context_lse: torch\.float64"),
    ],
)
def test_what_continued_attention_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        continued(
            make([(60, binary(16))]), "torch", **{name: value.to(DEVICE) for name, value in changes.items()}
        )


@device_only
@pytest.mark.parametrize("splits", [1, 3])
def test_buffers_that_stay_are_read_anew(splits: int) -> None:
    """As a captured graph does it: launch by shapes once, then change what the buffers hold, padding included."""
    from vllm_ext.kernels.tree_attention_triton import tree_attention_triton

    # One cache of all steps; a step has at most four requests with nine rows each.
    steps = [
        [(60, binary(9)), (5, star(9)), (200, chain(9)), (31, random_tree(9))],
        [(61, star(5)), (180, [-1])],
        [(0, chain(9)), (150, random_tree(9)), (1, binary(3))],
    ]
    requests, rows = 4, 9
    whole = on_device(make([(220, [-1])] * requests, heads=(6, 2), block_size=16, gap=rows))
    by_request = torch.zeros(4, requests, dtype=torch.int32, device=DEVICE)
    by_row = torch.zeros(requests * rows, dtype=torch.int32, device=DEVICE)
    first, num, past, context_len = by_request
    buffers = TreeRows(whole.trees.block_table, first, num, past, context_len, by_row, rows)
    bits = torch.zeros(requests * rows, WORDS, dtype=torch.int32, device=DEVICE)
    starts = torch.zeros(requests + 1, dtype=torch.int32, device=DEVICE)
    vars(buffers).update(ancestor_bits=bits, row_start=starts)
    prepared: dict[str, Any] = {}
    for step in steps:
        counts = [len(parents) for _, parents in step] + [0] * (requests - len(step))
        starts[1:] = torch.tensor(counts).cumsum(0)
        buffers.num_rows[:] = torch.tensor(counts)
        buffers.first_row[:] = starts[:-1] + 2
        buffers.context_len[:] = torch.tensor(
            [context for context, _ in step] + [9999] * (requests - len(step))
        )
        flat = [parent for _, parents in step for parent in parents]
        buffers.parents.fill_(77)
        buffers.parents[: len(flat)] = torch.tensor(flat)
        ancestor_bits(buffers.parents, starts, bits, "triton")
        output = torch.full_like(whole.query, SENTINEL)
        tree_attention_triton(
            whole.query, whole.keys, whole.values, output, buffers, whole.scale, prepared, splits
        )
        there = {name: getattr(buffers, name)[: len(step)] for name in TENSORS}
        fresh = TreeRows(**(there | {"parents": buffers.parents[: len(flat)].clone()}))
        expected = torch.full_like(output, SENTINEL)
        tree_attention(whole.query, whole.keys, whole.values, expected, fresh, whole.scale, "torch")
        close(output, expected, torch.float32)
        assert (output[:2] == SENTINEL).all()
        assert (output[2 + len(flat) :] == SENTINEL).all()


@device_only
def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    """Of a cache with more than 2**31 elements, of which a few are written: the file is sparse."""
    case = make([(20, binary(5)), (3, star(3))], torch.float16, heads=(4, 2), block_size=16)
    blocks, stride = len(case.keys), (1 << 31) // 2 + 64
    size = stride * (blocks - 1) + 2 * case.keys[0].numel()
    assert stride * (blocks - 1) > 1 << 31
    if DEVICE == "cuda":
        flat = torch.empty(size, dtype=torch.float16, device=DEVICE)
    else:
        flat = torch.from_file(str(tmp_path / "cache"), shared=True, size=size, dtype=torch.float16)
    heads, block_size, head_size = case.keys.shape[1:]
    shape, strides = (blocks, heads, block_size, head_size), (stride, block_size * head_size, head_size, 1)
    keys = flat.as_strided(shape, strides).copy_(case.keys)
    values = flat.as_strided(shape, strides, case.keys[0].numel()).copy_(case.values)
    want = case.run("torch")
    close(shared_out(case, 2), want, torch.float16)
    there = on_device(case)
    output = torch.full_like(there.query, SENTINEL)
    tree_attention(there.query, keys, values, output, there.trees, case.scale, "triton")
    close(output.cpu(), want, torch.float16)


@device_only
def test_the_launch_follows_from_shapes() -> None:
    """Few requests: every core has something to do. Many: no more programs than there is room for, and no shares."""
    from vllm_ext.kernels.tree_attention_triton import PROGRAMS_PER_CORE, plan

    cores = 132
    for requests in (1, 2, 8, 32, 256):
        for rows in (1, 8, 17, 64):
            for heads in ((32, 8), (9, 3), (64, 8), (8, 8)):
                parents = torch.full((requests * rows,), -1, dtype=torch.int32)
                zeros = torch.zeros(requests, dtype=torch.int32)
                table = torch.zeros(requests, 2048, dtype=torch.int32)
                trees = TreeRows(table, zeros, zeros, zeros, zeros, parents, rows)
                launch = plan(trees, *heads, 128, 16, False, cores)
                assert launch.tiles * launch.rows >= rows * heads[0] // heads[1]
                assert (launch.tiles - 1) * launch.rows < rows * heads[0] // heads[1]
                programs = requests * heads[1] * launch.tiles * launch.splits
                assert launch.splits == 1 or programs <= cores * PROGRAMS_PER_CORE
                if requests * heads[1] * launch.tiles <= cores and requests * heads[1] >= 8:
                    assert programs > cores * PROGRAMS_PER_CORE / 2
    zero = zeros[:1]
    short = TreeRows(table[:1, :8], zero, zero, zero, zero, parents[:4])
    assert plan(short, 32, 8, 128, 16, False, cores).splits == 1  # 128 tokens
    assert plan(short, 32, 8, 128, 16, False, 0).splits == 1


@device_only
@pytest.mark.parametrize(
    ("trees", "heads", "dtype"),
    [
        ([(37, binary(32)), (0, [-1]), (40, star(17))], (4, 1), torch.bfloat16),
        ([(5, chain(43)), (129, random_tree(11))], (9, 3), torch.float32),
        ([(33, random_tree(70)), (3, star(40))], (4, 2), torch.float32),
        ([(60, random_tree(20))], (2, 2), torch.float16),
    ],
    ids=["128 packed rows", "one more", "two tiles", "a smaller tile"],
)
def test_tiles_of_128_rows(
    trees: list[tuple[int, list[int]]], heads: tuple[int, int], dtype: torch.dtype
) -> None:
    """What the suite for a GPU times beside the usual tiles: no row's result depends on the tile it is in."""
    from vllm_ext.kernels.tree_attention_triton import WIDE_ROWS, tree_attention_triton

    largest = max(len(parents) for _, parents in trees)
    case = make(trees, dtype, heads=heads, block_size=16, past=[0, *[1] * (len(trees) - 1)])
    case = replace(case, trees=replace(case.trees, max_rows=largest))
    there, want = on_device(case), case.run("torch")
    packed = largest * heads[0] // heads[1]
    for splits in (None, 3):
        output, prepared = torch.full_like(there.query, SENTINEL), {}  # type: ignore[var-annotated]
        arguments = there.query, there.keys, there.values, output, there.trees, there.scale, prepared
        tree_attention_triton(*arguments, splits, WIDE_ROWS)
        launch = prepared["launch"]
        assert launch.rows == min(WIDE_ROWS, 1 << (packed - 1).bit_length())
        assert launch.tiles == -(-packed // launch.rows)
        close(output.cpu(), want, dtype)


@device_only
def test_the_usual_tiles_have_64_rows() -> None:
    """Until a GPU has said that larger ones are faster."""
    from vllm_ext.kernels.tree_attention_triton import LEAST_ROWS, plan

    zero = torch.zeros(1, dtype=torch.int32)
    for rows, usual, wide in ((1, LEAST_ROWS, LEAST_ROWS), (16, 64, 64), (17, 64, 128), (64, 64, 128)):
        parents = torch.full((rows,), -1, dtype=torch.int32)
        trees = TreeRows(zero[None], zero, zero, zero, zero, parents, rows)
        assert plan(trees, 32, 8, 128, 16, False, 132).rows == usual
        assert plan(trees, 32, 8, 128, 16, False, 132, tile=128).rows == wide


@device_only
def test_nothing_is_asked_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch is made of shapes: on tensors without values it is the same."""
    from vllm_ext.kernels import ancestor_bits_triton, tree_attention_triton

    case = make(MIXED, heads=(6, 2))
    launched: list[Any] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **__: launched.append((self.name, grid))

    for module, name in (
        (tree_attention_triton, "_attend"),
        (tree_attention_triton, "_add_up"),
        (ancestor_bits_triton, "_ancestor_bits"),
    ):
        monkeypatch.setattr(module, name, Recorder(name))
    monkeypatch.setattr(backends, "choose", lambda *_: "triton")
    runs = []
    for device in ("cpu", "meta"):
        query, keys, values = (t.to(device) for t in (case.query, case.keys, case.values))
        trees = each(case.trees, lambda tensor, device=device: tensor.to(device))  # type: ignore[misc]
        output, total = torch.empty_like(query), len(trees.parents)
        tree_attention(query, keys, values, output, trees, 0.1, "triton")
        tree_attention_triton.tree_attention_triton(query, keys, values, output, trees, 0.1, {}, 4)
        context = torch.empty(total, 6, 64, device=device), torch.empty(6, total, device=device)
        attend_nodes(query, keys, values, *context, output, trees, 0.1, "triton")
        runs.append(launched[:])
        launched.clear()
    assert runs[0] == runs[1]
    assert [name for name, _ in runs[0]] == ["_ancestor_bits", "_attend", "_attend", "_add_up", "_attend"]
