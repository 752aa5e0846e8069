# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""`path_move` on CUDA: one program for each request and layer; where nothing moves it ends at once."""

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.path_move import Caches

_ELEMENTS = {1: tl.int8, 2: tl.int16, 4: tl.int32}  # by bytes: copied as they are


def move_paths_triton(
    caches: Caches, path: torch.Tensor, first_row: torch.Tensor, slots: torch.Tensor
) -> None:
    """See `vllm_ext.kernels.path_move.move_paths`."""
    requests, columns = path.shape
    cache = caches.caches[0]
    _, heads, block_size, width = cache.shape
    if requests == 0:
        return
    with torch.cuda.device_of(path):
        _move[(requests, len(caches.caches))](
            caches.addresses,
            path,
            first_row,
            slots,
            columns,
            block_size,
            heads,
            width,
            *cache.stride(),
            ELEMENT=_ELEMENTS[cache.element_size()],
            HEADS=triton.next_power_of_2(heads),
            WIDTH=triton.next_power_of_2(width),
        )


@triton.jit
def _move(
    addresses,
    path,
    first_row,
    slots,
    columns,
    block_size,
    heads,
    width,
    block_stride,
    head_stride,
    token_stride,
    dim_stride,
    ELEMENT: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    cache = tl.cast(tl.load(addresses + tl.program_id(1)), tl.pointer_type(ELEMENT))
    slots += tl.load(first_row + request)
    path += request * columns
    head, dim = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    inside = (head < heads)[:, None] & (dim < width)[None, :]
    at = head.to(tl.int64)[:, None] * head_stride + dim.to(tl.int64)[None, :] * dim_stride
    for column in range(columns):
        row = tl.load(path + column)
        if row != column:
            old, new = tl.load(slots + row), tl.load(slots + column)
            values = tl.load(
                cache + old // block_size * block_stride + old % block_size * token_stride + at, mask=inside
            )
            tl.store(
                cache + new // block_size * block_stride + new % block_size * token_stride + at,
                values,
                mask=inside,
            )
