# SPDX-License-Identifier: Apache-2.0
"""`encoded_attention` on the CPU.

Two passes over the requests and KV heads. The first gathers the block that fills up, and those that a prompt's part
goes through, as float32 tiles (keys transposed), encodes those that are full, and keeps the rest as it is. The second
reads: a task is a request, a KV head and up to WIDE_ROWS rows of one block, which decodes the blocks before it one by
one into a tile that stays in the first-level cache, with an online softmax over CHUNK tokens at a time.
"""

import ctypes
import functools
from typing import Any

import numpy as np
import torch

from vllm_ext.kernels.attention_parts_numba import LOG2_E, c_function, run_in_threads
from vllm_ext.kernels.block_format import BlockFormat
from vllm_ext.kernels.block_forms_numba import Form, form_of, sources
from vllm_ext.kernels.encoded_attention import EncodedRows
from vllm_ext.kernels.encoded_passes_numba import attend, write
from vllm_ext.kernels.numba_vectors import LANES

WIDE_ROWS = 96  # rows of a task: their scores of a chunk stay in the second-level cache
WIDE_ROWS_THREADED = 24  # smaller, so that one request's few KV heads keep several threads busy

NUMBERS = tuple(f"number_{i}" for i in range(4))  # those of `BlockFormat.numbers`


