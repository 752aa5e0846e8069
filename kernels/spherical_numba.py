# SPDX-License-Identifier: Apache-2.0
"""Blocks of codec spherical, for kernels of numba; `vllm_ext.codecs.spherical`, the readable form, says what is where.

Arguments as in `kivi_numba`; ``units`` is the codec's number. Keys are made of LANES tokens at a time: lengths from the
radius down, with sines of the other angles by polynomials, and first angles by tables.
"""

from typing import Any

import numba
import numpy as np

from vllm_ext.kernels.numba_vectors import (
    LANES,
    load_codes,
    load_vector,
    look_up,
    splat,
    store_vector,
    vector_add,
    vector_multiply,
)

LARGEST = np.float32(65504.0)
HIGH_FIRST, HIGH_OTHER, LOW_FIRST, LOW_OTHER = 8, 8, 5, 3  # bits
_TURNS = {bits: np.arange(1 << bits) * (2 * np.pi / (1 << bits)) for bits in (HIGH_FIRST, LOW_FIRST)}
COS_HIGH, SIN_HIGH = (f(_TURNS[HIGH_FIRST]).astype(np.float32) for f in (np.cos, np.sin))
COS_LOW, SIN_LOW = (f(_TURNS[LOW_FIRST]).astype(np.float32) for f in (np.cos, np.sin))
QUARTER, HALF_ROOT = np.float32(np.pi / 4), np.float32(np.sqrt(0.5))


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _places(at: int, units: int, head_size: int, block_size: int) -> Any:
    """Where codes of the values, their scales, the radii, the ranges and the numbers of units begin, in bytes; and for
    how many tokens there is room.
    """
    most = min(block_size, units * LANES)
    values = at + units * LANES * head_size // 2
    scales = values + most * head_size // 2
    radii = scales + 4 * most
    ranges = radii + 2 * most
    return values, scales, radii, ranges, ranges + 2 * (head_size - 2), most


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _half(halves: Any, at: int, side: Any, num: int) -> None:
    """Write ``num`` numbers of ``side`` as float16, and back what they are then; ``side`` has LANES more."""
    room = np.empty(LANES, np.float32)
    of_room = np.empty(LANES, np.int16)
    for i in range(0, num, LANES):
        for j in range(LANES):
            room[j] = min(max(side[i + j], -LARGEST), LARGEST) if i + j < num else np.float32(0.0)
        store_vector(of_room, 0, load_vector(room, 0))
        store_vector(room, 0, load_vector(of_room, 0))
        for j in range(min(LANES, num - i)):
            halves[at // 2 + i + j] = of_room[j]
            side[i + j] = room[j]


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def encode_block(
    pages: Any,
    halves: Any,
    at: int,
    side: Any,
    tiles: Any,
    keys: int,
    key_stride: int,
    values: int,
    head_size: int,
    block_size: int,
    numbers: Any,
) -> None:
    """Write a block's bytes. ``tiles[keys:]`` has the keys transposed, rows ``key_stride`` apart."""
    units, half = numbers[0], head_size // 2
    of_values, scales, _, ranges, counts, most = _places(at, units, head_size, block_size)
    first = np.empty(block_size * half, np.float32)
    others = np.empty(block_size * half, np.float32)
    radius = np.empty(block_size + LANES, np.float32)
    length = np.empty(head_size, np.float32)
    for t in range(block_size):
        for i in range(half):
            x, y = tiles[keys + i * key_stride + t], tiles[keys + (i + half) * key_stride + t]
            first[t * half + i] = np.arctan2(y, x)
            length[i] = np.sqrt(x * x + y * y)
        place, n = t * half, half // 2
        while n:
            for i in range(n):
                x, y = length[i], length[i + n]
                others[place + i] = np.arctan2(y, x)
                length[i] = np.sqrt(x * x + y * y)
            place += n
            n //= 2
        radius[t] = length[0]
    low, width = np.zeros(half + LANES, np.float32), np.zeros(half + LANES, np.float32)
    for i in range(half - 1):
        least = largest = others[i]
        for t in range(1, block_size):
            least, largest = min(least, others[t * half + i]), max(largest, others[t * half + i])
        low[i], width[i] = least, largest
    _half(halves, ranges, low, half - 1)
    for i in range(half - 1):
        width[i] = max(width[i] - low[i], np.float32(0.0))
    _half(halves, ranges + 2 * (half - 1), width, half - 1)
    room = np.empty(block_size + LANES, np.int16)
    _half(room, 0, radius, block_size)

    codes = np.empty((2, block_size, head_size), np.uint8)  # of the low tier and the high one
    errors = np.zeros((3, block_size), np.float32)  # dropped, low, high
    scale, least_of = np.empty(block_size + LANES, np.float32), np.empty(block_size + LANES, np.float32)
    for t in range(block_size):
        least = largest = tiles[values + t * head_size]
        for d in range(1, head_size):
            x = tiles[values + t * head_size + d]
            least, largest = min(least, x), max(largest, x)
        scale[t], least_of[t] = (largest - least) / np.float32(15.0), least
    _half(room, 0, scale, block_size)
    _half(room, 0, least_of, block_size)
    for t in range(block_size):
        of_value = np.float32(0.0)
        for d in range(head_size):
            x = tiles[values + t * head_size + d]
            errors[0, t] += x * x + tiles[keys + d * key_stride + t] ** 2
            of_value += (x - (_code(x, scale[t], least_of[t]) * scale[t] + least_of[t])) ** 2
        for tier in range(2):
            errors[1 + tier, t] = of_value + _quantise(
                *(tiles, keys + t, key_stride, first, others, t * half, radius[t], low, width),
                *(codes[tier, t], length, half, tier),
            )
    order = np.empty(block_size, np.int64)
    num_high, num_low = _tiers(errors, order, units, block_size)
    pages[counts], pages[counts + 1] = num_high // LANES, num_low // LANES
    for slot in range(num_high):
        for i in range(head_size):
            pages[at + i * num_high + slot] = codes[1, order[slot], i]
    start = at + head_size * num_high
    for slot in range(num_low):
        token = order[num_high + slot]
        for i in range(half):
            pages[start + i * num_low + slot] = codes[0, token, i] | codes[0, token, half + i] << LOW_FIRST
    for slot in range(most):
        if slot < num_high + num_low:
            token = order[slot]
            side[slot], side[most + slot], side[2 * most + slot] = (
                scale[token],
                least_of[token],
                radius[token],
            )
            for i in range(half):
                low_code = _code(tiles[values + token * head_size + i], scale[token], least_of[token])
                high_code = _code(tiles[values + token * head_size + half + i], scale[token], least_of[token])
                pages[of_values + slot * half + i] = np.int64(low_code) | np.int64(high_code) << 4
        else:
            side[slot] = side[most + slot] = side[2 * most + slot] = np.float32(0.0)
            for i in range(half):
                pages[of_values + slot * half + i] = 0
    for i in range(0, 3 * most, LANES):
        store_vector(halves, scales // 2 + i, load_vector(side, i))


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _code(x: Any, scale: Any, least: Any) -> Any:
    if scale <= np.float32(0.0):
        return np.float32(0.0)
    return min(max(np.rint((x - least) / scale), np.float32(0.0)), np.float32(15.0))


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _quantise(
    x: Any,
    start: int,
    stride: int,
    first: Any,
    others: Any,
    place: int,
    radius: Any,
    low: Any,
    width: Any,
    codes: Any,
    length: Any,
    half: int,
    tier: int,
) -> Any:
    """Codes of a key; returns its squared error."""
    turns = 1 << HIGH_FIRST if tier else 1 << LOW_FIRST
    most = np.float32((1 << HIGH_OTHER) - 1 if tier else (1 << LOW_OTHER) - 1)
    for i in range(half):
        turn = np.int64(np.rint(first[place + i] * np.float32(turns / (2 * np.pi))))
        codes[i] = turn & (turns - 1)
    codes[2 * half - 1] = 0
    for i in range(half - 1):
        step = width[i] / most if width[i] > np.float32(0.0) else np.float32(1.0)
        code = np.rint((others[place + i] - low[i]) / step)
        codes[half + i] = np.int64(min(max(code, np.float32(0.0)), most))
    length[0] = radius
    n, end = 1, half - 1
    while end:
        for i in range(n):
            angle = low[end - n + i] + np.float32(codes[half + end - n + i]) * (width[end - n + i] / most)
            length[n + i] = length[i] * np.sin(angle)
            length[i] = length[i] * np.cos(angle)
        end -= n
        n *= 2
    error = np.float32(0.0)
    for i in range(half):
        if tier:
            cosine, sine = COS_HIGH[codes[i]], SIN_HIGH[codes[i]]
        else:
            cosine, sine = COS_LOW[codes[i]], SIN_LOW[codes[i]]
        error += (x[start + i * stride] - length[i] * cosine) ** 2
        error += (x[start + (half + i) * stride] - length[i] * sine) ** 2
    return error


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _tiers(errors: Any, order: Any, units: int, block_size: int) -> Any:
    """``order`` begins with the tokens of the high tier and then of the low one; returns how many each."""
    groups = block_size // LANES
    gain = np.argsort(errors[2] - errors[1], kind="mergesort")  # those that gain the most first
    found_high, found_low, best = np.int64(-1), np.int64(0), np.float64(0.0)
    tier, chosen = np.zeros(block_size, np.int64), np.zeros(block_size, np.int64)
    for num_high in range(units // 2 + 1):
        num_low = min(units - 2 * num_high, groups - num_high)
        if num_low < 0:
            continue
        tier[:] = 0
        for i in range(num_high * LANES):
            tier[gain[i]] = 2
        loss = np.empty(block_size, np.float32)
        for t in range(block_size):
            loss[t] = np.float32(np.inf) if tier[t] else errors[1, t] - errors[0, t]
        by_loss = np.argsort(loss, kind="mergesort")
        for i in range(num_low * LANES):
            tier[by_loss[i]] = 1
        error = np.float64(0.0)
        for t in range(block_size):
            error += errors[tier[t], t]
        if found_high < 0 or error < best:
            found_high, found_low, best = np.int64(num_high), np.int64(num_low), error
            chosen[:] = tier
    n: Any = np.int64(0)
    for which in (2, 1):
        for t in range(block_size):
            if chosen[t] == which:
                order[n] = t
                n += 1
    return found_high * LANES, found_low * LANES


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def decode_keys(
    pages: Any, halves: Any, at: int, side: Any, out: Any, head_size: int, block_size: int, numbers: Any
) -> None:
    """``out`` becomes the keys, transposed, 0 of tokens that are not there."""
    half = head_size // 2
    _, _, radii, ranges, counts, _ = _places(at, numbers[0], head_size, block_size)
    num_high, num_low = np.int64(pages[counts]) * LANES, np.int64(pages[counts + 1]) * LANES
    width = head_size  # where in side the ranges' widths are, behind where they begin
    for i in range(0, half, LANES):  # one more than there are
        store_vector(side, i, load_vector(halves, ranges // 2 + i))
        store_vector(side, width + i, load_vector(halves, ranges // 2 + half - 1 + i))
    for slot in range(0, block_size, LANES):
        if slot >= num_high + num_low:
            for d in range(head_size):
                store_vector(out, d * block_size + slot, splat(np.float32(0.0)))
            continue
        in_high = slot < num_high
        if in_high:
            codes, stride, shift, mask = at + half * num_high + slot, num_high, 0, 255
        else:
            codes, stride, shift, mask = at + head_size * num_high + slot - num_high, num_low, LOW_FIRST, 7
        share = np.float32(1.0) / np.float32(mask)
        store_vector(out, slot, load_vector(halves, radii // 2 + slot))
        n, end = 1, half - 1
        while end:
            for i in range(n):
                angle = end - n + i
                code = load_codes(pages, codes + angle * stride, shift, mask)
                code = vector_multiply(code, splat(side[width + angle] * share))
                away = vector_add(code, splat(side[angle] - QUARTER))
                square = vector_multiply(away, away)
                sine, cosine = _sine(away, square), _cosine(square)
                length = vector_multiply(load_vector(out, i * block_size + slot), splat(HALF_ROOT))
                minus = vector_multiply(sine, splat(np.float32(-1.0)))
                store_vector(out, i * block_size + slot, vector_multiply(length, vector_add(cosine, minus)))
                store_vector(
                    out, (n + i) * block_size + slot, vector_multiply(length, vector_add(cosine, sine))
                )
            end -= n
            n *= 2
        for i in range(half):
            length = load_vector(out, i * block_size + slot)
            if in_high:
                place = at + i * num_high + slot
                cosine, sine = look_up(COS_HIGH, pages, place, 255), look_up(SIN_HIGH, pages, place, 255)
            else:
                place = codes + i * num_low
                cosine, sine = look_up(COS_LOW, pages, place, 31), look_up(SIN_LOW, pages, place, 31)
            store_vector(out, i * block_size + slot, vector_multiply(length, cosine))
            store_vector(out, (half + i) * block_size + slot, vector_multiply(length, sine))


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _sine(x: Any, square: Any) -> Any:
    """Of a Vector within a quarter of half a turn."""
    power = splat(np.float32(-1 / 5040))
    power = vector_add(vector_multiply(power, square), splat(np.float32(1 / 120)))
    power = vector_add(vector_multiply(power, square), splat(np.float32(-1 / 6)))
    power = vector_add(vector_multiply(power, square), splat(np.float32(1.0)))
    return vector_multiply(power, x)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _cosine(square: Any) -> Any:
    """Of a Vector within a quarter of half a turn, by its square."""
    power = splat(np.float32(1 / 40320))
    power = vector_add(vector_multiply(power, square), splat(np.float32(-1 / 720)))
    power = vector_add(vector_multiply(power, square), splat(np.float32(1 / 24)))
    power = vector_add(vector_multiply(power, square), splat(np.float32(-0.5)))
    return vector_add(vector_multiply(power, square), splat(np.float32(1.0)))


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def decode_values(
    pages: Any, halves: Any, at: int, side: Any, out: Any, head_size: int, block_size: int, numbers: Any
) -> None:
    """``out`` becomes the values, 0 of tokens that are not there."""
    half = head_size // 2
    values, scales, _, _, counts, most = _places(at, numbers[0], head_size, block_size)
    kept = (np.int64(pages[counts]) + np.int64(pages[counts + 1])) * LANES
    for i in range(0, 2 * most, LANES):
        store_vector(side, i, load_vector(halves, scales // 2 + i))
    for slot in range(block_size):
        if slot >= kept:
            for d in range(0, head_size, LANES):
                store_vector(out, slot * head_size + d, splat(np.float32(0.0)))
            continue
        scale, least = splat(side[slot]), splat(side[most + slot])
        for part in range(2):
            for i in range(0, half, LANES):
                code = load_codes(pages, values + slot * half + i, 4 * part, 15)
                code = vector_add(vector_multiply(code, scale), least)
                store_vector(out, slot * head_size + part * half + i, code)


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def add_counts(
    pages: Any,
    floats: Any,
    at: int,
    scores: Any,
    start: int,
    stride: int,
    rows: int,
    head_size: int,
    block_size: int,
    numbers: Any,
) -> None:
    """Of ``rows`` rows of scores, ``stride`` apart, those of tokens that are not there become -inf."""
    counts = _places(at, numbers[0], head_size, block_size)[4]
    kept = (np.int64(pages[counts]) + np.int64(pages[counts + 1])) * LANES
    for t in range(kept, block_size, LANES):
        for row in range(rows):
            store_vector(scores, start + row * stride + t, splat(np.float32(-np.inf)))
