# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""`tree_attention` and `attend_nodes` on CUDA: a program for each request, KV head, tile of rows and share of the keys.

A tile holds rows of (tree row, query head of the group), so that each key is read once for all of them. Which nodes a
row sees it reads from `TreeRows.ancestor_bits`, for keys behind the context alone. Where requests are few, their keys
are shared out among programs (Flash-Decoding, https://pytorch.org/blog/flash-decoding/): each leaves its part and the
logarithm of its weight, and a second launch adds the parts up. How many shares there are depends on what the host
knows, where a share begins on what the device knows, so both launches may be captured in a graph.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.ancestor_bits import MAX_ROWS, WORDS
from vllm_ext.kernels.tree_attention import MAX_HEAD_SIZE, PLAIN, Scoring, TreeRows

LEAST_ROWS = 16  # of a tile: the least tl.dot takes
WIDE_ROWS = 128  # of a tile that may be asked for: a group of 4 heads with up to 32 rows of a tree reads its keys once
LEAST_KEYS = 128  # of a share: below that, adding up costs more than is gained
MOST_SPLITS = 64
ADDED_ROWS = 4  # of a program that adds parts up: it reads one share after the other
PROGRAMS_PER_CORE = 2  # of a streaming multiprocessor; keys are shared out until there are so many
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Launch:
    """What a launch depends on, from shapes alone."""

    rows: int  # of a tile
    tiles: int  # of the largest tree there can be
    splits: int  # shares of a request's keys
    keys: int  # of one step of the loop
    warps: int


def plan(
    trees: TreeRows,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    wide: bool,
    cores: int,
    tile: int | None = None,
    most_seen: int = 0,
) -> Launch:
    """The launch for these trees. Tiles and steps are as large as registers hold, see `scripts/compile_kernels.py`.

    Args:
        trees: looked at for their shapes and ``max_rows``.
        num_heads: of the query.
        num_kv_heads: of the caches.
        head_size: of both.
        block_size: of the caches.
        wide: operands have 32 bits.
        cores: streaming multiprocessors of the device.
        tile: most rows of a tile, a power of two from LEAST_ROWS to WIDE_ROWS; None: 64, and fewer of large heads.
        most_seen: see `Scoring`.
    """
    requests, max_blocks = trees.block_table.shape
    packed = min(len(trees.parents), trees.max_rows) * (num_heads // num_kv_heads)
    size = 0 if head_size <= 64 else 1 if head_size <= 128 else 2
    most = ((32, 16, 16) if wide else (64, 64, 32))[size] if tile is None else tile
    rows = max(LEAST_ROWS, min(triton.next_power_of_2(packed), most))
    keys = (32, 32, 16)[size] if wide else (64, 64 if rows == LEAST_ROWS else 32, 32)[size]
    warps = 8 if wide or size == 2 or rows >= 64 else 4
    tiles = triton.cdiv(packed, rows)
    without = requests * num_kv_heads * tiles
    longest = max_blocks * block_size
    if most_seen:
        longest = min(longest, most_seen + trees.max_rows)
    longest = triton.cdiv(longest, LEAST_KEYS)
    splits = max(1, min(cores * PROGRAMS_PER_CORE // max(without, 1), longest, MOST_SPLITS))
    return Launch(rows, tiles, splits, keys, warps)


def tree_attention_triton(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    trees: TreeRows,
    scale: float,
    prepared: dict[str, Any],
    splits: int | None = None,
    tile: int | None = None,
    scoring: Scoring = PLAIN,
) -> None:
    """See `vllm_ext.kernels.tree_attention.tree_attention`, which validates all but the layout.

    Args:
        query: as there, and so are the next five.
        key_cache: see there.
        value_cache: see there.
        output: see there.
        trees: see there.
        scale: see there.
        prepared: kept from layer to layer, of one kind of scoring.
        splits: shares of each request's keys, MOST_SPLITS at most; None: as many as the device has use for.
        tile: see `plan`; looked at when ``prepared`` is empty.
        scoring: see there.

    Raises:
        ValueError: the caches have not four dimensions, a head is larger than MAX_HEAD_SIZE, or a request may have
            more than MAX_ROWS rows.
    """
    _check(key_cache, trees)
    launch, arguments, constants = _prepare(
        query, key_cache, value_cache, output, trees, prepared, tile, scoring
    )
    requests, num_kv_heads = len(trees.num_rows), key_cache.shape[1]
    if requests == 0 or len(trees.parents) == 0:
        return
    with torch.cuda.device_of(query):  # triton launches on the current device; no-op on the CPU
        if splits is None:
            splits = launch.splits
            parts, logs = (
                _room(query.device, constants["HEAD"], launch.rows) if splits > 1 else (query, query)
            )
        else:
            size = requests * num_kv_heads * launch.tiles * splits * launch.rows
            parts = torch.empty(size * constants["HEAD"], dtype=torch.float32, device=query.device)
            logs = torch.empty(size, dtype=torch.float32, device=query.device)
        _attend[(launch.tiles * splits, num_kv_heads, requests)](
            query,
            key_cache,
            value_cache,
            output,
            *arguments,
            scale * LOG2_E,
            *(query, query, 0, 0, 0),
            parts,
            logs,
            splits,
            *_of_layer(scoring, trees, query),
            SPLIT=splits > 1,
            CONTEXT=True,
            **constants,
        )
        if splits > 1:
            _add_up[(requests, num_kv_heads, launch.tiles * launch.rows // ADDED_ROWS)](
                output,
                parts,
                logs,
                trees.first_row,
                trees.num_rows,
                trees.num_past,
                output.stride(0),
                output.stride(1),
                query.shape[2],
                splits,
                GROUP=constants["GROUP"],
                HEAD=constants["HEAD"],
                ROWS=launch.rows,
                ADDED=ADDED_ROWS,
                SPLITS=MOST_SPLITS,
            )


def attend_nodes_triton(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    context_output: torch.Tensor,
    context_lse: torch.Tensor,
    output: torch.Tensor,
    trees: TreeRows,
    scale: float,
    prepared: dict[str, Any],
) -> None:
    """See `vllm_ext.kernels.attend_nodes.attend_nodes`, which validates all but the layout.

    Raises:
        ValueError: the caches have not four dimensions, a head is larger than MAX_HEAD_SIZE, or a request may have
            more than MAX_ROWS rows.
    """
    _check(key_cache, trees)
    launch, arguments, constants = _prepare(query, key_cache, value_cache, output, trees, prepared)
    requests = len(trees.num_rows)
    if requests == 0 or len(trees.parents) == 0:
        return
    with torch.cuda.device_of(query):
        _attend[(launch.tiles, key_cache.shape[1], requests)](
            query,
            key_cache,
            value_cache,
            output,
            *arguments,
            scale * LOG2_E,
            context_output,
            context_lse,
            context_output.stride(0),
            context_output.stride(1),
            context_lse.stride(0),
            *(query, query, 1),
            *_of_layer(PLAIN, trees, query),
            SPLIT=False,
            CONTEXT=False,
            **constants,
        )


def _of_layer(scoring: Scoring, trees: TreeRows, unused: torch.Tensor) -> tuple[Any, ...]:
    """The kernel's arguments of a layer's scoring."""
    depths = trees.depths if scoring.most_seen else unused
    sinks = unused if scoring.sinks is None else scoring.sinks
    return scoring.most_seen, scoring.soft_cap * LOG2_E, depths, sinks


def _check(key_cache: torch.Tensor, trees: TreeRows) -> None:
    if trees.max_rows > MAX_ROWS:
        raise ValueError(
            f"trees.max_rows={trees.max_rows}: backend='triton' takes {MAX_ROWS} rows of a request at most"
        )
    if key_cache.dim() != 4:
        raise ValueError(
            f"key_cache.shape={tuple(key_cache.shape)}: backend='triton' takes [num_blocks, num_kv_heads, block_size, "
            "head_size]; use backend='torch'"
        )
    if key_cache.shape[3] > MAX_HEAD_SIZE:
        raise ValueError(
            f"key_cache.shape={tuple(key_cache.shape)}: backend='triton' takes a head_size of {MAX_HEAD_SIZE} at most; "
            "use backend='torch'"
        )


def _prepare(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    trees: TreeRows,
    prepared: dict[str, Any],
    tile: int | None = None,
    scoring: Scoring = PLAIN,
) -> tuple[Launch, tuple[Any, ...], dict[str, Any]]:
    """The launch, and of the kernel's arguments those that all layers of this form share."""
    if not prepared:
        num_heads, head_size = query.shape[1:]
        num_kv_heads, block_size = key_cache.shape[1:3]
        wide = query.dtype == torch.float32
        cores = _cores(query.device)
        launch = plan(
            trees, num_heads, num_kv_heads, head_size, block_size, wide, cores, tile, scoring.most_seen
        )
        prepared["launch"] = launch
        prepared["arguments"] = (
            trees.block_table,
            trees.first_row,
            trees.num_rows,
            trees.num_past,
            trees.row_start,
            trees.context_len,
            trees.ancestor_bits,
            query.stride(0),
            query.stride(1),
            output.stride(0),
            output.stride(1),
            *key_cache.stride(),
            *value_cache.stride(),
            trees.block_table.stride(0),
            head_size,
        )
        prepared["constants"] = {
            "GROUP": num_heads // num_kv_heads,
            "HEAD": max(16, triton.next_power_of_2(head_size)),
            "ROWS": launch.rows,
            "KEYS": launch.keys,
            "LEAST": LEAST_KEYS,
            "WORDS": WORDS,
            "WINDOW": scoring.window > 0,
            "CHUNK": scoring.chunk > 0,
            "CAP": scoring.soft_cap > 0.0,
            "SINKS": scoring.sinks is not None,
            "BLOCK": block_size,  # a power of two is a shift for each key, and no division
            # Tensor cores take 16-bit operands as they are; the interpreter multiplies bfloat16's bits.
            "WIDE": wide or os.environ.get("TRITON_INTERPRET") == "1",
            "num_warps": launch.warps,
            "num_stages": 2,  # what fits the shared memory of consumer cards
        }
    return prepared["launch"], prepared["arguments"], prepared["constants"]


def _cores(device: torch.device) -> int:
    """Streaming multiprocessors; of the interpreter, which runs one program after the other, 0."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _room(device: torch.device, head: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For the parts of as many programs as keys are ever shared out to, and the logarithms of their weights.

    It stays where it is, as a captured graph wants it, and is every layer's: these come one after the other.
    """
    size = _cores(device) * PROGRAMS_PER_CORE * rows
    parts = torch.empty(size * head, dtype=torch.float32, device=device)
    return parts, torch.empty(size, dtype=torch.float32, device=device)


@triton.jit(do_not_specialize=["splits", "most_seen"])
def _attend(
    query,
    keys,
    values,
    output,
    block_table,
    first_row,
    num_rows,
    num_past,
    row_start,
    context_len,
    ancestors,
    query_row,
    query_head,
    output_row,
    output_head,
    key_block,
    key_head,
    key_token,
    key_dim,
    value_block,
    value_head,
    value_token,
    value_dim,
    table_row,
    head_size,
    scale,
    context_output,  # read unless CONTEXT
    context_lse,  # float32
    context_row,
    context_head,
    lse_head,
    parts,  # float32 [programs, ROWS, HEAD], written to if SPLIT
    logs,  # float32 [programs, ROWS]
    splits,
    most_seen,  # the window's tokens or a chunk's
    soft_cap,  # times LOG2_E, like the scores
    depths,  # int32 [rows], read if WINDOW or CHUNK
    sinks,  # float32 [heads], read if SINKS
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    CONTEXT: tl.constexpr,
):
    head, request = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    # Tiles that read the same keys run side by side, and find them in the second-level cache.
    tiles = tl.num_programs(0) // splits
    tile, split = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    rows, past = tl.load(num_rows + request), tl.load(num_past + request)
    wide = past * GROUP + tile * ROWS + tl.arange(0, ROWS)  # row r, head g of the group: r * GROUP + g
    if past * GROUP + tile * ROWS >= rows * GROUP:
        return
    context = tl.load(context_len + request)
    length = context + rows
    if CONTEXT:
        # No row sees what the root does not.
        seen_from = 0
        if WINDOW:
            seen_from = tl.maximum(context + 1 - most_seen, 0)
        if CHUNK:
            seen_from = context // most_seen * most_seen
        first = seen_from // KEYS * KEYS  # a multiple, so that steps end where shares do
        share = tl.cdiv(length - first, splits)
        if SPLIT:
            share = tl.maximum(tl.cdiv(share, KEYS) * KEYS, LEAST)
        begin = first + split * share
        end = tl.minimum(begin + share, length)
    else:
        begin = context
        end = length
    if SPLIT:
        program = ((request * tl.num_programs(1) + head) * tiles + tile) * splits + split
        logs += program * ROWS + tl.arange(0, ROWS)
        parts += program * ROWS * HEAD
        if begin >= end:
            tl.store(logs, tl.full([ROWS], float("-inf"), tl.float32))
            return
    row = wide // GROUP
    real = row < rows
    dims = tl.arange(0, HEAD)
    inside = dims < head_size
    whole = real[:, None] & inside[None, :]
    head_of = head * GROUP + wide % GROUP
    at = tl.load(first_row + request).to(tl.int64) + row - past
    flat = tl.load(row_start + request).to(tl.int64) + row
    q = tl.load(
        query + at[:, None] * query_row + head_of[:, None] * query_head + dims[None, :], mask=whole, other=0.0
    )
    bits_at = ancestors + flat * WORDS
    if CONTEXT:
        best = tl.full([ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, HEAD], tl.float32)
        if SINKS:
            own = real & (row + split == row)  # of one share
            best = tl.load(sinks + head_of, mask=own, other=float("-inf")) * 1.4426950408889634
            weight = tl.where(own, 1.0, 0.0)
        if WINDOW or CHUNK:
            place = context + tl.load(depths + flat, mask=real, other=0)  # in the text
            last = place - most_seen  # that is hidden
            if CHUNK:
                last = place // most_seen * most_seen - 1
    else:
        # Where there is no context, what came out of attention over it may be anything.
        known = tl.where(real, context, 0) > 0
        best = tl.load(context_lse + head_of * lse_head + flat, mask=known, other=float("-inf"))
        best = best * 1.4426950408889634
        weight = tl.where(known, 1.0, 0.0)
        total = tl.load(
            context_output + flat[:, None] * context_row + head_of[:, None] * context_head + dims[None, :],
            mask=known[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
    for start in range(begin, end, KEYS):
        token = start + tl.arange(0, KEYS)
        there = token < end
        if WINDOW or CHUNK:
            there = there & (token >= seen_from)  # blocks before it are gone, and hold anything
        block = tl.load(block_table + request * table_row + token // BLOCK, mask=there, other=0)
        block = block.to(tl.int64)
        offset = (token % BLOCK).to(tl.int64)
        k = tl.load(
            keys
            + (block * key_block + head * key_head + offset * key_token)[None, :]
            + dims[:, None].to(tl.int64) * key_dim,
            mask=there[None, :] & inside[:, None],
            other=0.0,
        )
        if WIDE:
            scores = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="ieee") * scale
        else:
            scores = tl.dot(q, k) * scale
        if CAP:
            # 1 - 2 / (1 + exp(2 x)): right at both ends.
            power = tl.exp2(tl.minimum(scores / soft_cap * (2.0 * 1.4426950408889634), 126.0))
            scores = soft_cap - 2.0 * soft_cap / (1.0 + power)
        if WINDOW or CHUNK:
            scores = tl.where(
                (token[None, :] > last[:, None]) | (token >= context)[None, :], scores, float("-inf")
            )
        if start + KEYS > context:
            node = tl.maximum(token - context, 0)
            word = tl.load(
                bits_at[:, None] + node[None, :] // 32,
                mask=real[:, None] & ((token >= context) & there)[None, :],
                other=0,
            )
            visible = (token < context)[None, :] | (((word >> (node % 32)[None, :]) & 1) != 0)
            if WINDOW or CHUNK:
                root = tl.load(row_start + request).to(tl.int64)
                at_depth = tl.load(depths + root + node, mask=(token >= context) & there, other=0)
                near = context + at_depth[None, :] > last[:, None]
                visible = visible & ((token < context)[None, :] | near)
            scores = tl.where(visible & there[None, :], scores, float("-inf"))
        top = tl.maximum(best, tl.max(scores, 1))
        # All keys so far may be hidden from a row: other branches.
        base = tl.where(top == float("-inf"), 0.0, top)
        keep = tl.exp2(best - base)
        part = tl.exp2(scores - base[:, None])
        v = tl.load(
            values
            + (block * value_block + head * value_head + offset * value_token)[:, None]
            + dims[None, :].to(tl.int64) * value_dim,
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        weight = weight * keep + tl.sum(part, 1)
        total = total * keep[:, None]
        if WIDE:
            total += tl.dot(part, v.to(tl.float32), input_precision="ieee")
        else:
            total += tl.dot(part.to(v.dtype), v)
        best = top
    result = total / tl.where(weight > 0.0, weight, 1.0)[:, None]
    if SPLIT:
        tl.store(logs, best + tl.log2(tl.where(weight > 0.0, weight, 1.0)))  # -inf where all was hidden
        tl.store(parts + tl.arange(0, ROWS)[:, None] * HEAD + dims[None, :], result)
    else:
        tl.store(
            output + at[:, None] * output_row + head_of[:, None] * output_head + dims[None, :],
            result.to(output.dtype.element_ty),
            mask=whole,
        )


@triton.jit(do_not_specialize=["splits"])
def _add_up(
    output,
    parts,
    logs,
    first_row,
    num_rows,
    num_past,
    output_row,
    output_head,
    head_size,
    splits,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    ADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin = tl.program_id(2) * ADDED  # among the rows of all tiles
    rows, past = tl.load(num_rows + request), tl.load(num_past + request)
    wide = past * GROUP + begin + tl.arange(0, ADDED)
    if past * GROUP + begin >= rows * GROUP:
        return
    tiles = tl.num_programs(2) * ADDED // ROWS
    first = ((request * tl.num_programs(1) + head) * tiles + begin // ROWS) * splits
    packed = begin % ROWS + tl.arange(0, ADDED)
    split = tl.arange(0, SPLITS)
    log = tl.load(
        logs + (first + split)[:, None] * ROWS + packed[None, :],
        mask=(split < splits)[:, None],
        other=float("-inf"),
    )
    real = wide // GROUP < rows
    best = tl.where(real, tl.max(log, 0), 0.0)  # a row sees itself at least
    weight = tl.sum(tl.exp2(log - best[None, :]), 0)
    dims = tl.arange(0, HEAD)
    total = tl.zeros([ADDED, HEAD], tl.float32)
    for i in range(splits):
        own = tl.load(logs + (first + i) * ROWS + packed)
        part = tl.load(
            parts + ((first + i) * ROWS + packed)[:, None] * HEAD + dims[None, :],
            mask=(own > float("-inf"))[:, None],
            other=0.0,
        )
        total += part * tl.exp2(own - best)[:, None]
    result = total / tl.where(real, weight, 1.0)[:, None]
    at = tl.load(first_row + request).to(tl.int64) + wide // GROUP - past
    head_of = head * GROUP + wide % GROUP
    tl.store(
        output + at[:, None] * output_row + head_of[:, None] * output_head + dims[None, :],
        result.to(output.dtype.element_ty),
        mask=real[:, None] & (dims < head_size)[None, :],
    )
