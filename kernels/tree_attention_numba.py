# SPDX-License-Identifier: Apache-2.0
"""`tree_attention` on the CPU, over vLLM's "vec" cache layout.

Per request and KV head the keys and values are read once, block by block, for all rows and all query heads of
the group: widened to float32, two small matrix products around an online softmax. In the blocks that hold the
request's own rows, what a row does not see is masked. The products keep a tile of sums in vector registers.
"""

import functools
import math
from typing import Any

import numba
import numpy as np
import torch
from numba.extending import intrinsic

# What vector sums and maxima need; infinities stay what they are.
FAST = {"contract", "reassoc", "nsz", "arcp", "nnan"}
# Sums of a tile: 12 of AVX-512's 32 registers, 24 of AVX2's 16 (which spills, and is still ahead).
TILE_ROWS, TILE_WIDTH, LANES = 6, 32, 16
LOG2_E = np.float32(1.4426950408889634)
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
BITS = {torch.float32: torch.float32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def tree_attention_numba(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    block_table: torch.Tensor,
    first_row: torch.Tensor,
    num_rows: torch.Tensor,
    context_len: torch.Tensor,
    parents: torch.Tensor,
    scale: float,
) -> None:
    """See `vllm_ext.kernels.tree_attention.tree_attention`, which validates all but the layout.

    Raises:
        ValueError: the caches' strides are not those of `vec_layout`, or ``head_size`` or the block size is
            no multiple of TILE_WIDTH.
    """
    block_size, head_size = key_cache.shape[2:]
    if (
        key_cache.stride()[2:] != (1, block_size)
        or value_cache.stride()[2:] != (head_size, 1)
        or block_size % TILE_WIDTH
        or head_size % TILE_WIDTH
    ):
        raise ValueError(
            f"key_cache.stride()={key_cache.stride()}, value_cache.stride()={value_cache.stride()}, shape "
            f"{tuple(key_cache.shape)}: backend='numba' takes the views of vec_layout, with block and head sizes "
            f"that are multiples of {TILE_WIDTH}; use backend='torch'"
        )
    run = _compiled(torch.get_num_threads() > 1)
    run(
        _bits(query),
        _flat(key_cache),
        _flat(value_cache),
        _bits(output),
        key_cache.stride(0),
        key_cache.stride(1),
        block_size,
        key_cache.shape[1],
        KINDS[query.dtype],
        block_table.numpy(),
        first_row.numpy(),
        num_rows.numpy(),
        context_len.numpy(),
        parents.numpy(),
        np.float32(scale * LOG2_E),
    )


def _bits(tensor: torch.Tensor) -> Any:
    return tensor.view(BITS[tensor.dtype]).numpy()


def _flat(cache: torch.Tensor) -> Any:
    """A block-strided cache as one contiguous array: numba knows then that neighbours are adjacent."""
    length = (cache.shape[0] - 1) * cache.stride(0) + (cache.shape[1] - 1) * cache.stride(1)
    return _bits(cache.as_strided((length + cache.shape[2] * cache.shape[3],), (1,)))


@functools.cache
def _compiled(parallel: bool) -> Any:
    # numba compiles at the first call of each dtype, not here and not at import.
    options = {"nogil": True, "fastmath": FAST, "parallel": parallel, "error_model": "numpy"}
    try:
        return numba.njit(_tree_attention, cache=True, **options)
    except RuntimeError:  # neither the package's folder nor the user's cache folder is writable
        return numba.njit(_tree_attention, **options)


@numba.njit(fastmath=FAST, error_model="numpy")  # type: ignore[untyped-decorator]
def _widen(source: Any, start: int, into: Any, count: int, kind: int) -> None:
    """``into[:count] = source[start : start + count]`` as float32, from what `KINDS` numbers."""
    part = source[start : start + count]
    bits = into.view(np.int32)
    if kind == 0:
        for i in range(count):
            into[i] = part[i]
    elif kind == 1:
        for i in range(count):
            bits[i] = np.int32(part[i]) << 16
    else:
        # Exponent and fraction land 112 exponents too low; a product with 2**112 puts them right, subnormals too.
        for i in range(count):
            word = np.int32(part[i])
            bits[i] = np.int32((word & 0x7FFF) << 13) | np.int32(word & np.int32(-0x80000000))
        for i in range(count):
            into[i] *= np.float32(2.0**112)


@numba.njit(fastmath=FAST, error_model="numpy")  # type: ignore[untyped-decorator]
def _narrow(source: Any, into: Any, kind: int) -> None:
    """The way back, rounded to nearest, ties to even."""
    bits = source.view(np.int32)
    if kind == 0:
        for i in range(source.shape[0]):
            into[i] = source[i]
    elif kind == 1:
        for i in range(source.shape[0]):
            into[i] = np.int32(bits[i] + 0x7FFF + ((bits[i] >> 16) & 1)) >> 16
    else:
        # The product makes float16's subnormals float32's, so that rounding at bit 13 is right for both.
        for i in range(source.shape[0]):
            source[i] *= np.float32(2.0**-112)
        for i in range(source.shape[0]):
            magnitude = bits[i] & 0x7FFFFFFF
            rounded = np.int32(magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13
            into[i] = min(rounded, np.int32(0x7C00)) | ((bits[i] >> 16) & -0x8000)


@intrinsic  # type: ignore[untyped-decorator]
def _multiply_add_tile(
    typing: Any, a: Any, i: Any, lda: Any, inner: Any, b: Any, j: Any, ldb: Any, c: Any, k: Any, ldc: Any
) -> Any:
    """``c += a @ b`` on a tile of TILE_ROWS x TILE_WIDTH held in registers.

    ``a``, ``b``, ``c`` are flat float32 arrays; the tile starts at ``a[i]``, ``b[j]``, ``c[k]``, rows are
    ``lda``, ``ldb``, ``ldc`` apart, and ``inner`` products are summed. LLVM's vectoriser does not keep a tile
    of sums in registers, so the vectors are written out; they are ordinary LLVM vectors, which it splits where
    the machine's are shorter.
    """
    from llvmlite import ir
    from numba.core import cgutils, types

    vector = ir.VectorType(ir.FloatType(), LANES)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointers = [
            context.make_array(signature.args[n])(context, builder, arguments[n]).data for n in (0, 4, 7)
        ]
        (a, b, c), (i, lda, inner, j, ldb, k, ldc) = pointers, [arguments[n] for n in (1, 2, 3, 5, 6, 8, 9)]

        def at(pointer: Any, start: Any, row: Any, stride: Any, column: int) -> Any:
            index = builder.add(builder.add(start, builder.mul(row, stride)), ir.Constant(start.type, column))
            return builder.gep(pointer, [index])

        def vector_at(*place: Any) -> Any:
            return builder.bitcast(at(*place), vector.as_pointer())

        sums = []
        for row in range(TILE_ROWS):
            for column in range(0, TILE_WIDTH, LANES):
                sums.append((ir.Constant(k.type, row), column, cgutils.alloca_once(builder, vector)))
                builder.store(builder.load(vector_at(c, k, sums[-1][0], ldc, column), align=4), sums[-1][2])
        with cgutils.for_range(builder, inner) as loop:
            step = loop.index
            shared = {
                column: builder.load(vector_at(b, j, step, ldb, column), align=4)
                for column in range(0, TILE_WIDTH, LANES)
            }
            for row, column, place in sums:
                if column == 0:
                    scalar = builder.load(
                        builder.gep(a, [builder.add(builder.add(i, builder.mul(row, lda)), step)])
                    )
                    lane = builder.insert_element(
                        ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0)
                    )
                    spread = builder.shuffle_vector(
                        lane,
                        ir.Constant(vector, ir.Undefined),
                        ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES),
                    )
                product = builder.fmul(spread, shared[column], flags=("contract",))
                builder.store(builder.fadd(builder.load(place), product, flags=("contract",)), place)
        for row, column, place in sums:
            builder.store(builder.load(place), vector_at(c, k, row, ldc, column), align=4)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(a, integer, integer, integer, b, integer, integer, c, integer, integer), emit


