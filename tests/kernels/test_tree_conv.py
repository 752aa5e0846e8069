# SPDX-License-Identifier: Apache-2.0
"""Convolution of trees' rows: every form against float64, and the state it leaves, exactly.

The triton form runs through the interpreter: see `test_triton_forms`. Steps replayed one after
the other are in `test_recurrent_trees`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import IN_INTERPRETER
from recurrent_cases import Conv, conv, right_conv
from tree_cases import SENTINEL, binary, chain, ints, random_tree

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.tree_conv import tree_conv

FORMS: list[Backend] = ["triton"] if IN_INTERPRETER or torch.cuda.is_available() else ["torch", "numba"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # of the largest value
MIXED = [
    ([], [-1]),
    ([2, 3], random_tree(9)),
    ([], chain(6)),
    ([1, 2, 3, 4, 5, 7], [-1]),
    ([1], []),
    (list(range(1, 17)), random_tree(17, 1)),
    ([16], binary(17)),
]

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


def check(case: Conv, form: Backend) -> None:
    (out, state), (want, want_state) = case.run(form, DEVICE), right_conv(case)
    assert torch.equal(out == SENTINEL, want == SENTINEL)
    assert (out.double() - want).abs().max() / want.abs().max() < LIMIT[out.dtype]
    assert torch.equal(state, want_state)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("order", [(1, 0), (0, 1)], ids=str)
def test_a_batch_of_different_trees(order: tuple[int, ...], dtype: torch.dtype, form: Backend) -> None:
    for bias, silu in ((True, True), (False, True), (True, False)):
        check(conv(MIXED, dtype=dtype, order=order, bias=bias, silu=silu), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("channels", [16, 288])
def test_sizes(channels: int, width: int, form: Backend) -> None:
    check(conv(MIXED, channels, width), form)


@pytest.mark.parametrize("form", FORMS)
def test_every_count_of_pending_rows(form: Backend) -> None:
    for count in range(9):
        check(conv([(list(range(1, count + 1)), random_tree(5, count))], 32, nodes=8, seed=count), form)


@pytest.mark.parametrize("form", FORMS)
def test_without_room_for_drafts(form: Backend) -> None:
    check(conv([([], [-1]), ([], [-1])], 32, nodes=0), form)


@pytest.mark.parametrize("form", FORMS)
def test_padding_is_skipped(form: Backend) -> None:
    case = conv(MIXED)
    case.blocks[1] = case.blocks[3] = 0
    check(case, form)


@pytest.mark.parametrize("form", FORMS)
def test_strided_rows_and_weights(form: Backend) -> None:
    case = conv(MIXED)
    wide = torch.randn(len(case.x), 200)
    wide[:, :144] = case.x
    weight = case.weight.T.contiguous().T
    check(replace(case, x=wide[:, :144], weight=weight), form)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=10 if IN_INTERPRETER else 60, deadline=None)
@given(data=st.data())
def test_any_trees(form: Backend, data: st.DataObject) -> None:
    trees = []
    for _ in range(data.draw(st.integers(1, 4))):
        rows = data.draw(st.integers(0, 9))
        parents = [-1, *(data.draw(st.integers(0, row - 1)) for row in range(1, rows))][:rows]
        pending = data.draw(st.sets(st.integers(1, 8), max_size=8))
        trees.append((sorted(pending), parents))
    check(conv(trees, 32, nodes=8, seed=data.draw(st.integers(0, 99))), form)


@pytest.mark.parametrize("form", FORMS)
def test_a_visible_sibling_would_be_noticed(form: Backend) -> None:
    """The checks above are worth something: a chain instead of a tree changes each row behind a sibling."""
    case = conv([([], [-1, 0, 0, 1, 2])], gap=0)
    tree, _ = case.run(form, DEVICE)
    triangle, _ = replace(case, parents=ints(chain(5))).run(form, DEVICE)
    assert ((tree - triangle).abs().amax(1) > 1e-3).tolist() == [False, False, True, True, True]


def test_what_does_not_fit_is_refused() -> None:
    case = conv(MIXED)
    fields = {name: value for name, value in vars(case).items() if name != "total"}
    fields["out"] = torch.zeros(case.total, 144)
    tree_conv(**fields, backend=FORMS[0])
    for name, value, message in [
        ("x", case.x[:, :16], "must be .rows, D."),
        ("x", case.x.double(), "x: torch.float64"),
        ("state", case.state[:, :, :2], "W=4 must be 2 at least"),
        ("bias", torch.zeros(3), r"bias: torch.float32 \(3,\)"),
        ("out", fields["out"].half(), "out: torch.float16"),
        ("pending", case.pending.long(), "pending: torch.int64"),
        ("out_start", case.out_start[:1], r"out_start: .*int32 \(7,\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            tree_conv(**(fields | {name: value}), backend=FORMS[0])
