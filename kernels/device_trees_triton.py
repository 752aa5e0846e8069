# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""`device_trees` on CUDA: one program for each request, nothing of it on the host."""

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.device_trees import WORDS, RecycledTable, RowLayout, SlotTrees


def grow_triton(
    table: RecycledTable,
    estimates: torch.Tensor,
    roots: torch.Tensor,
    slots: torch.Tensor,
    chains: torch.Tensor,
    max_depths: torch.Tensor,
    template: torch.Tensor | None,
    trees: SlotTrees,
    tokens: torch.Tensor,
) -> None:
    """See `vllm_ext.kernels.device_trees.grow`."""
    requests, nodes = tokens.shape
    width = table.successors.shape[1]
    if requests == 0:
        return
    with torch.cuda.device_of(tokens):
        _grow[(requests,)](
            table.successors,
            table.classes,
            estimates,
            roots,
            slots,
            chains,
            max_depths,
            template,
            trees.parents,
            trees.depths,
            trees.bits,
            trees.groups,
            tokens,
            nodes,
            width,
            estimates.shape[1],
            ROWS=triton.next_power_of_2(1 + nodes),
            # Children of every node, in the order in which their parents were opened.
            CHILDREN=max(32, triton.next_power_of_2((1 + nodes) * width)),
            WORDS=WORDS,
            WORDS_UP=triton.next_power_of_2(WORDS),
        )


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
        )


def walk_triton(
    row_start: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    sampled: torch.Tensor,
    emitted: torch.Tensor,
    num_emitted: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
) -> None:
    """See `vllm_ext.kernels.device_trees.walk`."""
    requests, most = emitted.shape
    if requests == 0:
        return
    with torch.cuda.device_of(tokens):
        _walk[(requests,)](
            row_start,
            tokens,
            parents,
            sampled,
            emitted,
            num_emitted,
            path,
            accepted,
            most,
            ROWS=triton.next_power_of_2(most),
        )


@triton.jit
def _grow(
    successors,
    classes,
    estimates,
    roots,
    slots,
    chains,
    max_depths,
    template,
    parents,
    depths,
    bits,
    groups,
    tokens,
    nodes,
    width,
    num_depths,
    ROWS: tl.constexpr,
    CHILDREN: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_UP: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    chain = tl.load(chains + slot)
    max_depth = tl.load(max_depths + slot)
    root = tl.load(roots + slot)
    child = tl.arange(0, CHILDREN)
    parent_of = child // width  # a child's place is its parent's row times the width, plus its rank
    rank_of = child % width
    chance = tl.full([CHILDREN], -1.0, tl.float32)
    token_of = tl.zeros([CHILDREN], tl.int64)
    group_of = tl.zeros([CHILDREN], tl.int32)
    position_of = tl.zeros([CHILDREN], tl.int32)
    row = tl.arange(0, ROWS)
    word = tl.arange(0, WORDS_UP)
    row_depth = tl.where(row == 0, 0, 1)
    row_parent = tl.full([ROWS], -1, tl.int32)
    row_group = tl.full([ROWS], -1, tl.int32)
    row_token = tl.zeros([ROWS], tl.int64) + root
    row_bits = tl.where((row // 32)[:, None] == word[None, :], (1 << (row % 32))[:, None], 0)

    opened = 0
    opened_token = root
    opened_chance = 1.0
    opened_depth = 0
    opened_position = 0
    for node in range(1, nodes + 1):
        if chain != 0:
            chance = tl.full([CHILDREN], -1.0, tl.float32)
        new = parent_of == tl.where(opened_depth < max_depth, opened, ROWS)
        token = tl.load(successors + opened_token * width + rank_of, mask=new, other=-1)
        entry = tl.load(classes + opened_token * width + rank_of, mask=new, other=0)
        group = entry * num_depths + tl.minimum(opened_depth, num_depths - 1)
        new = new & (token >= 0)
        if template is not None:
            position = tl.load(template + opened_position * width + rank_of, mask=new, other=-1)
            position_of = tl.where(new, position, position_of)
            new = new & (position >= 0)
        own = opened_chance * tl.load(estimates + group, mask=new, other=0.0)
        new = new & (own > 0.0)
        chance = tl.where(new, own, chance)
        token_of = tl.where(new, token.to(tl.int64), token_of)
        group_of = tl.where(new, group, group_of)

        best = tl.max(chance, 0)
        # Once there is none there is none any more: what was opened last is then opened again, in vain.
        there = best > 0.0
        place = tl.min(tl.where(chance == best, child, CHILDREN), 0)
        at = child == place
        taken_token = tl.sum(tl.where(at, token_of, 0), 0)
        taken_group = tl.sum(tl.where(at, group_of, 0), 0)
        parent = place // width
        depth = tl.sum(tl.where(row == parent, row_depth, 0), 0) + 1
        seen = tl.sum(tl.where((row == parent)[:, None], row_bits, 0), 0)
        this = row == tl.where(there, node, ROWS)
        row_parent = tl.where(this, parent, row_parent)
        row_depth = tl.where(this, depth, row_depth)
        row_group = tl.where(this, taken_group, row_group)
        row_token = tl.where(this, taken_token, row_token)
        row_bits = tl.where(this[:, None], row_bits | seen[None, :], row_bits)
        chance = tl.where(at, -1.0, chance)
        opened = tl.where(there, node, ROWS)
        opened_token = tl.where(there, taken_token, root)
        opened_chance = best
        opened_depth = depth
        opened_position = tl.sum(tl.where(at, position_of, 0), 0)

    inside = row < nodes + 1
    at_row = slot * (nodes + 1) + row
    tl.store(parents + at_row, row_parent, mask=inside)
    tl.store(depths + at_row, row_depth, mask=inside)
    tl.store(groups + at_row, row_group, mask=inside)
    tl.store(
        bits + at_row[:, None] * WORDS + word[None, :],
        row_bits,
        mask=inside[:, None] & (word < WORDS)[None, :],
    )
    tl.store(tokens + request * nodes + row - 1, row_token, mask=inside & (row > 0))


@triton.jit
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
    tokens,
    parents,
    sampled,
    emitted,
    num_emitted,
    path,
    accepted,
    most,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(row_start + request)
    rows = tl.load(row_start + request + 1) - start
    row = tl.arange(0, ROWS)
    inside = row < rows
    token = tl.load(tokens + start + row, mask=inside, other=-1)
    parent = tl.load(parents + start + row, mask=inside, other=-1)
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
        at = tl.min(tl.where((parent == at) & (token == drawn) & inside, row, ROWS), 0)
    tl.store(num_emitted + request, count)
    tl.store(emitted + request * most + row, result, mask=row < most)
    tl.store(path + request * most + row, rows_of_path, mask=row < most)
    tl.store(accepted + start + row, on_path, mask=inside)