class _Arguments(ctypes.Structure):
    """What both passes read."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "next_task",
            *("query", "query_token_stride", "query_head_stride"),
            *("key", "key_token_stride", "key_head_stride"),
            *("value", "value_token_stride", "value_head_stride"),
            *("output", "output_token_stride", "output_head_stride"),
            *("pages", "page_block_stride", "page_head_stride"),
            *("tiles", "tile_width", "first_tile"),
            *("group", "num_kv_heads", "head_size", "block_size"),
            *("element_size", "tail_tokens", "raw_vectors", *NUMBERS),
            *("window_blocks", "sink_blocks", "span_blocks"),
            *("block_table", "max_blocks", "first_row", "num_rows", "num_settled", "context_len", "parents"),
            *("reads", "lists", "list_stride", "lengths", "list_of_row", "watched", "mass", "mass_stride"),
            "num_requests",
            "wide_rows",
        )
    ] + [("scale", ctypes.c_double)]


def encoded_attention_numba(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    output: torch.Tensor,
    rows: EncodedRows,
    codec: BlockFormat,
    scale: float,
    prepared: dict[str, Any],
) -> None:
    """See `vllm_ext.kernels.encoded_attention.encoded_attention`, which validates.

    Args:
        query: and the others as there.
        prepared: empty, or from a call with the same rows, codec and tensors of the same form.

    Raises:
        ValueError: there are no kernels for the codec, or block or head size is no multiple of LANES.
    """
    if not prepared:
        threads = torch.get_num_threads()
        passes = _compiled(form_of(codec.kernels), query.dtype)
        prepared.update(passes=passes, threads=threads)
        prepared["arguments"], prepared["kept"] = _arguments(
            query, key, value, pages, output, rows, codec, threads
        )
        prepared["mass"] = _watch(prepared["arguments"], rows, query.shape[1])
    arguments, threads = prepared["arguments"], prepared["threads"]
    arguments.query, arguments.output = query.data_ptr(), output.data_ptr()
    arguments.key, arguments.value = key.data_ptr(), value.data_ptr()
    arguments.pages = pages.data_ptr()
    arguments.scale = scale * LOG2_E
    for run in prepared["passes"]:
        arguments.next_task = 0
        run_in_threads(run, arguments, threads)
    if rows.reading is not None and prepared["mass"] is not None:
        rows.reading.mass.add_(prepared["mass"].sum(1))


def _watch(arguments: _Arguments, rows: EncodedRows, num_heads: int) -> torch.Tensor | None:
    """Tell the second pass what rows read; float32 ``[num_watched, num_heads, max_blocks]`` for it to write."""
    reading = rows.reading
    if reading is None:
        return None
    for name in ("lists", "lengths", "list_of_row", "watched"):
        setattr(arguments, name, getattr(reading, name).data_ptr())
    arguments.reads, arguments.list_stride = 1, reading.lists.stride(0)
    if not len(reading.mass):
        return None
    mass = torch.zeros(len(reading.mass), num_heads, reading.mass.shape[1])
    arguments.mass, arguments.mass_stride = mass.data_ptr(), mass.shape[2]
    return mass


def _arguments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    output: torch.Tensor,
    rows: EncodedRows,
    codec: BlockFormat,
    threads: int,
) -> tuple[_Arguments, tuple[torch.Tensor, torch.Tensor]]:
    """All but the addresses of the first five and the scale; and what must live as long."""
    head_size, block_size, num_kv_heads = codec.head_size, codec.block_size, pages.shape[1]
    if block_size % LANES or head_size % LANES:
        raise ValueError(
            f"block_size={block_size}, head_size={head_size}: backend='numba' takes multiples of {LANES}; use "
            "backend='torch'"
        )
    # A prompt's part has a tile a block, drafts' rows are all in the first.
    drafts = rows.num_settled < rows.num_rows
    begin, end = rows.context_len // block_size, rows.context_len + rows.num_rows
    num_tiles = torch.where(drafts, 1, -(-end // block_size) - begin)
    most = torch.where(drafts, end - begin * block_size, block_size)
    width = -(-int(most.max()) // LANES) * LANES
    first_tile = (num_tiles.cumsum(0) - num_tiles).to(torch.int64)
    tiles = torch.empty(int(num_tiles.sum()) * num_kv_heads * 2 * width * head_size)
    strides = {
        f"{name}_{part}_stride": tensor.stride(i)
        for name, tensor in {"query": query, "key": key, "value": value, "output": output}.items()
        for i, part in enumerate(("token", "head"))
    }
    numbers = [*codec.numbers, *[0] * len(NUMBERS)][: len(NUMBERS)]
    arguments = _Arguments(
        **strides,
        page_block_stride=pages.stride(0),
        page_head_stride=pages.stride(1),
        tiles=tiles.data_ptr(),
        tile_width=width,
        first_tile=first_tile.data_ptr(),
        group=query.shape[1] // num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        element_size=query.element_size(),
        tail_tokens=codec.raw_tokens_per_block(query.element_size()),
        raw_vectors=codec.raw_vectors,
        **dict(zip(NUMBERS, numbers, strict=True)),
        window_blocks=rows.block_table.shape[1] if codec.window_blocks is None else codec.window_blocks,
        sink_blocks=codec.sink_blocks,
        span_blocks=codec.span_blocks,
        block_table=rows.block_table.data_ptr(),
        max_blocks=rows.block_table.stride(0),
        first_row=rows.first_row.data_ptr(),
        num_rows=rows.num_rows.data_ptr(),
        num_settled=rows.num_settled.data_ptr(),
        context_len=rows.context_len.data_ptr(),
        parents=rows.parents.data_ptr(),
        num_requests=rows.num_rows.shape[0],
        wide_rows=WIDE_ROWS_THREADED if threads > 1 else WIDE_ROWS,
    )
    return arguments, (tiles, first_tile)


# As numba has the elements of queries, keys and values: bfloat16 and float16 as their bits.
_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
}


@functools.cache
def _compiled(form: Form, dtype: torch.dtype) -> tuple[Any, Any]:
    """Both passes as C functions of one pointer, compiled at the first call of each codec's form and dtype."""
    called = sources("encoded_passes_numba", form.__name__)
    writes, attends = (c_function(each, _Arguments) for each in _passes(form, _DTYPES[dtype], called))
    return writes, attends


def _passes(form: Form, dtype: Any, called: str) -> tuple[Any, Any]:
    """What writes and what attends. Code on disk is told apart by what these have in their closures."""

    def write_form(pointer: Any) -> None:
        _ = called
        write(pointer, dtype, form)

    def attend_form(pointer: Any) -> None:
        _ = called
        attend(pointer, dtype, form)

    return write_form, attend_form
