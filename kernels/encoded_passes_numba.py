# SPDX-License-Identifier: Apache-2.0
"""The two passes of `encoded_attention` on the CPU; `encoded_attention_numba` says what they do and calls them."""

from typing import Any

import numba
import numpy as np

from vllm_ext.kernels.attention_parts_numba import matrix_product, online_softmax, round_up
from vllm_ext.kernels.block_forms_numba import add_counts
from vllm_ext.kernels.numba_vectors import (
    LANES,
    fetch_add_one,
    load_vector,
    pointer_to,
    splat,
    store_vector,
    sum_of_lanes,
    vector_add,
    vector_min,
    vector_multiply,
)
from vllm_ext.kernels.retrieval_numba import retrieve

RETRIEVED = -2  # of `Reading.list_of_row`
CHUNK = 256  # tokens between two steps of the online softmax, rounded up to whole blocks


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def write(pointer: Any, dtype: Any, form: Any) -> None:
    """The first pass, over arguments of `encoded_attention_numba`.

    ``dtype`` as in `tree_attention_numba`, ``form`` as in `block_forms_numba`.
    """
    args = numba.carray(pointer, 1)[0]
    head_size, block_size, heads = args.head_size, args.block_size, args.num_kv_heads
    requests = args.num_requests
    numbers = (args.number_0, args.number_1, args.number_2, args.number_3)
    table = numba.carray(pointer_to(args.block_table, np.int32), requests * args.max_blocks)
    first_row = numba.carray(pointer_to(args.first_row, np.int32), requests)
    num_rows = numba.carray(pointer_to(args.num_rows, np.int32), requests)
    num_settled = numba.carray(pointer_to(args.num_settled, np.int32), requests)
    context_len = numba.carray(pointer_to(args.context_len, np.int32), requests)
    first_tile = numba.carray(pointer_to(args.first_tile, np.int64), requests)
    # Read and written at offsets the arguments give: the length is nominal.
    key = numba.carray(pointer_to(args.key, dtype), 1)
    value = numba.carray(pointer_to(args.value, dtype), 1)
    query = numba.carray(pointer_to(args.query, dtype), 1)
    record = args.raw_vectors * head_size
    pages = numba.carray(pointer_to(args.pages, np.uint8), 1)
    halves = numba.carray(pointer_to(args.pages, np.int16), 1)
    tail = numba.carray(pointer_to(args.pages, dtype), 1)
    tiles = numba.carray(pointer_to(args.tiles, np.float32), 1)
    width = args.tile_width
    tile_size = 2 * width * head_size
    line = np.empty(head_size, np.float32)
    side = np.empty(head_size * block_size, np.float32)

    mine = fetch_add_one(pointer)
    for task in range(requests * heads):
        if task != mine:
            continue
        mine = fetch_add_one(pointer)
        request, head = task // heads, task % heads
        context, rows = np.int64(context_len[request]), np.int64(num_rows[request])
        settled, end = context + np.int64(num_settled[request]), context + rows
        drafts = settled < end
        block = context // block_size
        keys: Any = (first_tile[request] * heads + head) * tile_size
        while block * block_size < end:
            low = block * block_size
            high = end if drafts else min(end, low + block_size)
            values = keys + width * head_size
            for position in range(low, high):
                place = position - low
                if position < context:
                    page = np.int64(table[request * args.max_blocks + block + 1 + place // args.tail_tokens])
                    at = page * args.page_block_stride + head * args.page_head_stride
                    at = at // args.element_size + place % args.tail_tokens * record
                    for d in range(0, head_size, LANES):
                        store_vector(line, d, load_vector(tail, at + d))
                        store_vector(
                            tiles, values + place * head_size + d, load_vector(tail, at + head_size + d)
                        )
                else:
                    row = first_row[request] + position - context
                    at = row * args.key_token_stride + head * args.key_head_stride
                    of_value = row * args.value_token_stride + head * args.value_head_stride
                    for d in range(0, head_size, LANES):
                        store_vector(line, d, load_vector(key, at + d))
                        store_vector(tiles, values + place * head_size + d, load_vector(value, of_value + d))
                for d in range(head_size):
                    tiles[keys + d * width + place] = line[d]
            if settled >= low + block_size:
                page = np.int64(table[request * args.max_blocks + block])
                at = page * args.page_block_stride + head * args.page_head_stride
                form.encode_block(
                    *(pages, halves, at, side, tiles, keys, width, values),
                    *(head_size, block_size, numbers),
                )
            else:
                for position in range(max(context, low), high):
                    place = position - low
                    page = np.int64(table[request * args.max_blocks + block + 1 + place // args.tail_tokens])
                    at = page * args.page_block_stride + head * args.page_head_stride
                    at = at // args.element_size + place % args.tail_tokens * record
                    row = first_row[request] + position - context
                    of_key = row * args.key_token_stride + head * args.key_head_stride
                    of_value = row * args.value_token_stride + head * args.value_head_stride
                    for d in range(head_size):
                        tail[at + d] = key[of_key + d]
                        tail[at + head_size + d] = value[of_value + d]
                    if args.raw_vectors > 2:
                        of_query = row * args.query_token_stride + head * args.group * args.query_head_stride
                        mean_query(
                            tail,
                            at + 2 * head_size,
                            query,
                            of_query,
                            args.query_head_stride,
                            args.group,
                            head_size,
                        )
            if drafts:
                break
            block += 1
            keys += heads * tile_size


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def mean_query(to: Any, at: int, query: Any, start: int, stride: int, group: int, head_size: int) -> None:
    """``to[at:]`` becomes the mean of ``group`` queries, rounded as its elements are."""
    share = splat(np.float32(1.0) / np.float32(group))
    for d in range(0, head_size, LANES):
        total = splat(np.float32(0.0))
        for g in range(group):
            total = vector_add(total, load_vector(query, start + g * stride + d))
        store_vector(to, at + d, vector_multiply(total, share))


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def in_order(order: Any, block: int, window: int, sinks: int, span_blocks: int) -> int:
    """``order`` begins with what `BlockFormat.blocks_read` says a row of ``block`` reads; returns how many."""
    dense: Any = max(block - window, 0)
    num: Any = min(sinks, dense)
    for i in range(num):
        order[i] = i
    if span_blocks:
        spans = (dense - num) // span_blocks
        dense = num
        for _ in range(spans):
            order[num] = dense
            num += 1
            dense += span_blocks
    for i in range(dense, block):
        order[num] = i
        num += 1
    return int(num)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def attend(pointer: Any, dtype: Any, form: Any) -> None:
    """The second pass."""
    args = numba.carray(pointer, 1)[0]
    head_size, block_size, group, heads = args.head_size, args.block_size, args.group, args.num_kv_heads
    requests = args.num_requests
    numbers = (args.number_0, args.number_1, args.number_2, args.number_3)
    table = numba.carray(pointer_to(args.block_table, np.int32), requests * args.max_blocks)
    first_row = numba.carray(pointer_to(args.first_row, np.int32), requests)
    num_rows = numba.carray(pointer_to(args.num_rows, np.int32), requests)
    num_settled = numba.carray(pointer_to(args.num_settled, np.int32), requests)
    context_len = numba.carray(pointer_to(args.context_len, np.int32), requests)
    first_tile = numba.carray(pointer_to(args.first_tile, np.int64), requests)
    query = numba.carray(pointer_to(args.query, dtype), 1)
    output = numba.carray(pointer_to(args.output, dtype), 1)
    tail = numba.carray(pointer_to(args.pages, dtype), 1)
    pages = numba.carray(pointer_to(args.pages, np.uint8), 1)
    halves = numba.carray(pointer_to(args.pages, np.int16), 1)
    floats = numba.carray(pointer_to(args.pages, np.float32), 1)
    tiles = numba.carray(pointer_to(args.tiles, np.float32), 1)
    tile_width = args.tile_width
    tile_size = 2 * tile_width * head_size

    most: Any = 0
    all_rows: Any = 0
    for i in range(requests):
        most = max(most, np.int64(num_rows[i]))
        all_rows += np.int64(num_rows[i])
    parents = numba.carray(pointer_to(args.parents, np.int32), all_rows)
    reads = args.reads > 0
    lists = numba.carray(pointer_to(args.lists, np.int32), 1)
    lengths = numba.carray(pointer_to(args.lengths, np.int32), 1)
    list_of_row = numba.carray(pointer_to(args.list_of_row, np.int32), all_rows)
    watched = numba.carray(pointer_to(args.watched, np.int32), all_rows)
    mass = numba.carray(pointer_to(args.mass, np.float32), 1)
    padded = round_up(max(min(args.wide_rows, most * group), group), 2)
    chunk: Any = max(1, CHUNK // block_size) * block_size
    # LANES more: rows a power of two apart would share cache sets.
    stride = max(chunk, tile_width) + LANES
    line = head_size + LANES  # the last LANES are the sum of the weights
    q = np.zeros(padded * head_size, np.float32)
    scores = np.zeros(padded * stride, np.float32)
    best = np.empty(padded * LANES, np.float32)
    total = np.empty(padded * line, np.float32)
    hide = np.empty((padded // group + 2) * tile_width, np.float32)
    decoded = np.empty(block_size * head_size, np.float32)
    side = np.empty(head_size * block_size, np.float32)
    order = np.empty(args.max_blocks, np.int64)  # of the blocks that a task reads
    starts = np.empty(args.max_blocks, np.int64)
    # Of a row that retrieves, the last queries of its block.
    recent = np.empty(max(numbers[0], 1) * head_size, np.float32)
    rounded = np.empty(head_size, dtype)
    # Of each of a task's rows that are watched: a block's weight, and what its exponents were relative to.
    shares = np.empty(padded * args.mass_stride, np.float32)
    tops = np.empty(padded * args.mass_stride, np.float32)

    mine = fetch_add_one(pointer)
    task = 0
    start = np.int64(0)  # of the request in parents
    for request in range(requests):
        rows, context = np.int64(num_rows[request]), np.int64(context_len[request])
        drafts = np.int64(num_settled[request]) < rows
        first_block = context // block_size
        for head in range(heads):
            block = first_block
            row_end: Any = np.int64(0)
            while row_end < rows:
                low = block * block_size
                row_begin = row_end
                row_end = rows if drafts else min(rows, low + block_size - context)
                row_low = 0 if drafts else max(low - context, 0)  # the first of the block
                which = np.int64(-1)
                if reads:  # rows with one list
                    which = np.int64(list_of_row[start + row_begin])
                    last = row_begin + 1
                    while last < row_end and list_of_row[start + last] == which:
                        last += 1
                    row_end = last
                width = group if which == RETRIEVED else args.wide_rows  # one row
                for begin in range(row_begin * group, row_end * group, width):
                    task += 1
                    if task - 1 != mine:
                        continue
                    mine = fetch_add_one(pointer)
                    count = min(width, row_end * group - begin)
                    even = round_up(count, 2)
                    lowest, highest = begin // group, (begin + count - 1) // group
                    scale = splat(np.float32(args.scale))
                    for m in range(count):
                        r, g = (begin + m) // group, (begin + m) % group
                        at = (first_row[request] + r) * args.query_token_stride
                        at += (head * group + g) * args.query_head_stride
                        for d in range(0, head_size, LANES):
                            store_vector(
                                q, m * head_size + d, vector_multiply(load_vector(query, at + d), scale)
                            )
                    best[: count * LANES] = np.float32(-np.inf)
                    total[: even * line] = np.float32(0.0)

                    num_read: Any = np.int64(0)
                    if which >= 0:
                        num_read = np.int64(lengths[which])
                        for i in range(num_read):
                            order[i] = lists[which * args.list_stride + i]
                    elif which == RETRIEVED:
                        # The row's own query, those of its ancestors, and those that lie in the block.
                        num: Any = np.int64(0)
                        r = np.int64(lowest)
                        while num < numbers[0] and r >= row_low:
                            at = (first_row[request] + r) * args.query_token_stride
                            at += head * group * args.query_head_stride
                            mean_query(rounded, 0, query, at, args.query_head_stride, group, head_size)
                            for d in range(0, head_size, LANES):
                                store_vector(recent, num * head_size + d, load_vector(rounded, d))
                            num += 1
                            r = np.int64(parents[start + r])
                        place = max(context, low) - low - 1
                        while num < numbers[0] and place >= 0:
                            page = np.int64(
                                table[request * args.max_blocks + block + 1 + place // args.tail_tokens]
                            )
                            at = page * args.page_block_stride + head * args.page_head_stride
                            at = (
                                at // args.element_size
                                + place % args.tail_tokens * args.raw_vectors * head_size
                            )
                            for d in range(0, head_size, LANES):
                                of_query = load_vector(tail, at + 2 * head_size + d)
                                store_vector(recent, num * head_size + d, of_query)
                            num += 1
                            place -= 1
                        for i in range(block):
                            page = np.int64(table[request * args.max_blocks + i])
                            starts[i] = page * args.page_block_stride + head * args.page_head_stride
                        num_read = retrieve(
                            *(order, recent, num, halves, starts, block, args.sink_blocks),
                            *(head_size, block_size, args.scale, numbers),
                        )
                    else:
                        num_read = in_order(
                            order, block, args.window_blocks, args.sink_blocks, args.span_blocks
                        )
                    watching = False
                    if args.mass_stride:
                        for r in range(lowest, highest + 1):
                            watching |= watched[start + r] >= 0
                    seen = num_read * block_size
                    for first in range(0, seen, chunk):
                        columns = min(chunk, seen - first)
                        for offset in range(0, columns, block_size):
                            index = order[(first + offset) // block_size]
                            page = np.int64(table[request * args.max_blocks + index])
                            at = page * args.page_block_stride + head * args.page_head_stride
                            form.decode_keys(
                                *(pages, halves, at, side, decoded, head_size, block_size, numbers)
                            )
                            matrix_product(
                                *(q, 0, head_size, decoded, 0, block_size, LANES, scores, offset, stride),
                                *(even, head_size, block_size, False),
                            )
                            add_counts(
                                *(form, pages, floats, at, scores, offset, stride, count),
                                *(head_size, block_size, numbers),
                            )
                        for m in range(count):
                            online_softmax(scores, m * stride, columns, best, m, total, m * line, head_size)
                            if watching:
                                for offset in range(0, columns, block_size):
                                    at = m * args.mass_stride + (first + offset) // block_size
                                    weight = splat(np.float32(0.0))
                                    for t in range(offset, offset + block_size, LANES):
                                        weight = vector_add(weight, load_vector(scores, m * stride + t))
                                    shares[at] = sum_of_lanes(weight)
                                    tops[at] = best[m * LANES]
                        for offset in range(0, columns, block_size):
                            index = order[(first + offset) // block_size]
                            page = np.int64(table[request * args.max_blocks + index])
                            at = page * args.page_block_stride + head * args.page_head_stride
                            form.decode_values(
                                *(pages, halves, at, side, decoded, head_size, block_size, numbers)
                            )
                            matrix_product(
                                *(scores, offset, stride, decoded, 0, head_size, LANES, total, 0, line),
                                *(even, block_size, head_size, True),
                            )

                    # The block that is read as it is: what lay in it, then its rows, of which each sees its ancestors.
                    lying = max(context, low) - low
                    columns = lying + highest + 1 - row_low
                    wide = round_up(columns, LANES)
                    for r in range(lowest, highest + 1):
                        at = (r - lowest) * tile_width
                        hide[at : at + lying] = np.float32(np.inf)
                        hide[at + lying : at + wide] = np.float32(-np.inf)
                        ancestor = np.int64(r)
                        while ancestor >= row_low:
                            hide[at + lying + ancestor - row_low] = np.float32(np.inf)
                            ancestor = np.int64(parents[start + ancestor])
                    keys = ((first_tile[request] + block - first_block) * heads + head) * tile_size
                    matrix_product(
                        *(q, 0, head_size, tiles, keys, tile_width, LANES, scores, 0, stride),
                        *(even, head_size, wide, False),
                    )
                    for m in range(count):
                        bound = ((begin + m) // group - lowest) * tile_width
                        for t in range(0, wide, LANES):
                            masked = vector_min(
                                load_vector(scores, m * stride + t), load_vector(hide, bound + t)
                            )
                            store_vector(scores, m * stride + t, masked)
                        online_softmax(scores, m * stride, wide, best, m, total, m * line, head_size)
                    matrix_product(
                        *(scores, 0, stride, tiles, keys + tile_width * head_size, head_size, LANES),
                        *(total, 0, line, even, columns, head_size, True),
                    )

                    for m in range(count):
                        r, g = (begin + m) // group, (begin + m) % group
                        at = (first_row[request] + r) * args.output_token_stride
                        at += (head * group + g) * args.output_head_stride
                        whole = np.float32(1.0) / sum_of_lanes(load_vector(total, m * line + head_size))
                        share = splat(whole)
                        if watching and watched[start + r] >= 0:
                            to = np.int64(watched[start + r]) * heads * group + head * group + g
                            for n in range(num_read):
                                kept = np.exp2(tops[m * args.mass_stride + n] - best[m * LANES])
                                mass[to * args.mass_stride + order[n]] = (
                                    shares[m * args.mass_stride + n] * kept * whole
                                )
                        for d in range(0, head_size, LANES):
                            store_vector(
                                output, at + d, vector_multiply(load_vector(total, m * line + d), share)
                            )
                if not drafts:
                    block = (context + row_end) // block_size
        start += rows
