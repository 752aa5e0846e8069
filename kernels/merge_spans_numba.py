# SPDX-License-Identifier: Apache-2.0
"""Blocks that become one, on the CPU: a task is a request and a KV head."""

import ctypes
import functools
from typing import Any

import numba
import numpy as np
import torch

from vllm_ext.kernels.attention_parts_numba import c_function, run_in_threads
from vllm_ext.kernels.block_format import BlockFormat
from vllm_ext.kernels.block_forms_numba import Form, form_of, sources
from vllm_ext.kernels.encoded_attention import EncodedRows
from vllm_ext.kernels.numba_vectors import fetch_add_one, pointer_to

NUMBERS = tuple(f"number_{i}" for i in range(4))  # those of `BlockFormat.numbers`


class _Arguments(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "next_task",
            *("pages", "page_block_stride", "page_head_stride"),
            *("num_kv_heads", "head_size", "block_size", "span_blocks", "sink_blocks", *NUMBERS),
            *("block_table", "max_blocks", "spans", "num_requests"),
        )
    ]


def merge_spans_numba(pages: torch.Tensor, rows: EncodedRows, due: torch.Tensor, codec: BlockFormat) -> None:
    """See `vllm_ext.kernels.encoded_attention_ref.merge_spans_ref`.

    Raises:
        ValueError: there is no kernel for the codec.
    """
    numbers = [*codec.numbers, *[0] * len(NUMBERS)][: len(NUMBERS)]
    arguments = _Arguments(
        pages=pages.data_ptr(),
        page_block_stride=pages.stride(0),
        page_head_stride=pages.stride(1),
        num_kv_heads=pages.shape[1],
        head_size=codec.head_size,
        block_size=codec.block_size,
        span_blocks=codec.span_blocks,
        sink_blocks=codec.sink_blocks,
        **dict(zip(NUMBERS, numbers, strict=True)),
        block_table=rows.block_table.data_ptr(),
        max_blocks=rows.block_table.stride(0),
        spans=due.data_ptr(),
        num_requests=len(due),
    )
    run_in_threads(_compiled(form_of(codec.kernels)), arguments, torch.get_num_threads())


@functools.cache
def _compiled(form: Form) -> Any:
    if not hasattr(form, "merge_span"):
        raise ValueError(f"{form.__name__} has no kernel that merges; use backend='torch'")
    return c_function(_merges(form, sources("merge_spans_numba", form.__name__)), _Arguments)


def _merges(form: Form, called: str) -> Any:
    """Code on disk is told apart by what this has in its closure."""

    def merge_form(pointer: Any) -> None:
        _ = called
        _merge(pointer, form)

    return merge_form


@numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _merge(pointer: Any, form: Any) -> None:
    args = numba.carray(pointer, 1)[0]
    requests, heads = args.num_requests, args.num_kv_heads
    numbers = (args.number_0, args.number_1, args.number_2, args.number_3)
    table = numba.carray(pointer_to(args.block_table, np.int32), requests * args.max_blocks)
    spans = numba.carray(pointer_to(args.spans, np.int32), requests)
    halves = numba.carray(pointer_to(args.pages, np.int16), 1)  # the lengths of these are nominal
    floats = numba.carray(pointer_to(args.pages, np.float32), 1)
    mine = fetch_add_one(pointer)
    for task in range(requests * heads):
        if task != mine:
            continue
        mine = fetch_add_one(pointer)
        request, head = task // heads, task % heads
        span = np.int64(spans[request])
        if span < 0:
            continue
        first = request * args.max_blocks + args.sink_blocks + span * args.span_blocks
        starts = np.empty(args.span_blocks, np.int64)
        for i in range(args.span_blocks):
            starts[i] = np.int64(table[first + i]) * args.page_block_stride + head * args.page_head_stride
        form.merge_span(halves, floats, starts, args.head_size, args.block_size, numbers)
