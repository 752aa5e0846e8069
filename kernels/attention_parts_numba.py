# SPDX-License-Identifier: Apache-2.0
"""What attention kernels of numba are made of: a register-tiled matrix product a step of the online softmax,
and torch's threads."""

import ctypes
import functools
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from vllm_ext.kernels import backends
from vllm_ext.kernels.numba_vectors import (
    FLOATS,
    LANES,
    VECTOR,
    constant_vector,
    emit_exp2,
    exp2_of_difference,
    largest_lane,
    load_vector,
    multiply_tile,
    splat,
    store_vector,
    vector_add,
    vector_max,
    vector_multiply,
)

# Columns of a register tile, in vectors. 6 x 4 sums, 4 columns and a scalar are 29 of AVX-512's 32 registers;
# 6 x 1 is 15 of AVX2's 16 and 29 of NEON's 32.
TILE_ROWS, TILE_VECTORS = 6, 4 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 1
TILE_WIDTH = TILE_VECTORS * LANES
LOG2_E = 1.4426950408889634
# tanh(x) / x by powers of x ** 2, the highest first.
TANH = (-1382 / 155925, 62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def matrix_product(
    a: Any,
    i: int,
    lda: int,
    b: Any,
    j: int,
    ldb: int,
    step: int,
    c: Any,
    k: int,
    ldc: int,
    rows: int,
    inner: int,
    width: int,
    add: bool,
) -> None:
    """`multiply_tile` over ``rows`` (even) times ``width`` (a multiple of LANES)."""
    # Columns outside: the tile of b stays in the first-level cache while the rows go by.
    column = 0
    while column < width:
        whole = width - column >= TILE_WIDTH
        row = 0
        while row < rows:
            x, y, z = i + row * lda, j + column // LANES * step, k + row * ldc + column
            if rows - row >= TILE_ROWS:
                if whole:
                    multiply_tile(TILE_ROWS, TILE_VECTORS, a, x, lda, b, y, ldb, step, c, z, ldc, inner, add)
                else:
                    multiply_tile(TILE_ROWS, 1, a, x, lda, b, y, ldb, step, c, z, ldc, inner, add)
                row += TILE_ROWS
            else:
                if whole:
                    multiply_tile(2, TILE_VECTORS, a, x, lda, b, y, ldb, step, c, z, ldc, inner, add)
                else:
                    multiply_tile(2, 1, a, x, lda, b, y, ldb, step, c, z, ldc, inner, add)
                row += 2
        column += TILE_WIDTH if whole else LANES


@intrinsic  # type: ignore[untyped-decorator]
def soft_capped(typing: Any, scores: Any, cap: Any) -> Any:
    """``cap * tanh(scores / cap)``, lane by lane, to 1e-7 of the result; of NaN it may be anything."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, cap = arguments
        x = builder.fdiv(scores, cap)
        # By its series where 1 - exp(-2 x) would lose digits.
        square = builder.fmul(x, x)
        series = constant_vector(FLOATS, TANH[0])
        for coefficient in TANH[1:]:
            series = builder.fadd(builder.fmul(series, square), constant_vector(FLOATS, coefficient))
        small = builder.fcmp_ordered("<", square, constant_vector(FLOATS, 0.09))
        negative = builder.fcmp_ordered("<", x, constant_vector(FLOATS, 0.0))
        size = builder.select(negative, builder.fneg(x), x)
        zero, one = constant_vector(FLOATS, 0.0), constant_vector(FLOATS, 1.0)
        exponent = builder.fmul(size, constant_vector(FLOATS, -2.0 * LOG2_E))
        power = emit_exp2(builder, exponent, zero)
        far = builder.fdiv(builder.fsub(one, power), builder.fadd(one, power))
        far = builder.select(negative, builder.fneg(far), far)
        return builder.fmul(cap, builder.select(small, builder.fmul(x, series), far))

    return VECTOR(VECTOR, VECTOR), emit


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def online_softmax(
    scores: Any, start: int, width: int, best: Any, m: int, total: Any, line: int, head_size: int
) -> None:
    """Row m's online softmax takes in ``scores[start : start + width]`` (base 2), which become weights."""
    before = load_vector(best, m * LANES)
    top = before
    for t in range(start, start + width, LANES):
        top = vector_max(top, load_vector(scores, t))
    top = splat(largest_lane(top))
    store_vector(best, m * LANES, top)
    weight = splat(np.float32(0.0))
    for t in range(start, start + width, LANES):
        power = exp2_of_difference(load_vector(scores, t), top)
        store_vector(scores, t, power)
        weight = vector_add(weight, power)
    keep = exp2_of_difference(before, top)
    for d in range(line, line + head_size + LANES, LANES):
        store_vector(total, d, vector_multiply(load_vector(total, d), keep))
    store_vector(total, line + head_size, vector_add(load_vector(total, line + head_size), weight))


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def round_up(n: int, to: int) -> int:
    """The next multiple of ``to``."""
    return (n + to - 1) // to * to


def c_function(body: Any, arguments: type[ctypes.Structure]) -> Any:
    """``body``, which takes a pointer to ``arguments``, as a C function; compiled by this call."""
    signature = types.void(types.CPointer(numba.from_dtype(np.dtype(arguments))))
    compiled = backends.compile_cached(numba.cfunc, signature, error_model="numpy")(body)
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)
    function.compiled = compiled  # type: ignore[attr-defined]  # its code must outlive it
    return function


def run_in_threads(run: Any, arguments: ctypes.Structure, threads: int) -> None:
    """Call a C function of one pointer once in each of torch's threads."""
    parallel = _openmp() if threads > 1 else None
    if parallel is None:
        run(ctypes.addressof(arguments))
    else:
        parallel(run, ctypes.addressof(arguments), threads, 0)


@functools.cache
def _openmp() -> Any:
    """GOMP_parallel of the OpenMP that torch runs on, under GNU's name in Intel's and LLVM's too; or None."""
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel
