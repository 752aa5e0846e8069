# SPDX-License-Identifier: Apache-2.0
"""`tree_attention` on the CPU, over vLLM's "vec" and "amx" cache layouts.

A task is a request, a KV head and up to WIDE_ROWS rows of (tree row, query head of the group). It reads the
blocks once: scores by a register-tiled matrix product straight from the cached keys, which lie transposed or in
pairs; a mask over the tree's columns; an online softmax; a second product with the cached values. 16-bit values are
widened in registers on their way in. Both layouts give the same bits.

Threads are those of torch's OpenMP, entered through GOMP_parallel: numba's own would inherit the one core
that vLLM binds its main thread to, and would share the cores with OpenMP threads that spin between torch's
operators.
"""

import ctypes
import functools
from typing import Any

import numba
import numpy as np
import torch

from vllm_ext.kernels.attention_parts_numba import (
    LOG2_E,
    c_function,
    matrix_product,
    online_softmax,
    round_up,
    run_in_threads,
    soft_capped,
)
from vllm_ext.kernels.kv_layouts import sizes
from vllm_ext.kernels.numba_vectors import (
    LANES,
    fetch_add_one,
    load_vector,
    pointer_to,
    splat,
    store_vector,
    sum_of_lanes,
    vector_min,
    vector_multiply,
)
from vllm_ext.kernels.tree_attention import PLAIN, Scoring, TreeRows

LEAST = np.float32(-1e30)  # below any score, above that of a token that is hidden
STEP = 256  # tokens between two steps of the online softmax, rounded up to whole blocks
WIDE_ROWS = 96  # rows of a task: their scores of a step stay in the second-level cache
WIDE_ROWS_THREADED = 24  # smaller, so that one request's few KV heads keep several threads busy


