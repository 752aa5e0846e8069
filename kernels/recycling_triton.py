# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""`recycling` on CUDA: `mark` has a program for each request, `learn` one for each row; nothing is on the host."""

import torch
import triton
import triton.language as tl

from vllm_ext.kernels import recycling
from vllm_ext.kernels.device_trees import RowLayout
from vllm_ext.kernels.recycling import MAX_CONTEXT, Calibration, Marks, RecyclingTables, WalkedRows
from vllm_ext.kernels.recycling_places_triton import pair_place, text_place, with_token
from vllm_ext.kernels.top_k_triton import ID, NOTHING, block_top_k

PLACE_BITS = tl.constexpr(recycling.PLACE_BITS)
PLACES = tl.constexpr((1 << recycling.PLACE_BITS) - 1)
LASTING, UNIT = tl.constexpr(recycling.LASTING), tl.constexpr(recycling.UNIT)
CONTEXT = tl.constexpr(MAX_CONTEXT)
PROMPT_BLOCK = 256


def mark_triton(
    tables: RecyclingTables,
    calibration: Calibration,
    verified: WalkedRows,
    layout: RowLayout | None,
    text: torch.Tensor,
    prefill_len: torch.Tensor,
    teaches: torch.Tensor,
    longest: int,
    call: int,
    marks: Marks,
) -> None:
    """See `vllm_ext.kernels.recycling.mark`."""
    requests, most = verified.emitted.shape
    if requests == 0:
        return
    parents, groups = (verified.tokens,) * 2 if layout is None else (layout.parents, layout.groups)
    rows = 1 if layout is None else most
    with torch.cuda.device_of(text):
        _mark[(requests,)](
            tables.row_marks,
            tables.text_marks,
            calibration.tried,
            calibration.hit,
            *verified,
            parents,
            groups,
            text,
            text.stride(0),
            prefill_len,
            teaches,
            *marks,
            tables.vocab,
            len(tables.pair_keys),
            len(tables.text_keys),
            most,
            call << recycling.PLACE_BITS,
            TREES=layout is not None,
            LONGEST=longest,
            ROWS=triton.next_power_of_2(rows),
            num_warps=1,
        )


def learn_triton(
    tables: RecyclingTables,
    calibration: Calibration,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    shares: torch.Tensor,
    marks: Marks,
) -> None:
    """See `vllm_ext.kernels.recycling.learn`."""
    rows, width = len(logits), tables.successors.shape[1]
    if rows == 0:
        return
    with torch.cuda.device_of(logits):
        best = block_top_k(logits, width)
        count, groups = best.shape[1], calibration.trials.numel()
        _learn[(rows,)](
            *tables[:5],
            tables.row_marks,
            tables.text_marks,
            *calibration,
            best,
            logits,
            logits.stride(0),
            tokens,
            shares,
            *marks,
            count,
            width,
            len(shares),
            groups,
            tables.vocab,
            COUNT=max(32, triton.next_power_of_2(count)),
            WIDTH=triton.next_power_of_2(width),
            SHARES=triton.next_power_of_2(len(shares)),
            GROUPS=triton.next_power_of_2(groups),
        )


def record_prompts_triton(
    tables: RecyclingTables,
    text: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    most: int,
    longest: int,
    call: int,
) -> None:
    """See `vllm_ext.kernels.recycling.record_prompts`."""
    if len(slots) == 0 or most < 2:
        return
    grid = len(slots), triton.cdiv(most, PROMPT_BLOCK)
    with torch.cuda.device_of(text):
        for write in (False, True):  # which of all places may write is known when all have been marked
            _prompts[grid](
                tables.successors,
                tables.classes,
                tables.text_keys,
                tables.text_successors,
                tables.row_marks,
                tables.text_marks,
                text,
                text.stride(0),
                slots,
                lengths,
                tables.vocab,
                len(tables.text_keys),
                tables.successors.shape[1],
                call << recycling.PLACE_BITS,
                WRITE=write,
                LONGEST=longest,
                BLOCK=PROMPT_BLOCK,
            )


