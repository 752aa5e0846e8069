# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""`path_move` on CUDA: one program for each request, layer and head; most of them have nothing to move."""

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.path_move import Caches

_ELEMENTS = {1: tl.int8, 2: tl.int16, 4: tl.int32}  # by bytes: copied as they are


def move_paths_triton(caches: Caches, source: torch.Tensor, target: torch.Tensor) -> None:
    """See `vllm_ext.kernels.path_move.move_paths`."""
    requests, columns = source.shape
    cache = caches.caches[0]
    _, heads, block_size, width = cache.shape
    if requests == 0:
        return
    with torch.cuda.device_of(source):
        _move[(requests, len(caches.caches), heads)](
            caches.addresses,
            source.contiguous(),
            target.contiguous(),
            columns,
            block_size,
            width,
            *cache.stride(),
            ELEMENT=_ELEMENTS[cache.element_size()],
            WIDTH=triton.next_power_of_2(width),
        )


@triton.jit
def _move(
    addresses,
    source,
    target,
    columns,
    block_size,
    width,
    block_stride,
    head_stride,
    token_stride,
    dim_stride,
    ELEMENT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    cache = tl.cast(tl.load(addresses + tl.program_id(1)), tl.pointer_type(ELEMENT))
    dim = tl.arange(0, WIDTH)
    inside = dim < width
    at = tl.program_id(2).to(tl.int64) * head_stride + dim.to(tl.int64) * dim_stride
    for column in range(columns):
        old = tl.load(source + request * columns + column)
        new = tl.load(target + request * columns + column)
        if old != new:
            values = tl.load(
                cache + old // block_size * block_stride + old % block_size * token_stride + at, mask=inside
            )
            tl.store(
                cache + new // block_size * block_stride + new % block_size * token_stride + at,
                values,
                mask=inside,
            )
