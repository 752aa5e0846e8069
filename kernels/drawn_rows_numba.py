# SPDX-License-Identifier: Apache-2.0
"""`drawn_rows` on the CPU: the loops of `drawn_rows_ref`, in float64 but for the sum over the vocabulary.

That sum is of float32 exponentials, in vectors whose lanes are added up in float64 every few of them. As in the Triton
form the logits at the distribution's tokens are taken out of the row for it: the mass of the others is no difference.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numba
import numpy as np
import torch

from vllm_ext.kernels import backends
from vllm_ext.kernels.backends import as_arrays
from vllm_ext.kernels.drawn_rows import BISECTIONS, CHOSEN, DOMAIN, RECURSIVE, DrawnTrees
from vllm_ext.kernels.numba_vectors import (
    LANES,
    exp2_of_difference,
    largest_lane,
    load_vector,
    splat,
    sum_of_lanes,
    vector_add,
    vector_max,
    vector_multiply,
)

LOG2_E = 1.0 / math.log(2.0)
SUMMED = 64  # vectors that are added up in float32
_BITS = 0xFFFFFFFF


def choose_drawn_numba(
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
    chosen = torch.full((rows,), -1, dtype=torch.int64)
    if rows == 0:
        return chosen
    # One flat array over all rows: numba knows then that the elements of a row are adjacent.
    stride = logits.stride(0)
    flat = logits.as_strided(((rows - 1) * stride + vocab,), (1,)).numpy()
    _compiled()(
        flat,
        stride,
        vocab,
        row_start.numpy(),
        slots.numpy(),
        tokens.numpy(),
        positions.numpy(),
        prefill_len.numpy(),
        as_arrays(drawn),
        seeds.numpy(),
        chosen.numpy(),
    )
    return chosen


@functools.cache
def _compiled() -> Any:
    return backends.compile_cached(numba.njit, nogil=True)(_choose_drawn)


def _choose_drawn(
    flat: Any,
    stride: int,
    vocab: int,
    row_start: Any,
    slots: Any,
    tokens: Any,
    positions: Any,
    prefill_len: Any,
    drawn: Any,
    seeds: Any,
    chosen: Any,
) -> None:
    tree_rows, support = drawn.child_of.shape[1], drawn.ids.shape[2]
    children = np.empty(tree_rows, np.int32)
    before, left, proposal = np.empty(support, np.float32), np.empty(support), np.empty(support)
    for request in range(len(slots)):
        slot, start = slots[request], row_start[request]
        rows = row_start[request + 1] - start
        kind = drawn.kind[slot]
        if kind == CHOSEN or rows == 0 or positions[start] < prefill_len[slot]:
            continue
        rows = min(rows, tree_rows)
        for row in range(rows):
            which, count = drawn.q_row[slot, row], 0
            for child in range(row + 1, rows):
                if drawn.child_of[slot, child] == row:
                    children[count] = tokens[start + child]
                    count += 1
            if which < 0 or count == 0:
                continue
            logits = flat[(start + row) * stride : (start + row) * stride + vocab]
            ids = drawn.ids[slot, which]
            top, mass = _take_out(logits, ids, before)
            total = mass
            for i in range(support):
                left[i] = math.exp(np.float64(before[i]) - top)
                total += left[i]
                proposal[i] = drawn.q[slot, which, i]
            stays, scale = True, 0.0
            if total > 0.0:
                left /= total
                outside = mass / total
                of_row = children[:count]
                seed, position = seeds[slot], positions[start + row]
                if kind == RECURSIVE:
                    token, others = _recursive(left, outside, of_row, seed, position, ids, proposal)
                else:
                    token, others = _k_seq(left, outside, of_row, seed, position, ids, proposal)
                stays = token >= 0 or left.sum() + others <= 0.0
                # What is not at ids keeps its logits: to these the others relate as before they do to `others`.
                scale = top + math.log(total) + (math.log(outside / others) if others > 0.0 else 0.0)
                chosen[start + row] = token
            for i in range(support):
                if 0 <= ids[i] < vocab:
                    if stays:
                        logits[ids[i]] = before[i]
                    else:
                        logits[ids[i]] = math.log(left[i]) + scale if left[i] > 0.0 else -np.inf


@numba.njit  # type: ignore[untyped-decorator]
def _take_out(logits: Any, ids: Any, before: Any) -> tuple[float, float]:
    """Move the logits at ids to `before`; the row's largest logit, and the others' mass beside it."""
    vocab = len(logits)
    whole = vocab - vocab % LANES
    for i in range(len(ids)):
        before[i] = -np.inf
        if 0 <= ids[i] < vocab:
            before[i] = logits[ids[i]]
            logits[ids[i]] = -np.inf
    lanes = splat(np.float32(-np.inf))
    for at in range(0, whole, LANES):
        lanes = vector_max(lanes, load_vector(logits, at))
    top: Any = max(np.float64(largest_lane(lanes)), np.finfo(np.float32).min)
    for at in range(whole, vocab):
        top = max(top, np.float64(logits[at]))
    for i in range(len(ids)):
        top = max(top, np.float64(before[i]))
    mass = 0.0
    offset, scale, zero = splat(np.float32(-top)), splat(np.float32(LOG2_E)), splat(np.float32(0.0))
    for first in range(0, whole, SUMMED * LANES):
        sums = zero
        for at in range(first, min(first + SUMMED * LANES, whole), LANES):
            difference = vector_multiply(vector_add(load_vector(logits, at), offset), scale)
            sums = vector_add(sums, exp2_of_difference(difference, zero))
        mass += sum_of_lanes(sums)
    for at in range(whole, vocab):
        mass += math.exp(np.float64(logits[at]) - top)
    return top, mass


@numba.njit  # type: ignore[untyped-decorator]
def _place(ids: Any, token: int) -> int:
    """Where a token stands among ids; -1: nowhere."""
    for i in range(len(ids)):
        if ids[i] == token and token >= 0:
            return i
    return -1


@numba.njit  # type: ignore[untyped-decorator]
def _recursive(
    left: Any, others: float, children: Any, seed: int, position: int, ids: Any, proposal: Any
) -> tuple[int, float]:
    """The accepted token or -1, and what is left at others; `left` is then what is at ids."""
    for index in range(len(children)):
        at = _place(ids, children[index])
        if at < 0:
            continue
        if _uniform(seed, position, index) * proposal[at] < left[at]:
            return children[index], others
        mass = others
        for i in range(len(ids)):
            mass += max(left[i] - proposal[i], 0.0)
        if mass > 0.0:  # else rounding left nothing, and the target is the draft
            for i in range(len(ids)):
                left[i] = max(left[i] - proposal[i], 0.0) / mass
            others /= mass
        proposal[at] = 0.0
        remaining = proposal.sum()
        if remaining <= 0.0:
            break
        proposal /= remaining
    return -1, others


@numba.njit  # type: ignore[untyped-decorator]
def _k_seq(
    p: Any, others: float, children: Any, seed: int, position: int, ids: Any, q: Any
) -> tuple[int, float]:
    """The accepted token or -1, and what is left at others; `p` is then what is at ids."""
    count = len(children)
    rho, high = 1.0, float(count)
    if _tries(p, q, rho, count) > rho:
        for _ in range(BISECTIONS):
            middle = (rho + high) / 2
            if _tries(p, q, middle, count) <= middle:
                high = middle
            else:
                rho = middle
        rho = high
    for index in range(count):
        at = _place(ids, children[index])
        if at >= 0 and _uniform(seed, position, index) * (rho * q[at]) < p[at]:
            return children[index], others
    tries = _tries(p, q, rho, count)
    for i in range(len(ids)):
        p[i] = max(p[i] - min(q[i], p[i] / rho) * tries, 0.0)
    return -1, others


@numba.njit  # type: ignore[untyped-decorator]
def _tries(p: Any, q: Any, rho: float, k: int) -> float:
    """The drafts that are looked at, on average: ``sum((1 - beta) ** j for j < k)``."""
    accepted = 0.0
    for i in range(len(p)):
        accepted += min(q[i], p[i] / rho)
    rejected = max(1.0 - accepted, 0.0)
    tries = 1.0
    for _ in range(k - 1):
        tries = 1.0 + rejected * tries
    return tries


@numba.njit  # type: ignore[untyped-decorator]
def _uniform(seed: int, position: int, index: int) -> float:
    """See `drawn_rows_ref.uniform`: the same number, bit for bit, as int64 wrap."""
    state = DOMAIN
    for word in (seed, seed >> 32, position, index):
        key = (word & _BITS) * 0xCC9E2D51 & _BITS
        key = (key << 15 | key >> 17) & _BITS
        state ^= key * 0x1B873593 & _BITS
        state = (state << 13 | state >> 19) & _BITS
        state = (state * 5 + 0xE6546B64) & _BITS
    state ^= 16
    state = (state ^ state >> 16) * 0x85EBCA6B & _BITS
    state = (state ^ state >> 13) * 0xC2B2AE35 & _BITS
    state ^= state >> 16
    return min(float(np.float32(state / 2**32)), 1.0 - 2.0**-24)