@triton.jit(do_not_specialize=["number"])
def _mark(
    row_marks,
    text_marks,
    tried,
    hit,
    row_start,
    slots,
    tokens,
    positions,
    accepted,
    emitted,
    num_emitted,
    parents,
    groups,
    text,
    text_stride,
    prefill_len,
    teaches,
    marked_rows,
    marked_pairs,
    marked_pair_keys,
    marked_texts,
    marked_text_keys,
    marked_next,
    vocab,
    pairs,
    texts,
    most,
    number,
    TREES: tl.constexpr,
    LONGEST: tl.constexpr,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(row_start + request)
    rows = tl.load(row_start + request + 1) - start
    slot = tl.load(slots + request).to(tl.int64)
    root_at = tl.load(positions + start)
    row = tl.arange(0, ROWS)
    inside = row < rows
    at = start + row
    token = tl.load(tokens + at, mask=inside, other=-1).to(tl.int64)
    root = tl.load(tokens + start).to(tl.int64)
    on_path = tl.load(accepted + at, mask=inside, other=0)
    real = inside & (row == 0)
    text += slot * text_stride
    before = tl.load(text + root_at - 1, mask=root_at > 0, other=-1).to(tl.int64)
    previous = tl.where(row == 0, before, -1)
    parent = tl.full([ROWS], -1, tl.int32)
    if TREES:
        drafted = tl.where(root_at >= tl.load(prefill_len + slot), rows, 1)  # behind these rows: padding
        parent = tl.load(parents + at, mask=(row > 0) & (row < drafted), other=-1)
        real = real | (parent >= 0)
        above = tl.load(tokens + start + parent, mask=parent >= 0, other=-1).to(tl.int64)
        previous = tl.where(row == 0, before, above)

    own = number + (on_path.to(tl.int64) << 20) + at
    teaching = real & (row < tl.where(tl.load(teaches + slot) != 0, rows, 0))
    tl.store(marked_rows + at, tl.where(teaching, own, -1), mask=inside)
    tl.atomic_max(row_marks + token, own, mask=teaching & (token >= 0) & (token < vocab))
    if LONGEST > 1:
        paired = teaching & (previous >= 0)
        place, key = pair_place(previous, token, pairs)
        tl.atomic_max(row_marks + vocab + place, own, mask=paired)
        tl.store(marked_pairs + at, tl.where(paired, vocab + place, -1).to(tl.int32), mask=inside)
        tl.store(marked_pair_keys + at, tl.where(paired, key, -1), mask=inside)
    else:
        tl.store(marked_pairs + at, tl.full([ROWS], -1, tl.int32), mask=inside)
    if TREES:
        above_on_path = tl.load(accepted + start + parent, mask=parent >= 0, other=0)
        group = tl.load(groups + at, mask=inside, other=-1)
        judged = teaching & (above_on_path != 0) & (group >= 0)
        tl.atomic_add(tried + group, 1, mask=judged)
        tl.atomic_add(hit + group, on_path, mask=judged)

    # Children stand behind their parents: the path's rows are in order.
    depth = tl.cumsum(on_path, 0) - 1
    count = tl.load(num_emitted + request)
    speaks = real & (on_path != 0) & (depth < count)
    emitted += request * most
    tl.store(marked_next + at, tl.load(emitted + depth, mask=speaks, other=-1).to(tl.int32), mask=inside)
    hashed = tl.zeros([ROWS], tl.int64)
    for back in tl.static_range(LONGEST):
        there = root_at + depth - back
        of_path = speaks & (there > root_at)
        of_text = speaks & (there >= 0) & (there < root_at)
        own_token = tl.load(emitted + depth - back - 1, mask=of_path, other=0)
        text_token = tl.load(text + there, mask=of_text, other=0).to(tl.int64)
        context = tl.where(of_path, own_token, tl.where(of_text, text_token, root))
        hashed = with_token(hashed, context)
        if back > 0:
            known = speaks & (there >= 0)
            place, key = text_place(hashed, back + 1, texts)
            tl.atomic_max(text_marks + place, number + at.to(tl.int64) * CONTEXT + back, mask=known)
            tl.store(marked_texts + at * CONTEXT + back, tl.where(known, place, -1).to(tl.int32), mask=inside)
            tl.store(marked_text_keys + at * CONTEXT + back, tl.where(known, key, -1), mask=inside)


@triton.jit
def _learn(
    successors,
    classes,
    pair_keys,
    text_keys,
    text_successors,
    row_marks,
    text_marks,
    trials,
    hits,
    estimates,
    tried,
    hit,
    best,
    logits,
    logits_row,
    tokens,
    shares,
    marked_rows,
    marked_pairs,
    marked_pair_keys,
    marked_texts,
    marked_text_keys,
    marked_next,
    count,
    width,
    num_shares,
    num_groups,
    vocab,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(marked_rows + row)
    token = tl.load(tokens + row).to(tl.int64)
    pair = tl.load(marked_pairs + row).to(tl.int64)
    of_token = (own >= 0) & (token >= 0) & (token < vocab)
    of_token = of_token & (tl.load(row_marks + token, mask=of_token, other=-1) == own)
    of_pair = (own >= 0) & (pair >= 0)
    of_pair = of_pair & (tl.load(row_marks + pair, mask=of_pair, other=-1) == own)
    if of_token | of_pair:
        offsets = tl.arange(0, COUNT)
        packed = tl.load(best + row * count + offsets, mask=offsets < count, other=NOTHING)
        rank = tl.arange(0, WIDTH)
        inside = rank < width
        ids = tl.zeros([WIDTH], tl.int32)
        for i in range(width):
            top = tl.max(packed, axis=0)
            ids = tl.where(rank == i, ((top & ID) ^ ID).to(tl.int32), ids)
            packed = tl.where(packed == top, NOTHING, packed)
        weight = tl.load(logits + row * logits_row + ids, mask=inside, other=float("-inf")).to(tl.float32)
        weight = tl.exp(weight - tl.max(weight, 0))
        part = weight / tl.sum(weight, 0)
        bound = tl.arange(0, SHARES)
        bounds = tl.load(shares + bound, mask=bound < num_shares, other=float("inf"))
        entry = 1 + tl.sum((part[:, None] > bounds[None, :]).to(tl.int32), 1)
        own_row, pair_row = rank < tl.where(of_token, width, 0), rank < tl.where(of_pair, width, 0)
        tl.store(successors + token * width + rank, ids, mask=own_row)
        tl.store(classes + token * width + rank, entry, mask=own_row)
        tl.store(successors + pair * width + rank, ids, mask=pair_row)
        tl.store(classes + pair * width + rank, entry + num_shares + 1, mask=pair_row)
        tl.store(pair_keys + pair - vocab, tl.load(marked_pair_keys + row), mask=of_pair)
    length = tl.arange(0, CONTEXT)
    place = tl.load(marked_texts + row * CONTEXT + length).to(tl.int64)
    newest = tl.load(text_marks + place, mask=place >= 0, other=-1) & PLACES
    mine = (place >= 0) & (newest == row * CONTEXT + length)
    tl.store(text_keys + place, tl.load(marked_text_keys + row * CONTEXT + length), mask=mine)
    tl.store(text_successors + place, tl.load(marked_next + row), mask=mine)
    if row == 0:
        group = tl.arange(0, GROUPS)
        inside_groups = group < num_groups
        now = tl.load(tried + group, mask=inside_groups, other=0).to(tl.int64)
        right = tl.load(hit + group, mask=inside_groups, other=0).to(tl.int64)
        fading = tl.minimum(now, LASTING)
        total = tl.load(trials + group, mask=inside_groups, other=1)
        good = tl.load(hits + group, mask=inside_groups, other=0)
        total += now * UNIT - total * fading // LASTING
        good += right * UNIT - good * fading // LASTING
        tl.store(trials + group, total, mask=inside_groups)
        tl.store(hits + group, good, mask=inside_groups)
        chance = good.to(tl.float32) / tl.maximum(total, 1).to(tl.float32)
        tl.store(estimates + group, chance, mask=inside_groups)
        tl.store(tried + group, tl.zeros([GROUPS], tl.int32), mask=inside_groups)
        tl.store(hit + group, tl.zeros([GROUPS], tl.int32), mask=inside_groups)


@triton.jit(do_not_specialize=["number"])
def _prompts(
    successors,
    classes,
    text_keys,
    text_successors,
    row_marks,
    text_marks,
    text,
    text_stride,
    slots,
    lengths,
    vocab,
    texts,
    width,
    number,
    WRITE: tl.constexpr,
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    length = tl.load(lengths + slot)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) * BLOCK >= length:
        return
    text += slot * text_stride
    there = (place > 0) & (place < length)
    successor = tl.load(text + place, mask=there, other=-1)
    token = tl.load(text + place - 1, mask=there, other=-1).to(tl.int64)
    there = there & (token >= 0) & (token < vocab) & (successor >= 0) & (successor < vocab)
    own = number + (request << PLACE_BITS) + place.to(tl.int64) * 8
    if WRITE:
        first = there & (tl.load(row_marks + token, mask=there, other=-1) == own)
        first = first & (tl.load(successors + token * width, mask=first, other=0) < 0)
        tl.store(successors + token * width, successor, mask=first)
        tl.store(classes + token * width, tl.zeros([BLOCK], tl.int32), mask=first)
    else:
        tl.atomic_max(row_marks + token, own, mask=there)
    hashed = with_token(tl.zeros_like(token), token)
    for back in tl.static_range(1, LONGEST):
        known = there & (place > back)
        hashed = with_token(hashed, tl.load(text + place - 1 - back, mask=known, other=0).to(tl.int64))
        where, key = text_place(hashed, back + 1, texts)
        if WRITE:
            mine = known & (tl.load(text_marks + where, mask=known, other=-1) == own + back)
            tl.store(text_keys + where, key, mask=mine)
            tl.store(text_successors + where, successor, mask=mine)
        else:
            tl.atomic_max(text_marks + where, own + back, mask=known)
