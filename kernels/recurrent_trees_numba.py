# SPDX-License-Identifier: Apache-2.0
"""`recurrent_trees` on the CPU.

A task is a request and some heads of a group, which share the products of its queries and keys. Of a head, BLOCK values
at a time, whose parts of the state do not meet: that part is read into a float32 scratch with the values side by
side, advanced row by row, written back, and multiplied by the tree's queries (and keys, in a delta net). Then, row by
row, what its ancestors have added since. Threads are torch's, as in `tree_attention_numba`.
"""

import ctypes
import functools
import math
from typing import Any

import numba
import numpy as np
import torch

from vllm_ext.kernels.attention_parts_numba import c_function, matrix_product, round_up, run_in_threads
from vllm_ext.kernels.numba_rows import (
    KINDS,
    load_strided,
    read_row,
    store_strided,
    transpose_tile,
    write_row,
)
from vllm_ext.kernels.numba_vectors import (
    LANES,
    fetch_add_one,
    load_vector,
    multiply_add,
    pointer_to,
    splat,
    store_vector,
    sum_of_lanes,
    vector_multiply,
)

BLOCK = 64  # values: with 128 keys 32 KiB, which stay in the first-level cache


class _Arguments(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "next_task",
            *("q", "q_row", "q_group", "k", "k_row", "k_group"),
            *("v", "v_row", "v_head", "out", "out_row", "out_head"),
            *("decay", "decay_row", "beta", "beta_row"),
            *("state", "state_block", "state_head", "state_v", "state_k"),
            *("blocks", "row_start", "certain", "parents"),
            *("requests", "heads", "per_group", "values", "keys"),
            *("share", "kind", "state_kind"),
        )
    ]


