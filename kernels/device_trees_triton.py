# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""`device_trees` on CUDA: one program for each request, nothing of it on the host."""

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.device_trees import WORDS, RowLayout, SlotTrees, Walked


def lay_out_triton(
    trees: SlotTrees,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    row_start: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    layout: RowLayout,
) -> None:
    """See `vllm_ext.kernels.device_trees.lay_out`."""
    with torch.cuda.device_of(positions):
        _lay_out[(len(layout.num_rows),)](
            trees.parents,
            trees.depths,
            trees.bits,
            trees.groups,
            slots,
            query_start,
            row_start,
            seq_lens,
            positions,
            layout.row_start,
            layout.first_row,
            layout.num_rows,
            layout.context,
            layout.parents,
            layout.bits,
            layout.groups,
            len(slots),
            trees.parents.shape[1],
            ROWS=triton.next_power_of_2(trees.parents.shape[1]),
            WORDS=WORDS,
            WORDS_UP=triton.next_power_of_2(WORDS),
            num_warps=1,
        )


def walk_triton(
    row_start: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    parents: torch.Tensor,
    sampled: torch.Tensor,
    invalid: torch.Tensor | None,
    prefill_len: torch.Tensor,
    seq_lens: torch.Tensor,
    walked: Walked,
    totals: torch.Tensor | None,
) -> None:
    """See `vllm_ext.kernels.device_trees.walk`."""
    requests, most = walked.emitted.shape
    if requests == 0:
        return
    with torch.cuda.device_of(sampled):
        _walk[(requests,)](
            row_start,
            slots,
            tokens,
            positions,
            parents,
            sampled,
            invalid,
            prefill_len,
            seq_lens,
            *walked,
            totals,
            most,
            ROWS=triton.next_power_of_2(most),
            num_warps=1,
        )


@triton.jit(do_not_specialize=["num_requests"])
def _lay_out(
    parents,
    depths,
    bits,
    groups,
    slots,
    query_start,
    row_start,
    seq_lens,
    positions,
    laid_start,
    first_row,
    num_rows,
    context,
    row_parents,
    row_bits,
    row_groups,
    num_requests,
    stride,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_UP: tl.constexpr,
):
    request = tl.program_id(0)
    end = tl.load(row_start + tl.minimum(request + 1, num_requests))
    tl.store(laid_start + request + 1, end)
    if request >= num_requests:
        tl.store(num_rows + request, 0)
        return
    start = tl.load(row_start + request)
    rows = end - start
    if request == 0:
        tl.store(laid_start, start)
    first = tl.load(query_start + request + 1) - rows
    before = tl.load(seq_lens + request) - rows
    tl.store(first_row + request, first)
    tl.store(num_rows + request, rows)
    tl.store(context + request, before)
    row = tl.arange(0, ROWS)
    inside = row < rows
    at = tl.load(slots + request) * stride + row
    depth = tl.load(depths + at, mask=inside, other=0)
    tl.store(positions + first + row, (before + depth).to(tl.int64), mask=inside)
    tl.store(row_parents + start + row, tl.load(parents + at, mask=inside, other=-1), mask=inside)
    tl.store(row_groups + start + row, tl.load(groups + at, mask=inside, other=-1), mask=inside)
    word = tl.arange(0, WORDS_UP)
    whole = inside[:, None] & (word < WORDS)[None, :]
    seen = tl.load(bits + at[:, None] * WORDS + word[None, :], mask=whole, other=0)
    tl.store(row_bits + (start + row)[:, None] * WORDS + word[None, :], seen, mask=whole)


@triton.jit
def _walk(
    row_start,
    slots,
    tokens,
    positions,
    parents,
    sampled,
    invalid,
    prefill_len,
    seq_lens,
    emitted,
    num_emitted,
    num_rejected,
    path,
    accepted,
    totals,
    most,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(row_start + request)
    rows = tl.load(row_start + request + 1) - start
    prefill = tl.load(prefill_len + tl.load(slots + request).to(tl.int64))
    row = tl.arange(0, ROWS)
    inside = row < rows
    real = tl.where(tl.load(positions + start) >= prefill, rows, 1)  # behind these rows: padding
    token = tl.load(tokens + start + row, mask=inside, other=-1).to(tl.int64)
    parent = tl.load(parents + start + row, mask=(row > 0) & (row < real), other=-1)
    open_to = parent >= 0
    if invalid is not None:
        open_to = open_to & (tl.load(invalid + start + row, mask=inside, other=0) == 0)
    next_token = tl.load(sampled + start + row, mask=inside, other=0)
    result = tl.zeros([ROWS], tl.int64)
    rows_of_path = tl.arange(0, ROWS)
    on_path = tl.zeros([ROWS], tl.int32)
    at = 0
    count = 0
    while at < rows:
        drawn = tl.sum(tl.where(row == at, next_token, 0), 0)
        result = tl.where(row == count, drawn, result)
        rows_of_path = tl.where(row == count, at, rows_of_path)
        on_path = tl.where(row == at, 1, on_path)
        count += 1
        # Behind the last row if there is none: children stand behind their parent.
        at = tl.min(tl.where((parent == at) & (token == drawn) & open_to, row, ROWS), 0)
    speaks = tl.load(seq_lens + request) >= prefill
    tl.store(num_emitted + request, tl.where(speaks, count, 0))
    tl.store(num_rejected + request, tl.where(speaks, rows - count, 0))
    tl.store(emitted + request * most + row, result, mask=row < most)
    tl.store(path + request * most + row, rows_of_path, mask=row < most)
    tl.store(accepted + start + row, on_path, mask=inside)
    if totals is not None:
        tl.atomic_add(totals, tl.sum((parent >= 0).to(tl.int64), 0))
        tl.atomic_add(totals + 1, tl.where(speaks, count - 1, 0).to(tl.int64))
        tl.atomic_add(totals + 2, tl.where(speaks, count, 0).to(tl.int64))
        tl.atomic_add(totals + 3, speaks.to(tl.int64))
