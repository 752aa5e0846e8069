# SPDX-License-Identifier: Apache-2.0
"""`linear8` for x86, in LLVM's vectors: as `linear_numba`, with products of pairs of integers.

Weights are widened to 16 bits as they come, which a processor does while it loads. All forms give the same numbers.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from vllm_ext.kernels.attention_parts_numba import c_function, run_in_threads
from vllm_ext.kernels.linear import BLOCK
from vllm_ext.kernels.linear8_ref import MOST_INPUT
from vllm_ext.kernels.linear_numba import AHEAD, LONG, by_height, in_steps, prefetching
from vllm_ext.kernels.numba_vectors import (
    FLOATS,
    INTS,
    LANES,
    constant_vector,
    element_pointer,
    fetch_add_one,
    load_vector,
    pointer_to,
    spread_float,
    spread_int,
    store_vector,
)

NOT_FINITE = 0x7F80  # bits of bfloat16 from which on it is no number, or infinite
# Rows of a tile and its vectors of columns: what fits into 32 or 16 registers.
TILES = {"vnni": (12, 2), "avx512": (8, 2), "avx2": (4, 1)}
FORMS = tuple(TILES)
PAIR_BYTES, PAIR_SHORTS = (ir.VectorType(ir.IntType(bits), 2 * LANES) for bits in (8, 16))


class _Arguments(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("next_part", "x", "weight", "scale", "bias", "output"),
            *("rows", "pairs", "blocks", "parts"),
        )
    ]


def linear8_numba(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    form: str | None = None,
) -> torch.Tensor:
    """See `vllm_ext.kernels.linear8.linear8`, which validates; ``form``: of FORMS, this CPU's if None."""
    blocks, pairs, block, _ = codes.shape
    x = x.contiguous()
    output = x.new_empty((*x.shape[:-1], blocks * block))
    threads = torch.get_num_threads()
    arguments = _Arguments(
        0,
        *(part.data_ptr() for part in (x, codes, scale, bias, output)),
        x.numel() // (2 * pairs),
        pairs,
        blocks,
        threads,
    )
    run_in_threads(_compiled(form or best_form()), arguments, threads)
    return output


@functools.cache
def best_form() -> str:
    """Of FORMS."""
    features = llvmlite.binding.get_host_cpu_features()
    if features.get("avx512vnni") and features.get("avx512bw"):
        return "vnni"
    return "avx512" if features.get("avx512bw") else "avx2"


@functools.cache
def _compiled(form: str) -> Any:
    """A C function of one pointer, compiled at the first call, not at import."""
    return c_function(_body(form), _Arguments)


