# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""`recurrent_trees` on CUDA: one program for each request, head and block of values, whose part of the state it holds.

A row's ancestors are the bits of an integer, its parent's and its own. What the nodes have added is a tile beside the
state; of it a row reads its ancestors' lines, each by the product of its key with the row's query.
"""

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.recurrent_trees import MAX_ROWS

VALUES = 32  # of a program: with 128 keys 32 registers of each thread of four warps


def warps(rows: int) -> int:
    """How many hold a program's tiles without spilling."""
    return 4 if rows <= 32 else 8


def recurrent_trees_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    blocks: torch.Tensor,
    row_start: torch.Tensor,
    certain: torch.Tensor,
    parents: torch.Tensor,
    out: torch.Tensor,
    max_rows: int,
) -> None:
    """See `vllm_ext.kernels.recurrent_trees.recurrent_trees`, which validates all but the rows.

    Raises:
        ValueError: ``max_rows`` is above MAX_ROWS.
    """
    if max_rows > MAX_ROWS:
        raise ValueError(f"max_rows={max_rows}: backend='triton' takes {MAX_ROWS} at most; verify fewer")
    heads, width = v.shape[1:]
    keys = q.shape[2]
    if not len(blocks) or not len(q):
        return
    values, rows = min(VALUES, triton.next_power_of_2(width)), triton.next_power_of_2(max_rows)
    with torch.cuda.device_of(q):
        _verify[(len(blocks), heads, triton.cdiv(width, values))](
            q,
            k,
            v,
            decay,
            decay if beta is None else beta,
            state,
            blocks,
            row_start,
            certain,
            parents,
            out,
            heads // q.shape[1],
            width,
            keys,
            *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2]),
            *(decay.stride(0), 0 if beta is None else beta.stride(0), *state.stride()),
            DELTA=beta is not None,
            ROWS=rows,
            VALUES=values,
            KEYS=triton.next_power_of_2(keys),
            num_warps=warps(rows),
        )


@triton.jit
def _verify(
    q,
    k,
    v,
    decay,
    beta,
    state,
    blocks,
    row_start,
    certain,
    parents,
    out,
    per_group,
    width,
    keys,
    q_row,
    q_group,
    k_row,
    k_group,
    v_row,
    v_head,
    out_row,
    out_head,
    decay_row,
    beta_row,
    state_block,
    state_head,
    state_value,
    state_key,
    DELTA: tl.constexpr,
    ROWS: tl.constexpr,
    VALUES: tl.constexpr,
    KEYS: tl.constexpr,
):
    request, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = tl.load(blocks + request).to(tl.int64)
    start = tl.load(row_start + request).to(tl.int64)
    end = tl.load(row_start + request + 1).to(tl.int64)
    if (block == 0) | (start == end):
        return
    last = tl.load(certain + request) - 1  # the root's place
    root = start + last
    group = head // per_group
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    key = tl.arange(0, KEYS)
    of_value, of_key = value < width, key < keys
    q += group * q_group + key
    k += group * k_group + key
    v += head * v_head + value
    out += head * out_head + value
    decay += head
    beta += head
    places = (
        state
        + block * state_block
        + head * state_head
        + value.to(tl.int64)[:, None] * state_value
        + key.to(tl.int64)[None, :] * state_key
    )
    inside = of_value[:, None] & of_key[None, :]
    kept = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    for row in range(start, root + 1):
        own = tl.load(k + row * k_row, mask=of_key, other=0.0).to(tl.float32)
        w = tl.load(v + row * v_row, mask=of_value, other=0.0).to(tl.float32)
        kept = kept * tl.exp(tl.load(decay + row * decay_row))
        if DELTA:
            w = tl.load(beta + row * beta_row) * (w - tl.sum(kept * own[None, :], 1))
        kept += w[:, None] * own[None, :]
    tl.store(places, kept.to(state.dtype.element_ty), mask=inside)

    query = tl.load(q + root * q_row, mask=of_key, other=0.0).to(tl.float32)
    result = tl.sum(kept * query[None, :], 1)
    tl.store(out + root * out_row, result.to(out.dtype.element_ty), mask=of_value)
    rows = (end - root).to(tl.int32)
    node = tl.arange(0, ROWS)
    node_keys = tl.load(
        k + (root + node.to(tl.int64))[:, None] * k_row,
        mask=((node > 0) & (node < rows))[:, None] & of_key[None, :],
        other=0.0,
    ).to(tl.float32)
    added = tl.zeros([ROWS, VALUES], tl.float32)  # what each node has added, by its key
    reach = tl.zeros([ROWS], tl.float32)  # the sum of decays from the root on
    above = tl.zeros([ROWS], tl.int64)  # the nodes on each node's path, itself included
    for row in range(1, rows):
        at = root + row
        parent = tl.load(parents + at) - last
        fall = tl.sum(tl.where(node == parent, reach, 0.0), 0) + tl.load(decay + at * decay_row)
        path = tl.sum(tl.where(node == parent, above, 0), 0)
        w = tl.load(v + at * v_row, mask=of_value, other=0.0).to(tl.float32)
        if DELTA:
            own = tl.load(k + at * k_row, mask=of_key, other=0.0).to(tl.float32)
            shares = tl.sum(node_keys * own[None, :], 1)
            shares = tl.where(((path >> node) & 1) != 0, tl.exp(fall - reach) * shares, 0.0)
            known = tl.exp(fall) * tl.sum(kept * own[None, :], 1) + tl.sum(shares[:, None] * added, 0)
            w = tl.load(beta + at * beta_row) * (w - known)
        path = path | (tl.full([], 1, tl.int64) << row)
        reach = tl.where(node == row, fall, reach)
        above = tl.where(node == row, path, above)
        added = tl.where((node == row)[:, None], w[None, :], added)
        query = tl.load(q + at * q_row, mask=of_key, other=0.0).to(tl.float32)
        shares = tl.sum(node_keys * query[None, :], 1)
        shares = tl.where(((path >> node) & 1) != 0, tl.exp(fall - reach) * shares, 0.0)
        result = tl.exp(fall) * tl.sum(kept * query[None, :], 1) + tl.sum(shares[:, None] * added, 0)
        tl.store(out + at * out_row, result.to(out.dtype.element_ty), mask=of_value)