@numba.njit(fastmath=FAST, error_model="numpy")  # type: ignore[untyped-decorator]
def _multiply_add(
    a: Any, lda: int, rows: int, inner: int, b: Any, ldb: int, width: int, c: Any, ldc: int
) -> None:
    """``c[:rows, :width] += a[:rows, :inner] @ b[:inner, :width]``, flat arrays with rows ld* apart.

    ``rows`` and ``width`` are multiples of the tile's.
    """
    for column in range(0, width, TILE_WIDTH):
        for row in range(0, rows, TILE_ROWS):
            _multiply_add_tile(a, row * lda, lda, inner, b, column, ldb, c, row * ldc + column, ldc)


@numba.njit(fastmath=FAST, error_model="numpy")  # type: ignore[untyped-decorator]
def _fraction_exp2(f: Any) -> Any:
    """``2 ** f`` for f in [-0.5, 0.5], to 1e-7."""
    p = np.float32(1.535336188319500e-4)
    p = p * f + np.float32(1.339887440266574e-3)
    p = p * f + np.float32(9.618437357674640e-3)
    p = p * f + np.float32(5.550332471162809e-2)
    p = p * f + np.float32(2.402264791363012e-1)
    p = p * f + np.float32(6.931472028550421e-1)
    return p * f + np.float32(1.0)


