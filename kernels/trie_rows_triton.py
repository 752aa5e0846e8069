# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""`trie_rows` on CUDA: a program for each request; then bits, some programs a row; then a program a block of logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.trie_rows import DeviceTries, SlotTries

EDGES = 256  # of a block
SHARES = 8  # programs of one row: a root may have a hundred thousand edges
BLOCK = 4096


def catch_up(
    tries: DeviceTries,
    of_slots: SlotTries,
    slots: torch.Tensor,
    text: torch.Tensor,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
) -> None:
    """See `vllm_ext.kernels.trie_rows.catch_up`."""
    if len(slots) == 0:
        return
    with torch.cuda.device_of(text):
        _catch_up[(len(slots),)](
            tries.first_edge,
            tries.tokens,
            tries.roots,
            of_slots.which,
            of_slots.state,
            of_slots.num_read,
            slots,
            text,
            text.stride(0),
            prompt_len,
            total_len,
        )


def mask_trie_rows(
    logits: torch.Tensor,
    tries: DeviceTries,
    of_slots: SlotTries,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    offsets: torch.Tensor,
    ancestor_bits: torch.Tensor | None,
) -> None:
    """See `vllm_ext.kernels.trie_rows.mask_trie_rows`."""
    rows, vocab = logits.shape
    if rows == 0:
        return
    masks = torch.zeros(rows, triton.cdiv(vocab, 32), dtype=torch.int32, device=logits.device)
    has_bits = ancestor_bits is not None
    bits = ancestor_bits if ancestor_bits is not None else masks
    with torch.cuda.device_of(logits):
        _set_bits[(rows, SHARES)](
            masks,
            masks.stride(0),
            tries.first_edge,
            tries.tokens,
            tries.final,
            of_slots.which,
            of_slots.end,
            of_slots.state,
            slots,
            tokens,
            offsets,
            bits,
            bits.stride(0),
            HAS_BITS=has_bits,
            EDGES=EDGES,
            SHARES=SHARES,
        )
        _forbid[(rows, triton.cdiv(vocab, BLOCK))](
            logits,
            logits.stride(0),
            masks,
            masks.stride(0),
            of_slots.which,
            slots,
            vocab,
            BLOCK=BLOCK,
        )


@triton.jit
def _behind(first_edge, edge_tokens, which, state, token):
    alive = state >= 0
    at = tl.where(alive, state, 0)
    low = tl.load(first_edge + at)
    last = tl.load(first_edge + at + 1)
    high = last
    while low < high:
        middle = low + (high - low) // 2
        less = tl.load(edge_tokens + middle) < token
        low = tl.where(less, middle + 1, low)
        high = tl.where(less, high, middle)
    found = tl.load(edge_tokens + low, mask=low < last, other=-1)
    return tl.where(alive & (low < last) & (found == token), low + 1 + which, -1)


@triton.jit
def _catch_up(
    first_edge,
    edge_tokens,
    roots,
    which_of,
    state_of,
    read_of,
    slots,
    text,
    text_row,
    prompt_len,
    total_len,
):
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    which = tl.load(which_of + slot)
    if which < 0:
        return
    read = tl.load(read_of + slot)
    start, end = tl.load(prompt_len + slot), tl.load(total_len + slot)
    state = tl.where(read > 0, tl.load(state_of + slot), tl.load(roots + which))
    for place in range(start + read, end):
        state = _behind(first_edge, edge_tokens, which, state, tl.load(text + slot * text_row + place))
    tl.store(state_of + slot, state)
    tl.store(read_of + slot, end - start)


@triton.jit
def _set_bits(
    masks,
    masks_row,
    first_edge,
    edge_tokens,
    final,
    which_of,
    end_of,
    state_of,
    slots,
    tokens,
    offsets,
    bits,
    bits_row,
    HAS_BITS: tl.constexpr,
    EDGES: tl.constexpr,
    SHARES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    which = tl.load(which_of + slot)
    if which < 0:
        return
    state = tl.load(state_of + slot)
    offset = tl.load(offsets + row)
    first = row - offset
    for other in range(1, offset + 1):
        above = 1
        if HAS_BITS:
            above = (tl.load(bits + row * bits_row + other // 32) >> (other % 32)) & 1
        token = tl.load(tokens + first + other).to(tl.int32)
        state = tl.where(above != 0, _behind(first_edge, edge_tokens, which, state, token), state)
    masks += row * masks_row
    alive = state >= 0
    at = tl.where(alive, state, 0)
    start = tl.load(first_edge + at)
    last = tl.where(alive, tl.load(first_edge + at + 1), start)
    for block in range(start + share * EDGES, last, EDGES * SHARES):
        edge = block + tl.arange(0, EDGES)
        token = tl.load(edge_tokens + edge, mask=edge < last, other=0)
        tl.atomic_or(masks + token // 32, 1 << (token % 32), mask=edge < last)
    ends = (state < 0) | (tl.load(final + at) != 0)
    if (share == 0) & ends:
        end = tl.load(end_of + slot)
        tl.atomic_or(masks + end // 32, 1 << (end % 32))


@triton.jit
def _forbid(logits, logits_row, masks, masks_row, which_of, slots, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(which_of + tl.load(slots + row).to(tl.int64)) < 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    word = tl.load(masks + row * masks_row + token // 32, mask=inside, other=0)
    forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * logits_row + token, float("-inf"), mask=inside & forbidden)
