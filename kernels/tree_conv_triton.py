# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""`tree_conv` on CUDA: one program for each request and block of channels.

Inputs have places one after the other: the text's columns, the pending rows', the step's. Each output climbs from its
place; the state is written when all of it has been read.
"""

import torch
import triton
import triton.language as tl

CHANNELS = 256  # of a program


def tree_conv_triton(
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
    """See `vllm_ext.kernels.tree_conv.tree_conv`, which validates."""
    channels, width = weight.shape
    if not len(blocks) or not len(x):
        return
    with torch.cuda.device_of(x):
        _convolve[(len(blocks), triton.cdiv(channels, CHANNELS))](
            x,
            state,
            weight,
            weight if bias is None else bias,
            blocks,
            row_start,
            parents,
            pending,
            num_pending,
            out_start,
            out,
            channels,
            pending.shape[1],
            x.stride(0),
            out.stride(0),
            *state.stride(),
            *weight.stride(),
            BIAS=bias is not None,
            SILU=silu,
            WIDTH=width,
            COLUMNS=triton.next_power_of_2(width),
            CHANNELS=CHANNELS,
        )


@triton.jit
def _convolve(
    x,
    state,
    weight,
    bias,
    blocks,
    row_start,
    parents,
    pending,
    num_pending,
    out_start,
    out,
    channels,
    most_pending,
    x_row,
    out_row,
    state_block,
    state_channel,
    state_column,
    weight_channel,
    weight_column,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    request = tl.program_id(0)
    block = tl.load(blocks + request).to(tl.int64)
    start = tl.load(row_start + request).to(tl.int64)
    rows = (tl.load(row_start + request + 1) - start).to(tl.int32)
    if (block == 0) | (rows == 0):
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    state += block * state_block + channel.to(tl.int64) * state_channel
    weight += channel * weight_channel
    x += start * x_row + channel
    parents += start
    pending += request * most_pending
    count = tl.load(num_pending + request)
    text = WIDTH - 1 + count  # the root's place
    out += tl.load(out_start + request).to(tl.int64) * out_row + channel
    shift = tl.zeros([CHANNELS], tl.float32)
    if BIAS:
        shift += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    place = text - count
    for _ in range(count + rows):
        total = shift
        at = place
        for tap in tl.static_range(WIDTH):
            factor = tl.load(weight + (WIDTH - 1 - tap) * weight_column, mask=inside, other=0.0)
            if at < text:
                column = at
                if at >= WIDTH - 1:
                    column = WIDTH - 2 + tl.load(pending + at - (WIDTH - 1))
                value = tl.load(state + column * state_column, mask=inside, other=0.0).to(tl.float32)
                at -= 1
            else:
                source = x + (at - text).to(tl.int64) * x_row
                value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
                at = text + tl.load(parents + at - text)
            total += factor.to(tl.float32) * value
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(out, total.to(out.dtype.element_ty), mask=inside)
        out += out_row
        place += 1

    # The text's last inputs before the root, all read before the first is written.
    slot = tl.arange(0, COLUMNS)
    at = text - (WIDTH - 2) + slot
    wanted = slot < WIDTH - 2
    accepted = tl.load(pending + at - (WIDTH - 1), mask=wanted & (at >= WIDTH - 1), other=0)
    column = tl.where(at < WIDTH - 1, at, WIDTH - 2 + accepted)
    moved = wanted[:, None] & inside[None, :]
    kept = tl.load(state[None, :] + column[:, None] * state_column, mask=moved, other=0.0)
    tl.debug_barrier()
    tl.store(state[None, :] + slot[:, None] * state_column, kept, mask=moved)
    for row in range(rows):
        new = tl.load(x, mask=inside, other=0.0)
        target = state + (WIDTH - 2 + row) * state_column
        tl.store(target, new.to(state.dtype.element_ty), mask=inside)
        x += x_row