class _Arguments(ctypes.Structure):
    """What `_attend` reads: a dozen arrays cost more to hand over than a short context to attend to."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "next_task",
            *("query", "query_token_stride", "query_head_stride"),
            *("keys", "key_block_stride", "key_head_stride", "key_row_stride", "key_lanes_stride"),
            *("values", "value_block_stride", "value_head_stride", "value_row_stride", "value_lanes_stride"),
            *("output", "output_token_stride", "output_head_stride"),
            *("group", "num_kv_heads", "head_size", "block_size"),
            *("block_table", "max_blocks", "first_row", "num_rows", "num_past", "context_len", "parents"),
            "num_requests",
            "wide_rows",
            *("window", "chunk", "sinks"),
        )
    ] + [("scale", ctypes.c_double), ("soft_cap", ctypes.c_double)]


def tree_attention_numba(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    trees: TreeRows,
    scale: float,
    prepared: dict[str, Any],
    scoring: Scoring = PLAIN,
) -> None:
    """See `vllm_ext.kernels.tree_attention.tree_attention`, which validates all but the layout.

    Args:
        query: and the others as there.
        prepared: empty, or from a call with the same trees and tensors of the same form.
        scoring: as there.

    Raises:
        ValueError: the caches' strides are not those of `vec_layout` or, in bfloat16, `amx_layout`, or ``head_size`` or
            the block size is no multiple of LANES.
    """
    if not prepared:
        threads = torch.get_num_threads()
        # At once: what is refused is refused again.
        prepared.update(
            arguments=_arguments(query, key_cache, value_cache, output, trees, threads),
            threads=threads,
            run=_compiled(query.dtype, key_cache.dim() == 6),
        )
    arguments, threads, run = prepared["arguments"], prepared["threads"], prepared["run"]
    arguments.next_task = 0
    arguments.query, arguments.output = query.data_ptr(), output.data_ptr()
    arguments.keys, arguments.values = key_cache.data_ptr(), value_cache.data_ptr()
    arguments.scale, arguments.soft_cap = scale * LOG2_E, scoring.soft_cap * LOG2_E
    arguments.window, arguments.chunk = scoring.window, scoring.chunk
    arguments.sinks = 0 if scoring.sinks is None else scoring.sinks.data_ptr()
    run_in_threads(run, arguments, threads)


def _arguments(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    trees: TreeRows,
    threads: int,
) -> _Arguments:
    """All but the addresses of the first four, the scale and the layer's scoring."""
    num_kv_heads, block_size, head_size = sizes(key_cache)
    key_strides, value_strides = key_cache.stride(), value_cache.stride()
    if key_cache.dim() == 6:
        right = (
            query.dtype == torch.bfloat16
            and key_strides[2:] == (LANES * head_size, 2, 2 * LANES, 1)
            and value_strides[2:] == (2 * LANES, 1, LANES * block_size, 2)
            and not (key_strides[0] | key_strides[1] | value_strides[0] | value_strides[1]) % 2
        )
        # In pairs: from one to the next, and from LANES columns to the next.
        key_places, value_places = (LANES, LANES * head_size // 2), (LANES, LANES * block_size // 2)
        per_unit = 2
    else:
        right = key_strides[2:] == (1, block_size) and value_strides[2:] == (head_size, 1)
        key_places, value_places = (block_size, LANES), (head_size, LANES)
        per_unit = 1
    if not right or block_size % LANES or head_size % LANES:
        raise ValueError(
            f"key_cache.stride()={key_strides}, value_cache.stride()={value_strides}, shape "
            f"{tuple(key_cache.shape)}: backend='numba' takes the views of vec_layout or, in bfloat16, of amx_layout, "
            f"with block and head sizes that are multiples of {LANES}; use backend='torch'"
        )
    query_strides, output_strides = query.stride(), output.stride()
    return _Arguments(
        query_token_stride=query_strides[0],
        query_head_stride=query_strides[1],
        key_block_stride=key_strides[0] // per_unit,
        key_head_stride=key_strides[1] // per_unit,
        key_row_stride=key_places[0],
        key_lanes_stride=key_places[1],
        value_block_stride=value_strides[0] // per_unit,
        value_head_stride=value_strides[1] // per_unit,
        value_row_stride=value_places[0],
        value_lanes_stride=value_places[1],
        output_token_stride=output_strides[0],
        output_head_stride=output_strides[1],
        group=query.shape[1] // num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        block_table=trees.block_table.data_ptr(),
        max_blocks=trees.block_table.stride(0),
        first_row=trees.first_row.data_ptr(),
        num_rows=trees.num_rows.data_ptr(),
        num_past=trees.num_past.data_ptr(),
        context_len=trees.context_len.data_ptr(),
        parents=trees.parents.data_ptr(),
        num_requests=trees.num_rows.shape[0],
        wide_rows=WIDE_ROWS_THREADED if threads > 1 else WIDE_ROWS,
    )


@functools.cache
def _compiled(dtype: torch.dtype, paired: bool) -> Any:
    """A C function of one pointer, compiled at the first call of each dtype and layout, not at import."""
    forms = {torch.float32: _attend_float32, torch.bfloat16: _attend_bfloat16, torch.float16: _attend_float16}
    return c_function(_attend_bfloat16_pairs if paired else forms[dtype], _Arguments)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _depth(parents: Any, start: int, row: int) -> int:
    """How many ancestors a row has."""
    depth, ancestor = 0, np.int64(parents[start + row])
    while ancestor >= 0:
        depth, ancestor = depth + 1, np.int64(parents[start + ancestor])
    return depth


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _attend(pointer: Any, dtype: Any, cache_dtype: Any) -> None:
    """All tasks that no other thread takes.

    ``pointer`` is to `_Arguments`. ``dtype`` stands for the four tensors': np.float32, or np.uint16 for
    bfloat16 and np.int16 for float16, which numba has no types for on the CPU. ``cache_dtype`` is the same, or
    np.uint32 for pairs of bfloat16.
    """
    args = numba.carray(pointer, 1)[0]
    head_size, block_size, group = args.head_size, args.block_size, args.group
    requests = args.num_requests
    block_table = numba.carray(pointer_to(args.block_table, np.int32), requests * args.max_blocks)
    first_row = numba.carray(pointer_to(args.first_row, np.int32), requests)
    num_rows = numba.carray(pointer_to(args.num_rows, np.int32), requests)
    num_past = numba.carray(pointer_to(args.num_past, np.int32), requests)
    context_len = numba.carray(pointer_to(args.context_len, np.int32), requests)
    # Read and written at offsets the arguments give: the length is nominal.
    query = numba.carray(pointer_to(args.query, dtype), 1)
    keys = numba.carray(pointer_to(args.keys, cache_dtype), 1)
    values = numba.carray(pointer_to(args.values, cache_dtype), 1)
    output = numba.carray(pointer_to(args.output, dtype), 1)

    most: Any = 0
    all_rows: Any = 0
    for i in range(requests):
        most = max(most, np.int64(num_rows[i]))
        all_rows += np.int64(num_rows[i])
    parents = numba.carray(pointer_to(args.parents, np.int32), all_rows)
    padded = round_up(min(args.wide_rows, most * group), 2)
    step: Any = max(1, STEP // block_size) * block_size
    # LANES more: rows a power of two apart would share cache sets, and masking runs over the end.
    stride = step + LANES
    line = head_size + LANES  # the last LANES are the sum of the weights
    q = np.zeros(padded * head_size, np.float32)
    scores = np.zeros(padded * stride, np.float32)
    best = np.empty(padded * LANES, np.float32)
    total = np.empty(padded * line, np.float32)
    hide_stride = most + 2 * LANES
    hide = np.empty((min(padded, most) + 1) * hide_stride, np.float32)
    window = args.window if args.window > 0 else np.int64(1) << 40
    chunk = args.chunk
    edges = np.empty(min(padded, most) + 1, np.int64)  # the first token that a tree row sees
    has_sinks, caps = args.sinks != 0, args.soft_cap > 0.0
    sinks = numba.carray(pointer_to(args.sinks, np.float32), args.num_kv_heads * group)
    cap = splat(np.float32(args.soft_cap))

    mine = fetch_add_one(pointer)
    task = 0
    start = np.int64(0)  # of the request in parents
    for request in range(requests):
        rows, context = np.int64(num_rows[request]), np.int64(context_len[request])
        past = np.int64(num_past[request])
        table = request * args.max_blocks
        for head in range(args.num_kv_heads):
            for begin in range(past * group, rows * group, args.wide_rows):
                task += 1
                if task - 1 != mine:
                    continue
                mine = fetch_add_one(pointer)
                count = min(args.wide_rows, rows * group - begin)
                even = round_up(count, 2)
                low, high = begin // group, (begin + count - 1) // group  # tree rows of this task

                scale = splat(np.float32(args.scale))
                for m in range(count):
                    r, g = (begin + m) // group, (begin + m) % group
                    at = (first_row[request] + r - past) * args.query_token_stride
                    at += (head * group + g) * args.query_head_stride
                    for d in range(0, head_size, LANES):
                        store_vector(q, m * head_size + d, vector_multiply(load_vector(query, at + d), scale))
                best[: count * LANES] = LEAST
                total[: even * line] = np.float32(0.0)
                if has_sinks:
                    for m in range(count):
                        sink = sinks[head * group + (begin + m) % group]
                        best[m * LANES : (m + 1) * LANES] = np.float32(sink * LOG2_E)
                        total[m * line + head_size] = np.float32(1.0)
                # What each tree row may see of the others, as an upper bound of the score.
                hide[: (high - low + 1) * hide_stride] = np.float32(-np.inf)
                for r in range(low, high + 1):
                    reach = window  # tokens that the row sees, itself included
                    if chunk > 0:
                        reach = (context + _depth(parents, start, r)) % chunk + 1
                    ancestor, seen = np.int64(r), 0
                    while ancestor >= 0:
                        if seen < reach:
                            hide[(r - low) * hide_stride + ancestor] = np.float32(np.inf)
                        ancestor, seen = np.int64(parents[start + ancestor]), seen + 1
                    edges[r - low] = context + seen - reach

                length: Any = context + high + 1  # later rows are nobody's ancestors here
                # No row sees what the root does not.
                seen_from: Any = max(context + 1 - window, 0)
                if chunk > 0:
                    seen_from = context // chunk * chunk
                for first in range(seen_from // block_size * block_size, length, step):
                    width = min(step, length - first)
                    for offset in range(0, width, block_size):
                        block = np.int64(block_table[table + (first + offset) // block_size])
                        matrix_product(
                            q,
                            0,
                            head_size,
                            keys,
                            block * args.key_block_stride + head * args.key_head_stride,
                            args.key_row_stride,
                            args.key_lanes_stride,
                            scores,
                            offset,
                            stride,
                            even,
                            head_size,
                            round_up(min(block_size, width - offset), LANES),
                            False,
                        )
                    tree: Any = max(
                        context - first, 0
                    )  # the tree's first column, if there is one in this step
                    width_used: Any = round_up(width, LANES)
                    for m in range(count):
                        if caps:
                            for t in range(m * stride, m * stride + width_used, LANES):
                                store_vector(scores, t, soft_capped(load_vector(scores, t), cap))
                        bound = ((begin + m) // group - low) * hide_stride + first - context
                        for t in range(tree, width_used, LANES):
                            at = m * stride + t
                            store_vector(
                                scores, at, vector_min(load_vector(scores, at), load_vector(hide, bound + t))
                            )
                        hidden = min(edges[(begin + m) // group - low] - first, tree, width_used)
                        for t in range(m * stride, m * stride + hidden):
                            scores[t] = np.float32(-np.inf)
                        online_softmax(scores, m * stride, width_used, best, m, total, m * line, head_size)
                    for offset in range(0, width, block_size):
                        block = np.int64(block_table[table + (first + offset) // block_size])
                        matrix_product(
                            scores,
                            offset,
                            stride,
                            values,
                            block * args.value_block_stride + head * args.value_head_stride,
                            args.value_row_stride,
                            args.value_lanes_stride,
                            total,
                            0,
                            line,
                            even,
                            min(block_size, width - offset),
                            head_size,
                            True,
                        )

                for m in range(count):
                    r, g = (begin + m) // group, (begin + m) % group
                    at = (first_row[request] + r - past) * args.output_token_stride
                    at += (head * group + g) * args.output_head_stride
                    share = splat(np.float32(1.0) / sum_of_lanes(load_vector(total, m * line + head_size)))
                    for d in range(0, head_size, LANES):
                        store_vector(output, at + d, vector_multiply(load_vector(total, m * line + d), share))
        start += rows


def _attend_float32(pointer: Any) -> None:
    _attend(pointer, np.float32, np.float32)


def _attend_bfloat16(pointer: Any) -> None:
    _attend(pointer, np.uint16, np.uint16)


def _attend_bfloat16_pairs(pointer: Any) -> None:
    _attend(pointer, np.uint16, np.uint32)


def _attend_float16(pointer: Any) -> None:
    _attend(pointer, np.int16, np.int16)
