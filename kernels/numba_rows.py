# SPDX-License-Identifier: Apache-2.0
"""Rows of 16-bit or 32-bit floats to float32 and back, of any strides, for numba kernels of several dtypes.

A kernel that converts what it reads and writes only once is compiled once: which dtype it is, a number says.
"""

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from vllm_ext.kernels.numba_vectors import (
    INT,
    INTS,
    LANES,
    RAW,
    VECTOR,
    element_pointer,
    load_vector,
    narrow,
    pointer_to,
    store_vector,
    widen,
)

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _places(context: Any, builder: Any, array_type: Any, array: Any, index: Any, stride: Any) -> list[Any]:
    """Pointers to LANES elements that are ``stride`` apart."""
    element = RAW[array_type.dtype].element.as_pointer()
    steps = [builder.mul(stride, ir.Constant(stride.type, lane)) for lane in range(LANES)]
    return [
        builder.bitcast(
            element_pointer(context, builder, array_type, array, builder.add(index, step)), element
        )
        for step in steps
    ]


@intrinsic  # type: ignore[untyped-decorator]
def load_strided(typing: Any, array: Any, index: Any, stride: Any) -> Any:
    """``array[index : index + LANES * stride : stride]`` as a Vector."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        dtype = signature.args[0].dtype
        raw = ir.Constant(RAW[dtype], ir.Undefined)
        for lane, place in enumerate(_places(context, builder, signature.args[0], *arguments)):
            raw = builder.insert_element(raw, builder.load(place), ir.Constant(INT, lane))
        return widen(builder, raw, dtype)

    return VECTOR(array, types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def store_strided(typing: Any, array: Any, index: Any, stride: Any, vector: Any) -> Any:
    """``array[index : index + LANES * stride : stride] = vector``, rounded to nearest, ties to even."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        raw = narrow(builder, arguments[3], signature.args[0].dtype)
        for lane, place in enumerate(_places(context, builder, signature.args[0], *arguments[:3])):
            builder.store(builder.extract_element(raw, ir.Constant(INT, lane)), place)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, VECTOR), emit


@intrinsic  # type: ignore[untyped-decorator]
def transpose_tile(typing: Any, source: Any, i: Any, source_row: Any, target: Any, j: Any, row: Any) -> Any:
    """``target[j + b * row + a] = source[i + a * source_row + b]`` for all a, b < LANES, converted."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source_type, target_type = signature.args[0], signature.args[3]

        def line(array_type: Any, number: int, array: Any, start: Any, stride: Any) -> Any:
            at = builder.add(start, builder.mul(stride, ir.Constant(stride.type, number)))
            pointer = element_pointer(context, builder, array_type, array, at)
            return builder.bitcast(pointer, RAW[array_type.dtype].as_pointer())

        lines = []
        for number in range(LANES):
            pointer = line(source_type, number, *arguments[:3])
            raw = builder.load(pointer, align=source_type.dtype.bitwidth // 8)
            lines.append(widen(builder, raw, source_type.dtype))
        half = LANES // 2
        while (
            half
        ):  # of each pair of blocks that are `half` wide, the upper right and the lower left change places
            upper = [n + LANES - half if n & half else n for n in range(LANES)]
            lower = [n + LANES if n & half else n + half for n in range(LANES)]
            for number in range(LANES):
                if not number & half:
                    a, b = lines[number], lines[number + half]
                    lines[number] = builder.shuffle_vector(a, b, ir.Constant(INTS, upper))
                    lines[number + half] = builder.shuffle_vector(a, b, ir.Constant(INTS, lower))
            half //= 2
        for number, vector in enumerate(lines):
            pointer = line(target_type, number, *arguments[3:])
            raw = narrow(builder, vector, target_type.dtype)
            builder.store(raw, pointer, align=target_type.dtype.bitwidth // 8)
        return context.get_dummy_value()

    n = types.int64
    return types.void(source, n, n, target, n, n), emit


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def read_row(address: int, kind: int, at: int, stride: int, floats: Any, to: int, count: int) -> None:
    """``count`` elements (a multiple of LANES) from ``at`` on, ``stride`` apart, to ``floats[to : to + count]``."""
    if kind == 0:
        _read(numba.carray(pointer_to(address, np.float32), 1), at, stride, floats, to, count)
    elif kind == 1:
        _read(numba.carray(pointer_to(address, np.uint16), 1), at, stride, floats, to, count)
    else:
        _read(numba.carray(pointer_to(address, np.int16), 1), at, stride, floats, to, count)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def write_row(address: int, kind: int, at: int, stride: int, floats: Any, start: int, count: int) -> None:
    """The way back: `read_row` with source and target in each other's place."""
    if kind == 0:
        _write(numba.carray(pointer_to(address, np.float32), 1), at, stride, floats, start, count)
    elif kind == 1:
        _write(numba.carray(pointer_to(address, np.uint16), 1), at, stride, floats, start, count)
    else:
        _write(numba.carray(pointer_to(address, np.int16), 1), at, stride, floats, start, count)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _read(array: Any, at: int, stride: int, floats: Any, to: int, count: int) -> None:
    if stride == 1:
        for d in range(0, count, LANES):
            store_vector(floats, to + d, load_vector(array, at + d))
    else:
        for d in range(0, count, LANES):
            store_vector(floats, to + d, load_strided(array, at + d * stride, stride))


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _write(array: Any, at: int, stride: int, floats: Any, start: int, count: int) -> None:
    if stride == 1:
        for d in range(0, count, LANES):
            store_vector(array, at + d, load_vector(floats, start + d))
    else:
        for d in range(0, count, LANES):
            store_strided(array, at + d * stride, stride, load_vector(floats, start + d))