def recurrent_trees_numba(
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
    """See `vllm_ext.kernels.recurrent_trees.recurrent_trees`, which validates all but the sizes.

    Raises:
        ValueError: K or V is no multiple of LANES.
    """
    (_, heads, values), (_, groups, keys) = v.shape, q.shape
    if values % LANES or keys % LANES:
        raise ValueError(
            f"V={values}, K={keys}: backend='numba' takes multiples of {LANES}; use backend='torch'"
        )
    threads, per_group = torch.get_num_threads(), heads // groups
    arguments = _Arguments(
        0,
        *(q.data_ptr(), *q.stride()[:2], k.data_ptr(), *k.stride()[:2]),
        *(v.data_ptr(), *v.stride()[:2], out.data_ptr(), *out.stride()[:2]),
        *(decay.data_ptr(), decay.stride(0)),
        *((0, 0) if beta is None else (beta.data_ptr(), beta.stride(0))),
        *(state.data_ptr(), *state.stride()),
        *(each.data_ptr() for each in (blocks, row_start, certain, parents)),
        *(len(blocks), heads, per_group, values, keys),
        per_group if threads == 1 or len(blocks) * groups >= threads else 1,
        *(KINDS[q.dtype], KINDS[state.dtype]),
    )
    run_in_threads(_compiled(), arguments, threads)


@functools.cache
def _compiled() -> Any:
    """A C function of one pointer, compiled at the first call, not at import."""
    return c_function(_verify, _Arguments)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _dot(a: Any, i: int, b: Any, j: int, count: int) -> Any:
    total = splat(np.float32(0.0))
    for d in range(0, count, LANES):
        total = multiply_add(load_vector(a, i + d), load_vector(b, j + d), total)
    return sum_of_lanes(total)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _move_state(args: Any, at: int, part: Any, width: int, write: bool) -> None:
    """Read ``part``, float32 ``[K, BLOCK]``, from the state at ``at``, or write it there."""
    if args.state_kind == 0:
        _move_part(args, numba.carray(pointer_to(args.state, np.float32), 1), at, part, width, write)
    elif args.state_kind == 1:
        _move_part(args, numba.carray(pointer_to(args.state, np.uint16), 1), at, part, width, write)
    else:
        _move_part(args, numba.carray(pointer_to(args.state, np.int16), 1), at, part, width, write)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _move_part(args: Any, state: Any, at: int, part: Any, width: int, write: bool) -> None:
    of_value, of_key = args.state_v, args.state_k
    if of_value != 1 and of_key == 1:
        for value in range(0, width, LANES):
            for key in range(0, args.keys, LANES):
                place, own = at + value * of_value + key, key * BLOCK + value
                if write:
                    transpose_tile(part, own, BLOCK, state, place, of_value)
                else:
                    transpose_tile(state, place, of_value, part, own, BLOCK)
        return
    for key in range(args.keys):
        for value in range(0, width, LANES):
            place, own = at + key * of_key + value * of_value, key * BLOCK + value
            if of_value != 1:
                if write:
                    store_strided(state, place, of_value, load_vector(part, own))
                else:
                    store_vector(part, own, load_strided(state, place, of_value))
            elif write:
                store_vector(state, place, load_vector(part, own))
            else:
                store_vector(part, own, load_vector(state, place))


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _add_outer(part: Any, factor: Any, key: Any, at: int, value: Any, width: int, keys: int) -> None:
    """``part = factor * part + outer(key, value)``."""
    shrunk = splat(factor)
    for row in range(keys):
        one = splat(key[at + row])
        for d in range(0, width, LANES):
            kept = vector_multiply(load_vector(part, row * BLOCK + d), shrunk)
            store_vector(part, row * BLOCK + d, multiply_add(one, load_vector(value, d), kept))


def _verify(pointer: Any) -> None:
    """All tasks that no other thread takes; ``pointer`` is to `_Arguments`."""
    args = numba.carray(pointer, 1)[0]
    requests, heads, keys, kind = args.requests, args.heads, args.keys, args.kind
    delta = args.beta != 0
    blocks = numba.carray(pointer_to(args.blocks, np.int32), requests)
    row_start = numba.carray(pointer_to(args.row_start, np.int32), requests + 1)
    certain = numba.carray(pointer_to(args.certain, np.int32), requests)
    # Read at offsets that the arguments give: the length is nominal.
    parents = numba.carray(pointer_to(args.parents, np.int32), 1 << 60)
    decay = numba.carray(pointer_to(args.decay, np.float32), 1 << 60)
    beta = numba.carray(pointer_to(args.beta, np.float32), 1 << 60)

    most: Any = 1
    for i in range(requests):
        most = max(most, np.int64(row_start[i + 1] - row_start[i]))
    text_keys = np.zeros((most + 1) * keys, np.float32)  # of the certain rows
    sides = np.zeros((2 * most + 1) * keys, np.float32)  # the tree's queries, then its nodes' keys
    by_query, by_key = np.empty(most * most, np.float32), np.empty(most * most, np.float32)
    factors = np.empty(most, np.float32)
    part = np.empty(keys * BLOCK, np.float32)
    seen = np.empty((2 * most + 1) * BLOCK, np.float32)  # the state by each of the sides
    added = np.empty(most * BLOCK, np.float32)  # what each node has added, by its key
    value, row_out = np.empty(BLOCK, np.float32), np.empty(2 * BLOCK, np.float32)
    above, weights, solved = np.empty(most, np.int64), np.empty(most, np.float32), np.empty(most, np.float32)

    parts = heads // args.share
    while True:
        task = fetch_add_one(pointer)
        if task >= requests * parts:
            break
        request, head_from = task // parts, task % parts * args.share
        start, block = np.int64(row_start[request]), np.int64(blocks[request])
        count = np.int64(row_start[request + 1]) - start
        if block == 0 or count == 0:
            continue
        group = head_from // args.per_group
        last = np.int64(certain[request]) - 1  # the root's place
        root, rows = start + last, count - last
        for row in range(last + 1):
            at = (start + row) * args.k_row + group * args.k_group
            read_row(args.k, kind, at, 1, text_keys, row * keys, keys)
        for row in range(rows):
            at = (root + row) * args.q_row + group * args.q_group
            read_row(args.q, kind, at, 1, sides, row * keys, keys)
        for row in range(1, rows):
            at, own = (root + row) * args.k_row + group * args.k_group, (rows + row - 1) * keys
            read_row(args.k, kind, at, 1, sides, own, keys)
            node = np.int64(row)
            while node > 0:
                other = (rows + node - 1) * keys
                by_query[row * rows + node] = _dot(sides, row * keys, sides, other, keys)
                if delta:
                    by_key[row * rows + node] = _dot(sides, own, sides, other, keys)
                node = np.int64(parents[root + node]) - last

        for head in range(head_from, head_from + args.share):
            for row in range(rows):
                factors[row] = math.exp(decay[(root + row) * args.decay_row + head])
            for first in range(0, args.values, BLOCK):
                width = min(BLOCK, args.values - first)
                of_state = block * args.state_block + head * args.state_head + first * args.state_v
                of_v, of_out = head * args.v_head + first, head * args.out_head + first
                _move_state(args, of_state, part, width, False)
                for row in range(start, root + 1):
                    factor = np.float32(math.exp(decay[row * args.decay_row + head]))
                    at = (row - start) * keys
                    read_row(args.v, kind, row * args.v_row + of_v, 1, value, 0, width)
                    if delta:
                        matrix_product(
                            text_keys,
                            at,
                            keys,
                            part,
                            0,
                            BLOCK,
                            LANES,
                            row_out,
                            0,
                            BLOCK,
                            2,
                            keys,
                            width,
                            False,
                        )
                        strength, shrunk = splat(beta[row * args.beta_row + head]), splat(-factor)
                        for d in range(0, width, LANES):
                            missed = multiply_add(load_vector(row_out, d), shrunk, load_vector(value, d))
                            store_vector(value, d, vector_multiply(strength, missed))
                    _add_outer(part, factor, text_keys, at, value, width, keys)
                _move_state(args, of_state, part, width, True)

                wide = round_up(2 * rows - 1 if delta else rows, 2)
                matrix_product(
                    sides, 0, keys, part, 0, BLOCK, LANES, seen, 0, BLOCK, wide, keys, width, False
                )
                for row in range(rows):
                    node, nodes, kept = np.int64(row), 0, np.float32(1.0)
                    while node > 0:
                        above[nodes] = node
                        weights[nodes] = kept * by_query[row * rows + node]
                        if delta:
                            solved[nodes] = -kept * by_key[row * rows + node]
                        kept *= factors[node]
                        nodes += 1
                        node = np.int64(parents[root + node]) - last
                    if row > 0:
                        at = (root + row) * args.v_row + of_v
                        read_row(args.v, kind, at, 1, added, row * BLOCK, width)
                    for d in range(0, width, LANES):
                        if delta and row > 0:
                            strength = splat(beta[(root + row) * args.beta_row + head])
                            old = load_vector(seen, (rows + row - 1) * BLOCK + d)
                            missed = multiply_add(splat(-kept), old, load_vector(added, row * BLOCK + d))
                            for i in range(1, nodes):
                                other = load_vector(added, above[i] * BLOCK + d)
                                missed = multiply_add(splat(solved[i]), other, missed)
                            store_vector(added, row * BLOCK + d, vector_multiply(strength, missed))
                        total = vector_multiply(splat(kept), load_vector(seen, row * BLOCK + d))
                        for i in range(nodes):
                            other = load_vector(added, above[i] * BLOCK + d)
                            total = multiply_add(splat(weights[i]), other, total)
                        store_vector(row_out, d, total)
                    at = (root + row) * args.out_row + of_out
                    write_row(args.out, kind, at, 1, row_out, 0, width)
