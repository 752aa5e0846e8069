# SPDX-License-Identifier: Apache-2.0
"""Vectors of 16 floats for numba kernels, as LLVM's own vector type.

numba's vectoriser neither keeps a tile of sums in registers nor makes vectors of a float32 maximum. Here the vectors
are written out; where the machine's are shorter, LLVM splits them. Flat arrays, no bounds checks, no wrap-around.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
# 2 ** f for f in [-0.5, 0.5], highest power first; relative error 2e-8 before rounding.
EXP2 = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)


class _Vector(types.Type):  # type: ignore[misc]
    """LANES floats in a register."""

    def __init__(self) -> None:
        super().__init__(name="Vector")


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, FLOATS)


VECTOR = _Vector()
FLOAT, INT = ir.FloatType(), ir.IntType(32)
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
BYTES = ir.VectorType(ir.IntType(8), LANES)
SHORTS, HALVES = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.HalfType(), LANES)
# What stands for float32, bfloat16 and float16: numba has no types for the latter two on the CPU.
RAW = {types.float32: FLOATS, types.uint16: SHORTS, types.int16: HALVES}


def constant_vector(kind: Any, value: Any) -> Any:
    """LANES times ``value``, as LLVM's vector type ``kind``."""
    return ir.Constant(kind, [value] * LANES)


def spread_float(builder: Any, scalar: Any) -> Any:
    """LANES times a float."""
    undefined = ir.Constant(FLOATS, ir.Undefined)
    lane = builder.insert_element(undefined, scalar, ir.Constant(INT, 0))
    return builder.shuffle_vector(lane, undefined, ir.Constant(INTS, [0] * LANES))


def spread_int(builder: Any, scalar: Any) -> Any:
    """LANES times a 32-bit integer."""
    undefined = ir.Constant(INTS, ir.Undefined)
    lane = builder.insert_element(undefined, scalar, ir.Constant(INT, 0))
    return builder.shuffle_vector(lane, undefined, ir.Constant(INTS, [0] * LANES))


def split_pairs(builder: Any, pairs: Any) -> tuple[Any, Any]:
    """LANES pairs of bfloat16 as two vectors of floats: the lower halves, and the upper."""
    lower = builder.shl(pairs, constant_vector(INTS, 16))
    upper = builder.and_(pairs, constant_vector(INTS, 0xFFFF0000))
    return builder.bitcast(lower, FLOATS), builder.bitcast(upper, FLOATS)


