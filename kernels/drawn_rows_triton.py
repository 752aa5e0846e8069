# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""`drawn_rows` on CUDA: one program for each row, which ends at once where no children were drawn.

A program takes the logits at the distribution's tokens out of the row, adds up the others twice, the maximum first,
and writes back those it took or what is left of them. So the mass of the others is no difference: it is 0 if and only
if all of them are.
"""

import torch
import triton
import triton.language as tl

from vllm_ext.kernels import drawn_rows
from vllm_ext.kernels.drawn_rows import DrawnTrees

BLOCK = 4096
WARPS = 8

_CHOSEN = tl.constexpr(drawn_rows.CHOSEN)
_RECURSIVE = tl.constexpr(drawn_rows.RECURSIVE)
_DOMAIN = tl.constexpr(drawn_rows.DOMAIN)
_BISECTIONS = tl.constexpr(drawn_rows.BISECTIONS)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)


def choose_drawn_triton(
    logits: torch.Tensor,
    row_start: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    prefill_len: torch.Tensor,
    drawn: DrawnTrees,
    seeds: torch.Tensor,
) -> torch.Tensor:
    """See `vllm_ext.kernels.drawn_rows.choose_drawn`."""
    rows, vocab = logits.shape
    chosen = torch.full((rows,), -1, dtype=torch.int64, device=logits.device)
    if rows == 0 or len(slots) == 0:
        return chosen
    tree_rows = drawn.child_of.shape[1]
    rows_of_q, support = drawn.ids.shape[1:]
    with torch.cuda.device_of(logits):
        _choose[(len(slots), tree_rows)](
            logits,
            logits.stride(0),
            row_start,
            slots,
            tokens,
            positions,
            prefill_len,
            *drawn,
            seeds,
            chosen,
            vocab,
            tree_rows,
            rows_of_q,
            support,
            ROWS=triton.next_power_of_2(tree_rows),
            SUPPORT=triton.next_power_of_2(support),
            BLOCK=min(BLOCK, triton.next_power_of_2(vocab)),
            num_warps=WARPS,
        )
    return chosen


@triton.jit
def _choose(
    logits,
    logits_row,
    row_start,
    slots,
    tokens,
    positions,
    prefill_len,
    kinds,
    child_of,
    q_row,
    ids,
    q,
    seeds,
    chosen,
    vocab,
    tree_rows,
    rows_of_q,
    support,
    ROWS: tl.constexpr,
    SUPPORT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    start = tl.load(row_start + request).to(tl.int64)
    rows = (tl.load(row_start + request + 1) - start).to(tl.int32)
    slot = tl.load(slots + request).to(tl.int64)
    kind = tl.load(kinds + slot)
    if (row >= rows) | (kind == _CHOSEN):
        return
    if tl.load(positions + start) < tl.load(prefill_len + slot):
        return
    which = tl.load(q_row + slot * tree_rows + row)
    child = tl.arange(0, ROWS)
    inside = (child > row) & (child < rows) & (child < tree_rows)
    is_child = tl.load(child_of + slot * tree_rows + child, mask=inside, other=-1) == row
    count = tl.sum(is_child.to(tl.int32), 0)
    if (which < 0) | (count == 0):
        return
    token_of = tl.load(tokens + start + child, mask=is_child, other=-1)
    seed = tl.load(seeds + slot)
    position = tl.load(positions + start + row)
    place = tl.arange(0, SUPPORT)
    at = (slot * rows_of_q + which) * support + place
    ident = tl.load(ids + at, mask=place < support, other=-1)
    proposal = tl.load(q + at, mask=place < support, other=0.0)

    # The target's probabilities of ids, and of all others together.
    logits += (start + row) * logits_row
    there = (ident >= 0) & (ident < vocab)
    before = tl.load(logits + ident, mask=there, other=float("-inf"))
    tl.debug_barrier()
    tl.store(logits + ident, float("-inf"), mask=there)
    tl.debug_barrier()
    token = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        logit = tl.load(logits + first + token, mask=first + token < vocab, other=float("-inf"))
        largest = tl.maximum(largest, logit)
    top = tl.maximum(tl.max(largest, 0), tl.max(before, 0))
    top = tl.where(top > float("-inf"), top, 0.0)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        logit = tl.load(logits + first + token, mask=first + token < vocab, other=float("-inf"))
        sums += tl.exp(logit - top)
    outside = tl.sum(sums, 0)
    left = tl.exp(before - top)
    total = outside + tl.sum(left, 0)
    total = tl.where(total > 0.0, total, 1.0)
    left /= total
    outside /= total

    if kind == _RECURSIVE:
        accepted, left, others = _recursive(
            left, outside, is_child, token_of, seed, position, ident, proposal, ROWS
        )
    else:
        accepted, left = _k_seq(left, count, is_child, token_of, seed, position, ident, proposal, ROWS)
        others = outside

    # What is not at ids keeps its logits: to these the others relate as before they do to `others`.
    scale = top + tl.log(total) + tl.where(others > 0.0, _log(outside) - _log(others), 0.0)
    after = tl.where(left > 0.0, _log(left) + scale, float("-inf"))
    stays = (accepted >= 0) | (tl.sum(left, 0) + others <= 0.0)
    tl.debug_barrier()
    tl.store(logits + ident, tl.where(stays, before, after), mask=there)
    tl.store(chosen + start + row, accepted.to(tl.int64))


@triton.jit
def _recursive(left, others, is_child, token_of, seed, position, ident, proposal, ROWS: tl.constexpr):
    """The accepted token or -1; what is left at ids and at others."""
    child = tl.arange(0, ROWS)
    accepted = tl.full([], -1, tl.int32)
    index = 0
    at = tl.min(tl.where(is_child, child, ROWS), 0)
    while at < ROWS:
        token = tl.sum(tl.where(child == at, token_of, 0), 0)
        here = (ident == token) & (ident >= 0)
        known = tl.sum(here.to(tl.int32), 0) > 0
        drafted = tl.sum(tl.where(here, proposal, 0.0), 0)
        wanted = tl.sum(tl.where(here, left, 0.0), 0)
        accepts = known & (_uniform(seed, position, index) * drafted < wanted)
        accepted = tl.where(accepts, token, accepted)
        rejects = known & (accepted < 0)
        above = tl.maximum(left - proposal, 0.0)
        mass = tl.sum(above, 0) + others
        # Without any, rounding left nothing, and the target is the draft.
        renewed = rejects & (mass > 0.0)
        divisor = tl.where(renewed, mass, 1.0)
        left = tl.where(renewed, above, left) / divisor
        others = others / divisor
        proposal = tl.where(here & rejects, 0.0, proposal)
        remaining = tl.sum(proposal, 0)
        proposal = proposal / tl.where(rejects & (remaining > 0.0), remaining, 1.0)
        ends = (accepted >= 0) | (rejects & (remaining <= 0.0))
        at = tl.where(ends, ROWS, tl.min(tl.where(is_child & (child > at), child, ROWS), 0))
        index += 1
    return accepted, left, others


@triton.jit
def _k_seq(p, count, is_child, token_of, seed, position, ident, proposal, ROWS: tl.constexpr):
    """The accepted token or -1; what is left at ids."""
    low = tl.full([], 1.0, tl.float32)
    high = tl.where(_tries(p, proposal, low, count) <= low, low, count.to(tl.float32))
    for _ in range(_BISECTIONS):
        middle = (low + high) * 0.5
        valid = _tries(p, proposal, middle, count) <= middle
        low = tl.where(valid, low, middle)
        high = tl.where(valid, middle, high)
    rho = high
    child = tl.arange(0, ROWS)
    accepted = tl.full([], -1, tl.int32)
    index = 0
    at = tl.min(tl.where(is_child, child, ROWS), 0)
    while at < ROWS:
        token = tl.sum(tl.where(child == at, token_of, 0), 0)
        here = (ident == token) & (ident >= 0)
        drafted = tl.sum(tl.where(here, proposal, 0.0), 0)
        wanted = tl.sum(tl.where(here, p, 0.0), 0)
        # Of a token that is not known there is none wanted.
        accepts = _uniform(seed, position, index) * (rho * drafted) < wanted
        accepted = tl.where(accepts, token, accepted)
        at = tl.where(accepts, ROWS, tl.min(tl.where(is_child & (child > at), child, ROWS), 0))
        index += 1
    left = tl.maximum(p - tl.minimum(proposal, p / rho) * _tries(p, proposal, rho, count), 0.0)
    return accepted, left


@triton.jit
def _tries(p, q, rho, count):
    """The drafts of k-SEQ that are looked at, on average: sum((1 - beta) ** j for j < count)."""
    rejected = tl.maximum(1.0 - tl.sum(tl.minimum(q, p / rho), 0), 0.0)
    tries = tl.full([], 1.0, tl.float32)
    for _ in range(1, count):
        tries = 1.0 + rejected * tries
    return tries


@triton.jit
def _log(value):
    """Of 0, any number."""
    return tl.log(tl.where(value > 0.0, value, 1.0))


@triton.jit
def _mix(state, key):
    key *= 0xCC9E2D51
    key = (key << 15) | (key >> 17)
    state ^= key * 0x1B873593
    state = (state << 13) | (state >> 19)
    return state * 5 + 0xE6546B64


@triton.jit
def _uniform(seed, position, index):
    """See `drawn_rows_ref.uniform`: the same number, bit for bit."""
    state = tl.zeros_like(seed).to(tl.uint32) ^ _DOMAIN
    state = _mix(state, (seed & 0xFFFFFFFF).to(tl.uint32))
    state = _mix(state, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    state = _mix(state, (position & 0xFFFFFFFF).to(tl.uint32))
    state = _mix(state, (tl.zeros_like(seed) + index).to(tl.uint32))
    state ^= 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    state ^= state >> 16
    # Both halves are exact, so it is rounded once.
    high, low = (state >> 16).to(tl.int32).to(tl.float32), (state & 0xFFFF).to(tl.int32).to(tl.float32)
    return tl.minimum(high * 2.0**-16 + low * 2.0**-32, _BELOW_ONE)
