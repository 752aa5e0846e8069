# SPDX-License-Identifier: Apache-2.0
"""`tree_conv` on the CPU: a task is BLOCK channels of all requests, as its weights are turned once.

A request's inputs, the text's, the pending and the step's, lie one after the other in a float32 scratch, each with the
place of the one before it. Threads are torch's, as in `tree_attention_numba`.
"""

import ctypes
import functools
from typing import Any

import numba
import numpy as np
import torch
from numba.extending import intrinsic

from vllm_ext.kernels.attention_parts_numba import LOG2_E, c_function, run_in_threads
from vllm_ext.kernels.numba_rows import KINDS, read_row, write_row
from vllm_ext.kernels.numba_vectors import (
    FLOATS,
    LANES,
    VECTOR,
    constant_vector,
    emit_exp2,
    fetch_add_one,
    load_vector,
    multiply_add,
    pointer_to,
    store_vector,
)

BLOCK = 128  # channels


class _Arguments(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "next_task",
            *("x", "x_row", "out", "out_row"),
            *("state", "state_block", "state_channel", "state_column"),
            *("weight", "weight_channel", "weight_column", "bias"),
            *("blocks", "row_start", "parents", "pending", "num_pending", "out_start"),
            *("requests", "most_pending", "channels", "width", "silu"),
            *("kind", "state_kind", "weight_kind"),
        )
    ]


def tree_conv_numba(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: torch.Tensor,
    row_start: torch.Tensor,
    parents: torch.Tensor,
    pending: torch.Tensor,
    num_pending: torch.Tensor,
    out_start: torch.Tensor,
    out: torch.Tensor,
    silu: bool,
) -> None:
    """See `vllm_ext.kernels.tree_conv.tree_conv`, which validates all but the channels.

    Raises:
        ValueError: there is no multiple of LANES of them.
    """
    channels, width = weight.shape
    if channels % LANES:
        raise ValueError(f"D={channels}: backend='numba' takes multiples of {LANES}; use backend='torch'")
    arguments = _Arguments(
        0,
        *(x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0)),
        *(state.data_ptr(), *state.stride(), weight.data_ptr(), *weight.stride()),
        0 if bias is None else bias.data_ptr(),
        *(each.data_ptr() for each in (blocks, row_start, parents, pending, num_pending, out_start)),
        *(len(blocks), pending.shape[1], channels, width, silu),
        *(KINDS[each.dtype] for each in (x, state, weight)),
    )
    run_in_threads(_compiled(), arguments, torch.get_num_threads())


@functools.cache
def _compiled() -> Any:
    """A C function of one pointer, compiled at the first call, not at import."""
    return c_function(_convolve, _Arguments)


@intrinsic  # type: ignore[untyped-decorator]
def _silu(typing: Any, y: Any) -> Any:
    """``y * sigmoid(y)``, lane by lane."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (y,) = arguments
        zero, one = constant_vector(FLOATS, 0.0), constant_vector(FLOATS, 1.0)
        negative = builder.fcmp_ordered("<", y, zero)
        size = builder.select(negative, y, builder.fneg(y))  # -|y|
        power = emit_exp2(builder, builder.fmul(size, constant_vector(FLOATS, LOG2_E)), zero)
        share = builder.select(negative, power, one)
        return builder.fdiv(builder.fmul(y, share), builder.fadd(one, power))

    return VECTOR(VECTOR), emit


def _convolve(pointer: Any) -> None:
    """All tasks that no other thread takes; ``pointer`` is to `_Arguments`."""
    args = numba.carray(pointer, 1)[0]
    requests, width, kind = args.requests, args.width, args.kind
    blocks = numba.carray(pointer_to(args.blocks, np.int32), requests)
    row_start = numba.carray(pointer_to(args.row_start, np.int32), requests + 1)
    parents = numba.carray(pointer_to(args.parents, np.int32), 1 << 60)
    pending = numba.carray(pointer_to(args.pending, np.int32), requests * args.most_pending)
    num_pending = numba.carray(pointer_to(args.num_pending, np.int32), requests)
    out_start = numba.carray(pointer_to(args.out_start, np.int32), requests)

    most: Any = 0
    for i in range(requests):
        most = max(most, np.int64(row_start[i + 1] - row_start[i]))
    places = width - 1 + args.most_pending + most
    inputs = np.empty(places * BLOCK, np.float32)
    before = np.empty(places, np.int64)
    weights, bias = np.empty(width * BLOCK, np.float32), np.zeros(BLOCK, np.float32)
    result = np.empty(BLOCK, np.float32)

    while True:
        channel = fetch_add_one(pointer) * BLOCK
        if channel >= args.channels:
            break
        count = min(BLOCK, args.channels - channel)
        for tap in range(width):
            at = channel * args.weight_channel + tap * args.weight_column
            read_row(args.weight, args.weight_kind, at, args.weight_channel, weights, tap * BLOCK, count)
        if args.bias != 0:
            read_row(args.bias, args.weight_kind, channel, 1, bias, 0, count)
        for request in range(requests):
            start, block = np.int64(row_start[request]), np.int64(blocks[request])
            rows = np.int64(row_start[request + 1]) - start
            if block == 0 or rows == 0:
                continue
            text = width - 1 + np.int64(num_pending[request])
            state = block * args.state_block + channel * args.state_channel
            for place in range(text):
                column = place
                if place >= width - 1:
                    column = width - 2 + pending[request * args.most_pending + place - (width - 1)]
                at = state + column * args.state_column
                read_row(args.state, args.state_kind, at, args.state_channel, inputs, place * BLOCK, count)
                before[place] = place - 1
            for row in range(rows):
                at = (start + row) * args.x_row + channel
                read_row(args.x, kind, at, 1, inputs, (text + row) * BLOCK, count)
                before[text + row] = text + np.int64(parents[start + row])

            for place in range(width - 1, text + rows):
                for d in range(0, count, LANES):
                    total, at = load_vector(bias, d), place
                    for tap in range(width - 1, -1, -1):
                        factor = load_vector(weights, tap * BLOCK + d)
                        total = multiply_add(factor, load_vector(inputs, at * BLOCK + d), total)
                        at = before[at]
                    store_vector(result, d, _silu(total) if args.silu else total)
                at = (out_start[request] + place - (width - 1)) * args.out_row + channel
                write_row(args.out, kind, at, 1, result, 0, count)
            for column in range(width - 2 + rows):
                at, place = state + column * args.state_column, text - (width - 2) + column
                write_row(args.state, args.state_kind, at, args.state_channel, inputs, place * BLOCK, count)
