# SPDX-License-Identifier: Apache-2.0
"""`drawn_rows` as it is defined, row by row, in float64: the readable form the others are tested against."""

from __future__ import annotations

import numpy as np
import torch

from vllm_ext.kernels.drawn_rows import BISECTIONS, CHOSEN, DOMAIN, RECURSIVE, DrawnTrees
from vllm_ext.kernels.sparse import Float64, Int32

_BITS = 0xFFFFFFFF


def choose_drawn_ref(
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
    chosen = torch.full((len(logits),), -1, dtype=torch.int64, device=logits.device)
    for request, slot in enumerate(slots.tolist()):
        start, end = row_start[request : request + 2].tolist()
        kind, seed = int(drawn.kind[slot]), int(seeds[slot])
        if kind == CHOSEN or start == end or positions[start] < prefill_len[slot]:
            continue
        child_of = drawn.child_of[slot, : end - start].tolist()
        q_row = drawn.q_row[slot, : end - start].tolist()
        for row, which in enumerate(q_row):
            children = [child for child in range(row + 1, len(child_of)) if child_of[child] == row]
            if which < 0 or not children:
                continue
            position = int(positions[start + row])
            chosen[start + row] = _choose(
                logits[start + row],
                kind,
                [int(tokens[start + child]) for child in children],
                [uniform(seed, position, index) for index in range(len(children))],
                drawn.ids[slot, which].cpu().numpy(),
                drawn.q[slot, which].cpu().numpy().astype(np.float64),
            )
    return chosen


def _choose(
    logits: torch.Tensor, kind: int, children: list[int], uniforms: list[float], ids: Int32, q: Float64
) -> int:
    """The accepted child of one row, or -1 with its logits changed."""
    before = logits.cpu().numpy().astype(np.float64)
    there = (ids >= 0) & (ids < len(before))
    top = max(before.max(), np.finfo(np.float64).min)
    weights = np.exp(before - top)
    inside = np.where(there, weights[np.where(there, ids, 0)], 0.0)
    weights[ids[there]] = 0.0
    total = weights.sum() + inside.sum()
    if total <= 0.0:
        return -1
    outside = weights.sum() / total
    law = recursive if kind == RECURSIVE else k_seq
    token, left, others = law(inside / total, outside, children, uniforms, ids, q)
    if token < 0 and left.sum() + others > 0.0:
        # What is not at ids keeps its logits: to these the others relate as before they do to `others`.
        scale = top + np.log(total) + (np.log(outside / others) if outside > 0.0 else 0.0)
        with np.errstate(divide="ignore"):
            after = (np.log(left) + scale)[there]
        logits[torch.from_numpy(ids[there]).to(logits.device).long()] = (
            torch.from_numpy(after).to(logits.dtype).to(logits.device)
        )
    return token


def recursive(
    left: Float64, others: float, children: list[int], uniforms: list[float], ids: Int32, q: Float64
) -> tuple[int, Float64, float]:
    """Recursive rejection sampling.

    Args:
        left: ``[support]`` the target's probabilities of ids.
        others: of all other tokens.
        children: tokens in the order drawn.
        uniforms: a number for each.
        ids: the distribution's tokens.
        q: their probabilities.

    Returns:
        The accepted token or -1; what is left at ids, and what at the others.
    """
    proposal = q.copy()
    for token, number in zip(children, uniforms, strict=True):
        at = ids == token
        if not at.any():
            continue
        if number * proposal[at].sum() < left[at].sum():
            return token, left, others
        above = np.maximum(left - proposal, 0.0)
        mass = above.sum() + others
        if mass > 0.0:  # else rounding left nothing, and the target is the draft
            left, others = above / mass, others / mass
        proposal[at] = 0.0
        remaining = proposal.sum()
        if remaining <= 0.0:
            break
        proposal /= remaining
    return -1, left, others


def k_seq(
    p: Float64, others: float, children: list[int], uniforms: list[float], ids: Int32, q: Float64
) -> tuple[int, Float64, float]:
    """SpecTr's k-SEQ; arguments and result as of `recursive`.

    A draft's token is accepted with chance ``beta``, one of them with ``sum((1 - beta) ** j for j < k)`` times that.
    rho is the smallest that takes no more than the target has: that sum must not be above it.
    """
    rho, high = 1.0, float(len(children))
    if _tries(p, q, rho, len(children)) > rho:
        for _ in range(BISECTIONS):
            middle = (rho + high) / 2
            if _tries(p, q, middle, len(children)) <= middle:
                high = middle
            else:
                rho = middle
        rho = high
    for token, number in zip(children, uniforms, strict=True):
        at = ids == token
        if at.any() and number * (rho * q[at].sum()) < p[at].sum():
            return token, p, others
    left = np.maximum(p - np.minimum(q, p / rho) * _tries(p, q, rho, len(children)), 0.0)
    return -1, left, others


def _tries(p: Float64, q: Float64, rho: float, k: int) -> float:
    """``sum((1 - beta) ** j for j < k)``: the drafts that are looked at, on average."""
    rejected = max(1.0 - float(np.minimum(q, p / rho).sum()), 0.0)
    tries = 1.0
    for _ in range(k - 1):
        tries = 1.0 + rejected * tries
    return tries


def uniform(seed: int, position: int, index: int) -> float:
    """A float32 from 0 to below 1: murmur3 of 32 bits over the four words, from `DOMAIN` on."""
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
