# SPDX-License-Identifier: Apache-2.0
"""`linear` for x86, in LLVM's vectors: with AVX-512's products of bfloat16 pairs where the CPU has them.

A tile of rows and a block of output columns are summed in registers over all of the input. On a core of an AMD Zen 5 at
34 GB/s twelve rows of a step's products take 8.8 ms for 135M parameters and one row 7.9, by oneDNN 14.3 and 8.9.
What makes the difference is reading ahead: a core's own prefetcher stops at pages' ends.

Threads are those of torch's OpenMP; each takes a run of blocks.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
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
from vllm_ext.kernels.numba_vectors import (
    FLOATS,
    INT,
    INTS,
    LANES,
    element_pointer,
    fetch_add_one,
    load_vector,
    pointer_to,
    split_pairs,
    spread_int,
    store_vector,
)

AHEAD = 8192  # bytes
UNROLLED = 4  # pairs
LONG = ir.IntType(64)
FORMS = ("pairs", "avx512", "avx2")
# Rows of a tile and its vectors of columns: what fits into 32 or 16 registers.
TILES = {"pairs": (12, 2), "avx512": (8, 2), "avx2": (4, 1)}


class _Arguments(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("next_part", "x", "weight", "bias", "output", "rows", "pairs", "blocks", "parts")
    ]


def linear_numba(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor, form: str | None = None
) -> torch.Tensor:
    """See `vllm_ext.kernels.linear.linear`, which validates; ``form``: of FORMS, this CPU's if None."""
    blocks, pairs, block, _ = packed.shape
    x = x.contiguous()
    output = x.new_empty((*x.shape[:-1], blocks * block))
    threads = torch.get_num_threads()
    arguments = _Arguments(
        0,
        x.data_ptr(),
        packed.data_ptr(),
        bias.data_ptr(),
        output.data_ptr(),
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
    if features.get("avx512bf16"):
        return "pairs"
    return "avx512" if features.get("avx512f") else "avx2"


@functools.cache
def _compiled(form: str) -> Any:
    """A C function of one pointer, compiled at the first call, not at import."""
    return c_function(_body(form), _Arguments)


def in_steps(builder: Any, number: Any, step: Callable[[Any], None]) -> None:
    """LLVM's code of ``step`` for 0 to ``number``, UNROLLED of them at a time."""
    size = ir.Constant(LONG, UNROLLED)
    unrolled = builder.udiv(number, size)
    with cgutils.for_range(builder, unrolled) as loop:
        for n in range(UNROLLED):
            step(builder.add(builder.mul(loop.index, size), ir.Constant(LONG, n)))
    done = builder.mul(unrolled, size)
    with cgutils.for_range(builder, builder.sub(number, done)) as loop:
        step(builder.add(done, loop.index))


def by_height(builder: Any, count: Any, most: int, add_all: Callable[[int], None]) -> None:
    """LLVM's code of a tile of ``count`` rows, 1 to ``most``: one part for each height."""
    end = builder.append_basic_block("tile.end")
    switch = builder.switch(count, end)
    for height in range(1, most + 1):
        block = builder.append_basic_block(f"tile.{height}")
        switch.add_case(ir.Constant(LONG, height), block)
        builder.position_at_end(block)
        add_all(height)
        builder.branch(end)
    builder.position_at_end(end)


def prefetching(builder: Any) -> Callable[[Any], None]:
    """LLVM's code that fetches the line of an address into all caches."""
    byte = ir.IntType(8).as_pointer()
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [byte, INT, INT, INT]), "llvm.prefetch.p0"
    )
    to_read = [ir.Constant(INT, n) for n in (0, 3, 1)]  # data
    return lambda address: builder.call(function, [builder.bitcast(address, byte), *to_read])


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _tile(
    typing: Any,
    form: Any,
    count: Any,
    x: Any,
    i: Any,
    weight: Any,
    j: Any,
    bias: Any,
    b: Any,
    sums: Any,
    pairs: Any,
    ahead: Any,
) -> Any:
    """``sums[row, lane] = bias[b + lane] + x[i + row] . weight[j, lane]`` for ``count`` rows and a tile's columns.

    ``x`` and ``weight`` are flat arrays of uint32, pairs of bfloat16; ``x``'s rows are ``pairs`` long, of the weights a
    whole block lies side by side. What lies ``ahead`` uint32 further is fetched.
    """
    if not isinstance(form, types.StringLiteral):
        return None
    native = form.literal_value == "pairs"
    rows, vectors = TILES[form.literal_value]

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, count, x, i, weight, j, bias, b, out, pairs, ahead = arguments
        x_type, weight_type, bias_type, out_type = (signature.args[n] for n in (2, 4, 6, 8))

        def at(array_type: Any, array: Any, index: Any) -> Any:
            return element_pointer(context, builder, array_type, array, index)

        def integer(n: int) -> Any:
            return ir.Constant(LONG, n)

        dot = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(FLOATS, [FLOATS, INTS, INTS]), "llvm.x86.avx512bf16.dpbf16ps.512"
        ) if native else None  # fmt: skip
        prefetch = prefetching(builder)
        first = at(weight_type, weight, j)
        totals = [[cgutils.alloca_once(builder, FLOATS) for _ in range(vectors)] for _ in range(rows)]

        def add(left: Any, right: Any, total: Any) -> None:
            before = builder.load(total)
            if native:
                builder.store(builder.call(dot, [before, left, right]), total)
                return
            for one, other in zip(left, right, strict=True):
                product = builder.fmul(one, other, flags=("contract",))
                before = builder.fadd(before, product, flags=("contract",))
            builder.store(before, total)

        def add_pair(starts: list[Any], pair: Any) -> None:
            place = builder.mul(pair, integer(2 * LANES))
            for n in range(vectors):
                line = builder.gep(first, [builder.add(builder.add(place, ahead), integer(n * LANES))])
                prefetch(line)
            columns = []
            for n in range(vectors):
                line = builder.gep(first, [builder.add(place, integer(n * LANES))])
                columns.append(builder.load(builder.bitcast(line, INTS.as_pointer()), align=4))
            for row, start in enumerate(starts):
                value = spread_int(builder, builder.load(builder.gep(start, [pair]), align=2))
                factor = value if native else split_pairs(builder, value)
                for column, total in zip(columns, totals[row], strict=True):
                    add(column if native else split_pairs(builder, column), factor, total)

        def add_all(height: int) -> None:
            starts = [
                at(x_type, x, builder.add(i, builder.mul(pairs, integer(row)))) for row in range(height)
            ]
            for total in totals[:height]:
                for n, each in enumerate(total):
                    begin = at(bias_type, bias, builder.add(b, integer(n * LANES)))
                    builder.store(builder.load(builder.bitcast(begin, FLOATS.as_pointer()), align=4), each)
            in_steps(builder, pairs, lambda pair: add_pair(starts, pair))
            for row, total in enumerate(totals[:height]):
                for n, each in enumerate(total):
                    end = at(out_type, out, integer((row * vectors + n) * LANES))
                    builder.store(builder.load(each), builder.bitcast(end, FLOATS.as_pointer()), align=4)

        by_height(builder, count, rows, add_all)
        return context.get_dummy_value()

    n = types.int64
    return types.void(form, n, x, n, weight, n, bias, n, sums, n, n), emit


