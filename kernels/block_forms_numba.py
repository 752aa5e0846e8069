# SPDX-License-Identifier: Apache-2.0
"""What is in a block, by codec, for kernels of numba that are compiled once for each.

numba keeps no code on disk of what is handed functions. So a kernel is handed a tuple of zeros, whose length says which
codec's functions it calls: that is part of its type. Arguments behind it are those of `kivi_numba`; a codec has its
functions in a file of its own.
"""

from typing import Any

from numba.extending import overload

from vllm_ext.kernels import (
    actqkv_numba,
    chelsea_numba,
    gear_numba,
    kivi_numba,
    mustafar_numba,
    spherical_numba,
    streaming_llm_numba,
)

Form = tuple[int, ...]

# By the length of a form, less one: what encodes, and what decodes. Some lay keys and values out alike.
_FUNCTIONS = (
    (kivi_numba.encode_block, kivi_numba.decode_keys, kivi_numba.decode_values),
    (gear_numba.encode_block, gear_numba.decode_keys, gear_numba.decode_values),
    (mustafar_numba.encode_block, mustafar_numba.decode_keys, mustafar_numba.decode_values),
    (streaming_llm_numba.encode_block, streaming_llm_numba.decode_keys, streaming_llm_numba.decode_values),
    (chelsea_numba.encode_block, streaming_llm_numba.decode_keys, streaming_llm_numba.decode_values),
    (actqkv_numba.encode_block, streaming_llm_numba.decode_keys, streaming_llm_numba.decode_values),
    (spherical_numba.encode_block, spherical_numba.decode_keys, spherical_numba.decode_values),
)
_PLACES = {
    "kivi": 0,
    "gear": 1,
    "mustafar": 2,
    "streaming_llm": 3,
    "chelsea": 4,
    "actqkv": 5,
    "spherical": 6,
}
MERGES, DROPS = 5, 7  # lengths


def form_of(codec: str) -> Form:
    """The form of a codec.

    Raises:
        ValueError: it has none.
    """
    if codec not in _PLACES:
        raise ValueError(f"codec {codec!r} has no numba kernels; use backend='torch'")
    return (0,) * (_PLACES[codec] + 1)


def encode_block(
    form: Form,
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
    raise NotImplementedError


@overload(encode_block, strict=False)  # type: ignore[untyped-decorator]
def _encode_block(
    form: Any,
    pages: Any,
    halves: Any,
    at: Any,
    side: Any,
    tiles: Any,
    keys: Any,
    key_stride: Any,
    values: Any,
    head_size: Any,
    block_size: Any,
    numbers: Any,
) -> Any:
    encode = _FUNCTIONS[form.count - 1][0]

    def call(  # type: ignore[no-untyped-def]
        form, pages, halves, at, side, tiles, keys, key_stride, values, head_size, block_size, numbers
    ):
        encode(pages, halves, at, side, tiles, keys, key_stride, values, head_size, block_size, numbers)

    return call


def decode_keys(
    form: Form,
    pages: Any,
    halves: Any,
    at: int,
    side: Any,
    out: Any,
    head_size: int,
    block_size: int,
    numbers: Any,
) -> None:
    """``out`` becomes the keys, transposed."""
    raise NotImplementedError


@overload(decode_keys, strict=False)  # type: ignore[untyped-decorator]
def _decode_keys(
    form: Any,
    pages: Any,
    halves: Any,
    at: Any,
    side: Any,
    out: Any,
    head_size: Any,
    block_size: Any,
    numbers: Any,
) -> Any:
    decode = _FUNCTIONS[form.count - 1][1]

    def call(form, pages, halves, at, side, out, head_size, block_size, numbers):  # type: ignore[no-untyped-def]
        decode(pages, halves, at, side, out, head_size, block_size, numbers)

    return call


def decode_values(
    form: Form,
    pages: Any,
    halves: Any,
    at: int,
    side: Any,
    out: Any,
    head_size: int,
    block_size: int,
    numbers: Any,
) -> None:
    """``out`` becomes the values."""
    raise NotImplementedError


@overload(decode_values, strict=False)  # type: ignore[untyped-decorator]
def _decode_values(
    form: Any,
    pages: Any,
    halves: Any,
    at: Any,
    side: Any,
    out: Any,
    head_size: Any,
    block_size: Any,
    numbers: Any,
) -> Any:
    decode = _FUNCTIONS[form.count - 1][2]

    def call(form, pages, halves, at, side, out, head_size, block_size, numbers):  # type: ignore[no-untyped-def]
        decode(pages, halves, at, side, out, head_size, block_size, numbers)

    return call


def add_counts(
    form: Form,
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
    """To ``rows`` rows of scores (base 2), ``stride`` apart, what a block's tokens stand for: of codecs that merge
    several, and of those that drop some nothing.
    """
    raise NotImplementedError


@overload(add_counts, strict=False)  # type: ignore[untyped-decorator]
def _add_counts(
    form: Any,
    pages: Any,
    floats: Any,
    at: Any,
    scores: Any,
    start: Any,
    stride: Any,
    rows: Any,
    head_size: Any,
    block_size: Any,
    numbers: Any,
) -> Any:
    if form.count == MERGES:

        def call(  # type: ignore[no-untyped-def]
            form, pages, floats, at, scores, start, stride, rows, head_size, block_size, numbers
        ):
            chelsea_numba.add_counts(floats, at, scores, start, stride, rows, head_size, block_size)

    elif form.count == DROPS:

        def call(  # type: ignore[no-untyped-def]
            form, pages, floats, at, scores, start, stride, rows, head_size, block_size, numbers
        ):
            spherical_numba.hide_dropped(
                pages, at, scores, start, stride, rows, head_size, block_size, numbers[0]
            )

    else:

        def call(  # type: ignore[no-untyped-def]
            form, pages, floats, at, scores, start, stride, rows, head_size, block_size, numbers
        ):
            pass

    return call