def element_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """The address of a flat array's ``index``-th element, without numba's wrap-around."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def _widened(builder: Any, pointer: Any, dtype: Any) -> Any:
    raw = builder.load(builder.bitcast(pointer, RAW[dtype].as_pointer()), align=dtype.bitwidth // 8)
    return widen(builder, raw, dtype)


def widen(builder: Any, raw: Any, dtype: Any) -> Any:
    """LANES elements of a dtype as floats."""
    if dtype == types.float32:
        return raw
    if dtype == types.int16:  # float16
        return builder.fpext(raw, FLOATS)
    bits = builder.zext(raw, INTS)
    return builder.bitcast(builder.shl(bits, constant_vector(INTS, 16)), FLOATS)


def narrow(builder: Any, value: Any, dtype: Any) -> Any:
    """LANES floats as elements of a dtype, rounded to nearest, ties to even."""
    if dtype == types.int16:  # float16
        return builder.fptrunc(value, HALVES)
    if dtype == types.uint16:  # bfloat16
        nan = builder.fcmp_unordered("uno", value, value)
        bits = builder.bitcast(value, INTS)
        odd = builder.and_(builder.lshr(bits, constant_vector(INTS, 16)), constant_vector(INTS, 1))
        bits = builder.add(bits, builder.add(odd, constant_vector(INTS, 0x7FFF)))
        bits = builder.select(nan, constant_vector(INTS, 0x7FC00000), bits)
        return builder.trunc(builder.lshr(bits, constant_vector(INTS, 16)), SHORTS)
    return value


@intrinsic  # type: ignore[untyped-decorator]
def load_vector(typing: Any, array: Any, index: Any) -> Any:
    """``array[index : index + LANES]`` as a Vector."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = element_pointer(context, builder, signature.args[0], *arguments)
        return _widened(builder, pointer, signature.args[0].dtype)

    return VECTOR(array, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def store_vector(typing: Any, array: Any, index: Any, vector: Any) -> Any:
    """``array[index : index + LANES] = vector``, rounded to nearest, ties to even."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        dtype = signature.args[0].dtype
        value = narrow(builder, arguments[2], dtype)
        pointer = element_pointer(context, builder, signature.args[0], *arguments[:2])
        builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, VECTOR), emit


@intrinsic  # type: ignore[untyped-decorator]
def load_codes(typing: Any, array: Any, index: Any, shift: Any, mask: Any) -> Any:
    """``(array[index : index + LANES] >> shift) & mask`` of uint8 as a Vector."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = element_pointer(context, builder, signature.args[0], *arguments[:2])
        bytes_ = builder.load(builder.bitcast(pointer, BYTES.as_pointer()), align=1)
        shift, mask = (spread_int(builder, builder.trunc(each, INT)) for each in arguments[2:])
        codes = builder.and_(builder.lshr(builder.zext(bytes_, INTS), shift), mask)
        return builder.sitofp(codes, FLOATS)

    return VECTOR(array, types.int64, types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def look_up(typing: Any, table: Any, array: Any, index: Any, mask: Any) -> Any:
    """``table[array[index : index + LANES] & mask]`` of uint8 as a Vector."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        table, array, index, mask = arguments
        pointer = element_pointer(context, builder, signature.args[1], array, index)
        bytes_ = builder.load(builder.bitcast(pointer, BYTES.as_pointer()), align=1)
        codes = builder.and_(builder.zext(bytes_, INTS), spread_int(builder, builder.trunc(mask, INT)))
        found = ir.Constant(FLOATS, ir.Undefined)
        for lane in range(LANES):
            place = ir.Constant(INT, lane)
            code = builder.zext(builder.extract_element(codes, place), ir.IntType(64))
            entry = builder.load(element_pointer(context, builder, signature.args[0], table, code))
            found = builder.insert_element(found, entry, place)
        return found

    return VECTOR(table, array, types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def expand_vector(typing: Any, array: Any, index: Any, bits: Any) -> Any:
    """Consecutive floats from ``array[index]`` on, in the lanes whose bits are set, lowest first; 0 in the others."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = element_pointer(context, builder, signature.args[0], *arguments[:2])
        mask_type = ir.VectorType(ir.IntType(1), LANES)
        mask = builder.bitcast(builder.trunc(arguments[2], ir.IntType(LANES)), mask_type)
        kind = ir.FunctionType(FLOATS, [FLOAT.as_pointer(), mask_type, FLOATS])
        expand = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.expandload.v{LANES}f32")
        return builder.call(expand, [pointer, mask, constant_vector(FLOATS, 0.0)])

    return VECTOR(array, types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def count_bits(typing: Any, bits: Any) -> Any:
    """How many are set."""
    return types.int64(types.int64), lambda context, builder, signature, arguments: builder.ctpop(
        arguments[0]
    )


@intrinsic  # type: ignore[untyped-decorator]
def splat(typing: Any, scalar: Any) -> Any:
    """A Vector of LANES times ``scalar``."""
    return VECTOR(types.float32), lambda context, builder, signature, arguments: spread_float(
        builder, arguments[0]
    )


def _maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic  # type: ignore[untyped-decorator]
def vector_max(typing: Any, a: Any, b: Any) -> Any:
    """The larger of each lane; b's where one of them is NaN."""
    return VECTOR(VECTOR, VECTOR), lambda context, builder, signature, arguments: _maximum(
        builder, *arguments
    )


@intrinsic  # type: ignore[untyped-decorator]
def vector_min(typing: Any, a: Any, b: Any) -> Any:
    """The smaller of each lane; b's where one of them is NaN."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", *arguments), *arguments)

    return VECTOR(VECTOR, VECTOR), emit


@intrinsic  # type: ignore[untyped-decorator]
def vector_add(typing: Any, a: Any, b: Any) -> Any:
    """Lane by lane."""
    return VECTOR(VECTOR, VECTOR), lambda context, builder, signature, arguments: builder.fadd(*arguments)


@intrinsic  # type: ignore[untyped-decorator]
def vector_multiply(typing: Any, a: Any, b: Any) -> Any:
    """Lane by lane."""
    return VECTOR(VECTOR, VECTOR), lambda context, builder, signature, arguments: builder.fmul(*arguments)


@intrinsic  # type: ignore[untyped-decorator]
def multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` lane by lane, rounded once where the CPU can."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, c = arguments
        return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    return VECTOR(VECTOR, VECTOR, VECTOR), emit


def _fold(builder: Any, vector: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """All lanes combined, by halves."""
    width = LANES
    while width > 1:
        width //= 2
        upper = [width + lane % width for lane in range(LANES)]
        moved = builder.shuffle_vector(vector, vector, ir.Constant(INTS, upper))
        vector = combine(builder, vector, moved)
    return builder.extract_element(vector, ir.Constant(INT, 0))


@intrinsic  # type: ignore[untyped-decorator]
def largest_lane(typing: Any, vector: Any) -> Any:
    """The largest lane."""
    return types.float32(VECTOR), lambda context, builder, signature, arguments: _fold(
        builder, arguments[0], _maximum
    )


@intrinsic  # type: ignore[untyped-decorator]
def sum_of_lanes(typing: Any, vector: Any) -> Any:
    """The sum of the lanes."""
    return types.float32(VECTOR), lambda context, builder, signature, arguments: _fold(
        builder, arguments[0], lambda builder, a, b: builder.fadd(a, b)
    )


def emit_exp2(builder: Any, a: Any, b: Any) -> Any:
    """See `exp2_of_difference`."""

    def multiply_add(x: Any, y: Any, z: Any) -> Any:
        return builder.fadd(builder.fmul(x, y, flags=("contract",)), z, flags=("contract",))

    x = builder.fsub(a, b)
    low = builder.fcmp_ordered("<", x, constant_vector(FLOATS, -125.0))
    x = builder.select(low, constant_vector(FLOATS, -125.0), x)
    # Beside 1.5 * 2**23 a float has no room for a fraction: the sum rounds x, and its lowest bits are the
    # integer, which moves into the exponent as it is.
    magic = constant_vector(FLOATS, 12582912.0)
    rounded = builder.fadd(x, magic)
    fraction = builder.fsub(x, builder.fsub(rounded, magic))
    power = constant_vector(FLOATS, EXP2[0])
    for coefficient in EXP2[1:]:
        power = multiply_add(power, fraction, constant_vector(FLOATS, coefficient))
    exponent = builder.shl(builder.bitcast(rounded, INTS), constant_vector(INTS, 23))
    power = builder.bitcast(builder.add(builder.bitcast(power, INTS), exponent), FLOATS)
    return builder.select(low, constant_vector(FLOATS, 0.0), power)


@intrinsic  # type: ignore[untyped-decorator]
def exp2_of_difference(typing: Any, a: Any, b: Any) -> Any:
    """``2 ** (a - b)`` for a <= b, to 1e-7; 0 below 2**-125, which no sum beside a 1 can tell."""
    return VECTOR(VECTOR, VECTOR), lambda context, builder, signature, arguments: emit_exp2(
        builder, *arguments
    )


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply_tile(
    typing: Any,
    rows: Any,
    vectors: Any,
    a: Any,
    i: Any,
    lda: Any,
    b: Any,
    j: Any,
    ldb: Any,
    step: Any,
    c: Any,
    k: Any,
    ldc: Any,
    inner: Any,
    add: Any,
) -> Any:
    """``c = a @ b``, or ``c += a @ b`` if ``add``, for a tile of ``rows`` x ``vectors`` held in registers.

    ``a``, ``b``, ``c`` are flat arrays; the tile starts at ``a[i]``, ``b[j]``, ``c[k]``, rows are ``lda``,
    ``ldb``, ``ldc`` apart, and ``inner`` products are summed. LANES columns of ``b`` lie side by side, the next
    ``step`` further. A ``b`` of uint32 has two rows in one: pairs of bfloat16, the upper row in the lower half. The
    sums have the same order.
    """
    if not (isinstance(rows, types.IntegerLiteral) and isinstance(vectors, types.IntegerLiteral)):
        return None
    tile = [(row, column) for row in range(rows.literal_value) for column in range(vectors.literal_value)]

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, i, lda, b, j, ldb, step, c, k, ldc, inner, add = arguments[2:]
        a_type, b_type, c_type = signature.args[2], signature.args[5], signature.args[9]
        paired = b_type.dtype == types.uint32

        def place(row: int, column: int) -> Any:
            start = builder.add(k, builder.mul(ldc, ir.Constant(ldc.type, row)))
            start = builder.add(start, ir.Constant(k.type, column * LANES))
            return element_pointer(context, builder, c_type, c, start)

        def columns(line: Any) -> list[Any]:
            """Where the tile's columns of a row, or of a pair of rows, are in b."""
            at = builder.add(j, builder.mul(line, ldb))
            offsets = [builder.mul(step, ir.Constant(step.type, n)) for n in range(vectors.literal_value)]
            return [
                element_pointer(context, builder, b_type, b, builder.add(at, offset)) for offset in offsets
            ]

        def add_row(term: Any, shared: list[Any]) -> None:
            for row, start in enumerate(starts):
                factor = builder.load(element_pointer(context, builder, a_type, a, builder.add(start, term)))
                factor = spread_float(builder, factor)
                for column, vector in enumerate(shared):
                    target = sums[row * len(shared) + column]
                    product = builder.fmul(factor, vector, flags=("contract",))
                    builder.store(builder.fadd(builder.load(target), product, flags=("contract",)), target)

        def halves(pointer: Any) -> tuple[Any, Any]:
            pairs = builder.load(builder.bitcast(pointer, INTS.as_pointer()), align=4)
            return split_pairs(builder, pairs)

        sums = [cgutils.alloca_once(builder, FLOATS) for _ in tile]
        for target in sums:
            builder.store(constant_vector(FLOATS, 0.0), target)
        with builder.if_then(add):
            for target, (row, column) in zip(sums, tile, strict=True):
                builder.store(_widened(builder, place(row, column), c_type.dtype), target)
        starts = [
            builder.add(i, builder.mul(lda, ir.Constant(lda.type, row))) for row in range(rows.literal_value)
        ]
        if paired:
            one = ir.Constant(inner.type, 1)
            pairs = builder.lshr(inner, one)
            with cgutils.for_range(builder, pairs) as loop:
                split = [halves(pointer) for pointer in columns(loop.index)]
                first = builder.shl(loop.index, one)
                add_row(first, [lower for lower, _ in split])
                add_row(builder.add(first, one), [upper for _, upper in split])
            # Of the last pair, maybe, the first alone: what was never written may be no number.
            with builder.if_then(builder.trunc(inner, ir.IntType(1))):
                add_row(builder.shl(pairs, one), [halves(pointer)[0] for pointer in columns(pairs)])
        else:
            with cgutils.for_range(builder, inner) as loop:
                pointers = columns(loop.index)
                add_row(loop.index, [_widened(builder, pointer, b_type.dtype) for pointer in pointers])
        for target, (row, column) in zip(sums, tile, strict=True):
            address = builder.bitcast(place(row, column), FLOATS.as_pointer())
            builder.store(builder.load(target), address, align=4)
        return context.get_dummy_value()

    n = types.int64
    return types.void(rows, vectors, a, n, n, b, n, n, n, c, n, n, n, types.boolean), emit


@intrinsic  # type: ignore[untyped-decorator]
def pointer_to(typing: Any, address: Any, dtype: Any) -> Any:
    """The pointer for `numba.carray`."""
    return types.CPointer(dtype.dtype)(
        types.int64, dtype
    ), lambda context, builder, signature, arguments: builder.inttoptr(
        arguments[0], context.get_value_type(signature.return_type)
    )


@intrinsic  # type: ignore[untyped-decorator]
def fetch_add_one(typing: Any, pointer: Any) -> Any:
    """Atomically add 1 to the int64 at ``pointer``; returns what it was."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.bitcast(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(pointer), emit