@numba.njit(fastmath=FAST, error_model="numpy")  # type: ignore[untyped-decorator]
def _exp2(x: Any, count: int, power: Any) -> None:
    """``x[i] = 2 ** x[i]`` for the first ``count``, all <= 0; ``power`` is int32 scratch, at least as long."""
    for i in range(count):
        # Below 2**-126 the result would not be a normal number, and no sum beside a 1 can tell.
        t = max(x[i], np.float32(-126.0))
        whole = np.floor(t + np.float32(0.5))
        power[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        x[i] = _fraction_exp2(t - whole)
    two_to = power.view(np.float32)
    for i in range(count):
        x[i] *= two_to[i]


@intrinsic  # type: ignore[untyped-decorator]
def _maximum(typing: Any, x: Any, count: Any) -> Any:
    """The largest of ``x[:count]``; ``count`` is a positive multiple of LANES. LLVM makes no vectors of ``max``."""
    from llvmlite import ir
    from numba.core import cgutils, types

    vector = ir.VectorType(ir.FloatType(), LANES)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = context.make_array(signature.args[0])(context, builder, arguments[0]).data

        def load(index: Any) -> Any:
            return builder.load(builder.bitcast(builder.gep(start, [index]), vector.as_pointer()), align=4)

        place = cgutils.alloca_once_value(builder, load(ir.Constant(arguments[1].type, 0)))
        with cgutils.for_range(
            builder, builder.sdiv(arguments[1], ir.Constant(arguments[1].type, LANES))
        ) as loop:
            part = load(builder.mul(loop.index, ir.Constant(arguments[1].type, LANES)))
            so_far = builder.load(place)
            builder.store(builder.select(builder.fcmp_ordered(">", part, so_far), part, so_far), place)
        best = builder.load(place)
        lanes = LANES
        while lanes > 1:  # halve
            lanes //= 2
            mask = [*range(lanes, 2 * lanes), *range(lanes, LANES), *[0] * LANES][:LANES]
            upper = builder.shuffle_vector(
                best, best, ir.Constant(ir.VectorType(ir.IntType(32), LANES), mask)
            )
            best = builder.select(builder.fcmp_ordered(">", upper, best), upper, best)
        return builder.extract_element(best, ir.Constant(ir.IntType(32), 0))

    return types.float32(x, types.int64), emit


@numba.njit(fastmath=FAST, error_model="numpy")  # type: ignore[untyped-decorator]
def _online(scores: Any, count: int, m: int, best: Any, weight: Any, total: Any, power: Any) -> None:
    """Row m's online softmax takes in ``scores[:count]`` (base 2): they become weights, its sums are rescaled.

    What is behind them, up to a multiple of LANES, is overwritten.
    """
    for t in range(count, (count + LANES - 1) // LANES * LANES):
        scores[t] = np.float32(-np.inf)
    before = best[m]
    top = _maximum(scores, (count + LANES - 1) // LANES * LANES)
    if top > before:
        best[m] = top
        if weight[m] > np.float32(0.0):
            keep = np.float32(math.exp2(before - top))
            weight[m] *= keep
            for d in range(total.shape[1]):
                total[m, d] *= keep
    else:
        top = before
    for t in range(count):
        scores[t] -= top
    _exp2(scores, count, power)
    part = np.float32(0.0)
    for t in range(count):
        part += scores[t]
    weight[m] += part


def _tree_attention(
    query: Any,  # [num_tokens, num_heads, head_size] bits
    keys: Any,  # flat bits
    values: Any,
    output: Any,  # [num_tokens, num_heads, head_size] bits
    block_stride: int,
    head_stride: int,
    block_size: int,
    num_kv_heads: int,
    kind: int,
    block_table: Any,
    first_row: Any,
    num_rows: Any,
    context_len: Any,
    parents: Any,
    scale: Any,  # times log2(e): exponentials are powers of two
) -> None:
    head_size = query.shape[2]
    group = query.shape[1] // num_kv_heads
    starts = np.zeros(num_rows.shape[0] + 1, np.int64)
    for i in range(num_rows.shape[0]):
        starts[i + 1] = starts[i] + num_rows[i]
    for task in numba.prange(num_rows.shape[0] * num_kv_heads):
        request, head = task // num_kv_heads, task % num_kv_heads
        rows, context = np.int64(num_rows[request]), np.int64(context_len[request])
        table = block_table[request]
        wide = rows * group  # row r, head g of the group: r * group + g
        padded = (wide + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
        q = np.zeros((padded, head_size), np.float32)
        total = np.zeros((padded, head_size), np.float32)
        best = np.full(wide, np.float32(-np.inf))
        weight = np.zeros(wide, np.float32)
        scores = np.zeros((padded, block_size), np.float32)
        power = np.empty(block_size, np.int32)
        key_block = np.empty((head_size, block_size), np.float32)
        value_block = np.empty((block_size, head_size), np.float32)
        visible = np.zeros((rows, rows), np.bool_)
        for r in range(rows):
            parent = parents[starts[request] + r]
            if parent >= 0:
                visible[r] = visible[parent]
            visible[r, r] = True
            for g in range(group):
                _widen(query[first_row[request] + r, head * group + g], 0, q[r * group + g], head_size, kind)
                for d in range(head_size):
                    q[r * group + g, d] *= scale

        for b in range((context + rows + block_size - 1) // block_size):
            left = context + rows - b * block_size
            width = left if left < block_size else block_size
            used = (width + TILE_WIDTH - 1) // TILE_WIDTH * TILE_WIDTH
            start = table[b] * block_stride + head * head_stride
            for d in range(head_size):
                _widen(keys, start + d * block_size, key_block[d], used, kind)
            scores[:, :used] = np.float32(0.0)
            _multiply_add(
                q.ravel(),
                head_size,
                padded,
                head_size,
                key_block.ravel(),
                block_size,
                used,
                scores.ravel(),
                block_size,
            )
            root = context - b * block_size  # its column in this block, perhaps in none
            for m in range(wide):
                for t in range(root if root > 0 else 0, width):
                    if not visible[m // group, t - root]:
                        scores[m, t] = np.float32(-np.inf)
                _online(scores[m], width, m, best, weight, total, power)
            _widen(values, start, value_block.ravel(), width * head_size, kind)
            _multiply_add(
                scores.ravel(),
                block_size,
                padded,
                width,
                value_block.ravel(),
                head_size,
                head_size,
                total.ravel(),
                head_size,
            )

        for m in range(wide):
            share = np.float32(1.0) / weight[m]
            for d in range(head_size):
                total[m, d] *= share
            _narrow(total[m], output[first_row[request] + m // group, head * group + m % group], kind)
