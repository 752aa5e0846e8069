# SPDX-License-Identifier: Apache-2.0
"""The two passes of `encoded_attention` on the CPU; `encoded_attention_numba` says what they do and calls them."""

from typing import Any

import numba
import numpy as np

from vllm_ext.kernels.attention_parts_numba import matrix_product, online_softmax, round_up
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

CHUNK = 256  # tokens between two steps of the online softmax, rounded up to whole blocks


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def write(pointer: Any, dtype: Any, encode_block: Any) -> None:
    """The first pass, over arguments of `encoded_attention_numba`; ``dtype`` as in `tree_attention_numba`."""
    args = numba.carray(pointer, 1)[0]
    head_size, block_size, heads = args.head_size, args.block_size, args.num_kv_heads
    requests = args.num_requests
    table = numba.carray(pointer_to(args.block_table, np.int32), requests * args.max_blocks)
    first_row = numba.carray(pointer_to(args.first_row, np.int32), requests)
    num_rows = numba.carray(pointer_to(args.num_rows, np.int32), requests)
    num_settled = numba.carray(pointer_to(args.num_settled, np.int32), requests)
    context_len = numba.carray(pointer_to(args.context_len, np.int32), requests)
    first_tile = numba.carray(pointer_to(args.first_tile, np.int64), requests)
    # Read and written at offsets the arguments give: the length is nominal.
    key = numba.carray(pointer_to(args.key, dtype), 1)
    value = numba.carray(pointer_to(args.value, dtype), 1)
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
                    at = at // args.element_size + place % args.tail_tokens * 2 * head_size
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
                encode_block(
                    *(pages, halves, at, side, tiles, keys, width, values),
                    *(head_size, block_size, args.number_0, args.number_1),
                )
            else:
                for position in range(max(context, low), high):
                    place = position - low
                    page = np.int64(table[request * args.max_blocks + block + 1 + place // args.tail_tokens])
                    at = page * args.page_block_stride + head * args.page_head_stride
                    at = at // args.element_size + place % args.tail_tokens * 2 * head_size
                    row = first_row[request] + position - context
                    of_key = row * args.key_token_stride + head * args.key_head_stride
                    of_value = row * args.value_token_stride + head * args.value_head_stride
                    for d in range(head_size):
                        tail[at + d] = key[of_key + d]
                        tail[at + head_size + d] = value[of_value + d]
            if drafts:
                break
            block += 1
            keys += heads * tile_size


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def attend(pointer: Any, dtype: Any, decode_keys: Any, decode_values: Any) -> None:
    """The second pass."""
    args = numba.carray(pointer, 1)[0]
    head_size, block_size, group, heads = args.head_size, args.block_size, args.group, args.num_kv_heads
    requests = args.num_requests
    table = numba.carray(pointer_to(args.block_table, np.int32), requests * args.max_blocks)
    first_row = numba.carray(pointer_to(args.first_row, np.int32), requests)
    num_rows = numba.carray(pointer_to(args.num_rows, np.int32), requests)
    num_settled = numba.carray(pointer_to(args.num_settled, np.int32), requests)
    context_len = numba.carray(pointer_to(args.context_len, np.int32), requests)
    first_tile = numba.carray(pointer_to(args.first_tile, np.int64), requests)
    query = numba.carray(pointer_to(args.query, dtype), 1)
    output = numba.carray(pointer_to(args.output, dtype), 1)
    pages = numba.carray(pointer_to(args.pages, np.uint8), 1)
    halves = numba.carray(pointer_to(args.pages, np.int16), 1)
    tiles = numba.carray(pointer_to(args.tiles, np.float32), 1)
    tile_width = args.tile_width
    tile_size = 2 * tile_width * head_size

    most: Any = 0
    all_rows: Any = 0
    for i in range(requests):
        most = max(most, np.int64(num_rows[i]))
        all_rows += np.int64(num_rows[i])
    parents = numba.carray(pointer_to(args.parents, np.int32), all_rows)
    padded = round_up(min(args.wide_rows, most * group), 2)
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
                for begin in range(row_begin * group, row_end * group, args.wide_rows):
                    task += 1
                    if task - 1 != mine:
                        continue
                    mine = fetch_add_one(pointer)
                    count = min(args.wide_rows, row_end * group - begin)
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

                    for first in range(0, low, chunk):
                        columns = min(chunk, low - first)
                        for offset in range(0, columns, block_size):
                            page = np.int64(table[request * args.max_blocks + (first + offset) // block_size])
                            at = page * args.page_block_stride + head * args.page_head_stride
                            decode_keys(
                                *(pages, halves, at, side, decoded),
                                *(head_size, block_size, args.number_0, args.number_1),
                            )
                            matrix_product(
                                *(q, 0, head_size, decoded, 0, block_size, LANES, scores, offset, stride),
                                *(even, head_size, block_size, False),
                            )
                        for m in range(count):
                            online_softmax(scores, m * stride, columns, best, m, total, m * line, head_size)
                        for offset in range(0, columns, block_size):
                            page = np.int64(table[request * args.max_blocks + (first + offset) // block_size])
                            at = page * args.page_block_stride + head * args.page_head_stride
                            decode_values(
                                *(pages, halves, at, side, decoded),
                                *(head_size, block_size, args.number_0, args.number_1),
                            )
                            matrix_product(
                                *(scores, offset, stride, decoded, 0, head_size, LANES, total, 0, line),
                                *(even, block_size, head_size, True),
                            )

                    # The block that is read as it is: what lay in it, then its rows, of which each sees its ancestors.
                    lying = max(context, low) - low
                    columns = lying + highest + 1 - row_begin
                    wide = round_up(columns, LANES)
                    for r in range(lowest, highest + 1):
                        at = (r - lowest) * tile_width
                        hide[at : at + lying] = np.float32(np.inf)
                        hide[at + lying : at + wide] = np.float32(-np.inf)
                        ancestor = np.int64(r)
                        while ancestor >= row_begin:
                            hide[at + lying + ancestor - row_begin] = np.float32(np.inf)
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
                        share = splat(
                            np.float32(1.0) / sum_of_lanes(load_vector(total, m * line + head_size))
                        )
                        for d in range(0, head_size, LANES):
                            store_vector(
                                output, at + d, vector_multiply(load_vector(total, m * line + d), share)
                            )
                block += 1
        start += rows