def _body(form: str) -> Any:
    """The C function, of a pointer to `_Arguments`: runs of blocks, as long as other threads have left any."""
    most, vectors = TILES[form]
    width = vectors * LANES

    def multiply(pointer: Any) -> None:
        args = numba.carray(pointer, 1)[0]
        count, pairs, blocks, parts = args.rows, args.pairs, args.blocks, args.parts
        # Read and written at the offsets below: the length is nominal.
        x = numba.carray(pointer_to(args.x, np.uint32), 1)
        weight = numba.carray(pointer_to(args.weight, np.uint32), 1)
        bias = numba.carray(pointer_to(args.bias, np.float32), 1)
        output = numba.carray(pointer_to(args.output, np.uint16), 1)
        sums = np.empty(most * width, np.float32)
        # Tiles of one height, as nearly as can be: two of eight rows take less time than twelve and four.
        tiles = (count + most - 1) // most
        height = (count + tiles - 1) // max(tiles, 1)
        part = fetch_add_one(pointer)
        while part < parts:
            for block in range(blocks * part // parts, blocks * (part + 1) // parts):
                row = 0
                while row < count:
                    rows = min(height, count - row)
                    # What is behind the block is read ahead once, by the first tile.
                    ahead = AHEAD // 4 if row == 0 else 0
                    for start in range(0, BLOCK, width):
                        line = block * BLOCK + start
                        first = block * BLOCK * pairs + start
                        _tile(form, rows, x, row * pairs, weight, first, bias, line, sums, pairs, ahead)
                        for r in range(rows):
                            for lane in range(0, width, LANES):
                                value = load_vector(sums, r * width + lane)
                                store_vector(output, (row + r) * blocks * BLOCK + line + lane, value)
                    row += rows
            part = fetch_add_one(pointer)

    return multiply