def _dot(builder: Any, form: str) -> Any:
    """LLVM's code of ``before + left . right``, of LANES pairs of 16 bits each."""
    if form == "vnni":
        kind = ir.FunctionType(INTS, [INTS, INTS, INTS])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpwssd.512")
        return lambda before, left, right: builder.call(function, [before, left, right])
    # Of the width that the processor has.
    lanes, name = (
        (LANES, "llvm.x86.avx512.pmaddw.d.512") if form == "avx512" else (8, "llvm.x86.avx2.pmadd.wd")
    )
    shorts, ints = ir.VectorType(ir.IntType(16), 2 * lanes), ir.VectorType(ir.IntType(32), lanes)
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ints, [shorts, shorts]), name)

    def add(before: Any, left: Any, right: Any) -> Any:
        parts = []
        for start in range(0, LANES, lanes):
            places = ir.Constant(ir.VectorType(ir.IntType(32), lanes), list(range(start, start + lanes)))
            pair = [
                builder.bitcast(builder.shuffle_vector(each, each, places), shorts) for each in (left, right)
            ]
            parts.append(builder.call(function, pair))
        places = ir.Constant(INTS, list(range(LANES)))
        whole = parts[0] if len(parts) == 1 else builder.shuffle_vector(*parts, places)
        return builder.add(before, whole)

    return add


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _tile(
    typing: Any,
    form: Any,
    count: Any,
    x: Any,
    i: Any,
    steps: Any,
    r: Any,
    weight: Any,
    j: Any,
    scale: Any,
    bias: Any,
    b: Any,
    sums: Any,
    pairs: Any,
    ahead: Any,
) -> Any:
    """``sums[row, lane] = x[i + row] . weight[j, lane] * steps[r + row] * scale[b + lane] + bias[b + lane]``.

    ``x`` is a flat array of uint32, pairs of int16 with rows of ``pairs``; ``weight`` one of int8, the pairs of a whole
    block side by side. What lies ``ahead`` bytes further is fetched.
    """
    if not isinstance(form, types.StringLiteral):
        return None
    rows, vectors = TILES[form.literal_value]

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, count, x, i, steps, r, weight, j, scale, bias, b, out, pairs, ahead = arguments
        kinds = dict(zip(("x", "steps", "weight", "scale", "bias", "out"), (2, 4, 6, 8, 9, 11), strict=True))

        def at(name: str, array: Any, index: Any) -> Any:
            return element_pointer(context, builder, signature.args[kinds[name]], array, index)

        def integer(n: int) -> Any:
            return ir.Constant(LONG, n)

        def floats(name: str, array: Any, n: int) -> Any:
            begin = at(name, array, builder.add(b, integer(n * LANES)))
            return builder.load(builder.bitcast(begin, FLOATS.as_pointer()), align=4)

        prefetch, dot = prefetching(builder), _dot(builder, form.literal_value)
        first = at("weight", weight, j)
        totals = [[cgutils.alloca_once(builder, INTS) for _ in range(vectors)] for _ in range(rows)]

        def add_pair(starts: list[Any], pair: Any) -> None:
            place = builder.mul(pair, integer(2 * BLOCK))
            prefetch(builder.gep(first, [builder.add(place, ahead)]))
            columns = []
            for n in range(vectors):
                line = builder.gep(first, [builder.add(place, integer(2 * n * LANES))])
                codes = builder.load(builder.bitcast(line, PAIR_BYTES.as_pointer()), align=1)
                columns.append(builder.bitcast(builder.sext(codes, PAIR_SHORTS), INTS))
            for start, total in zip(starts, totals, strict=False):
                factor = spread_int(builder, builder.load(builder.gep(start, [pair]), align=2))
                for column, each in zip(columns, total, strict=True):
                    builder.store(dot(builder.load(each), column, factor), each)

        def add_all(height: int) -> None:
            starts = [at("x", x, builder.add(i, builder.mul(pairs, integer(row)))) for row in range(height)]
            for total in totals[:height]:
                for each in total:
                    builder.store(constant_vector(INTS, 0), each)
            in_steps(builder, pairs, lambda pair: add_pair(starts, pair))
            of_rows = [
                spread_float(builder, builder.load(at("steps", steps, builder.add(r, integer(row)))))
                for row in range(height)
            ]
            for n in range(vectors):
                factor, term = floats("scale", scale, n), floats("bias", bias, n)
                for row, total in enumerate(totals[:height]):
                    value = builder.fmul(builder.sitofp(builder.load(total[n]), FLOATS), of_rows[row])
                    value = builder.fadd(builder.fmul(value, factor), term)
                    end = at("out", out, integer((row * vectors + n) * LANES))
                    builder.store(value, builder.bitcast(end, FLOATS.as_pointer()), align=4)

        by_height(builder, count, rows, add_all)
        return context.get_dummy_value()

    n = types.int64
    return types.void(form, n, x, n, steps, n, weight, n, scale, bias, n, sums, n, n), emit


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _round(x: Any, begin: int, count: int, room: Any, rounded: Any) -> Any:
    """A row of bfloat16 as integers of 12 bits; gives what one of them is worth.

    Args:
        x: uint16.
        begin: of the row.
        count: its inputs.
        room: float32 ``[count + LANES]``.
        rounded: int16 ``[count]``, written to.
    """
    largest = np.uint16(0)
    for place in range(count):
        largest = max(largest, x[begin + place] & np.uint16(0x7FFF))
    if largest >= NOT_FINITE:
        rounded[:count] = 0
        return np.float32(np.nan)
    for place in range(0, count - count % LANES, LANES):
        store_vector(room, place, load_vector(x, begin + place))
    bits = room.view(np.uint32)
    for place in range(count - count % LANES, count):
        bits[place] = np.uint32(x[begin + place]) << np.uint32(16)
    bits[count] = np.uint32(largest) << np.uint32(16)
    step = room[count] / np.float32(MOST_INPUT)
    if step == np.float32(0.0):
        rounded[:count] = 0
        return step
    factor = np.float32(1.0) / step
    for place in range(count):
        rounded[place] = np.int16(np.rint(room[place] * factor))
    return step


def _body(form: str) -> Any:
    """The C function, of a pointer to `_Arguments`: runs of blocks, as long as other threads have left any."""
    most, vectors = TILES[form]
    width = vectors * LANES

    def multiply(pointer: Any) -> None:
        args = numba.carray(pointer, 1)[0]
        count, pairs, blocks, parts = args.rows, args.pairs, args.blocks, args.parts
        # Read and written at the offsets below: the length is nominal.
        x = numba.carray(pointer_to(args.x, np.uint16), count * 2 * pairs)
        weight = numba.carray(pointer_to(args.weight, np.int8), 1)
        scale = numba.carray(pointer_to(args.scale, np.float32), 1)
        bias = numba.carray(pointer_to(args.bias, np.float32), 1)
        output = numba.carray(pointer_to(args.output, np.uint16), 1)
        sums = np.empty(most * width, np.float32)
        # Each thread rounds the input for itself: it is small, and nobody waits.
        rounded, steps = np.empty((count, 2 * pairs), np.int16), np.empty(count, np.float32)
        room = np.empty(2 * pairs + LANES, np.float32)
        for row in range(count):
            steps[row] = _round(x, row * 2 * pairs, 2 * pairs, room, rounded[row])
        inputs = rounded.view(np.uint32).ravel()
        tiles = (count + most - 1) // most
        height = (count + tiles - 1) // max(tiles, 1)
        part = fetch_add_one(pointer)
        while part < parts:
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                row = 0
                while row < count:
                    rows = min(height, count - row)
                    ahead = AHEAD if row == 0 else 0
                    for start in range(0, BLOCK, width):
                        line = block * BLOCK + start
                        first = 2 * (block * BLOCK * pairs + start)
                        at = row * pairs
                        _tile(
                            form,
                            rows,
                            inputs,
                            at,
                            steps,
                            row,
                            weight,
                            first,
                            scale,
                            bias,
                            line,
                            sums,
                            pairs,
                            ahead,
                        )
                        for r in range(rows):
                            for lane in range(0, width, LANES):
                                value = load_vector(sums, r * width + lane)
                                store_vector(output, (row + r) * blocks * BLOCK + line + lane, value)
                    row += rows
            part = fetch_add_one(pointer)

    return multiply
