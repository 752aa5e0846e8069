# SPDX-License-Identifier: Apache-2.0
"""Attention over KV blocks that are encoded once they are full.

A row at position ``i`` of a request reads the blocks before its own as its codec decodes them, and its own block as it
is. What a row sees so depends on its position and the tokens before it alone: not on how a prompt came in chunks, on
rows beside it, or on whether a block was found in the cache. The tokens of the block that fills up lie, as they are,
in the bytes of the blocks behind it in the request's table, which the tokens to come will need later.

A codec may merge blocks: where `BlockFormat.num_spans` says that a row reads a span as one block, it has become one, in
the place of its first. The others are then read no more.

Rows that are not settled yet, those of drafts, are of the block of the first row, whichever place they have in it.

Rows may have lists of the blocks that they read, and be watched: what they attend to is then told block by block.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from vllm_ext.kernels import backends
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.block_format import BlockFormat

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Reading:
    """Rows that read less than all before them, and rows that are watched; rows in the order of `EncodedRows.parents`.

    Args:
        lists: int32 ``[num_lists, most]``, places in the request's block table of the blocks that a row reads before
            its own, ascending.
        lengths: int32 ``[num_lists]``, how many each has.
        list_of_row: int32 ``[sum(num_rows)]``, -1 for what `BlockFormat.blocks_read` says, -2 for what the codec
            retrieves for the row. Rows of one block of a request that have a list have the same one.
        watched: int32 ``[sum(num_rows)]``, places in ``mass``, -1 for rows that are not watched.
        mass: float32 ``[num_watched, max_blocks]``. Each call adds, by place in the block table, the weight that the
            row gives to a block, summed over its heads.
    """

    lists: torch.Tensor
    lengths: torch.Tensor
    list_of_row: torch.Tensor
    watched: torch.Tensor
    mass: torch.Tensor


@dataclass(frozen=True)
class EncodedRows:
    """The rows of a step: made once, used by every layer.

    Args:
        block_table: int32 ``[num_requests, max_blocks]``, those behind the last token's included.
        first_row: int32 ``[num_requests]``, where in the query each request's rows begin.
        num_rows: int32 ``[num_requests]``, at least one each.
        num_settled: int32 ``[num_requests]``, how many of them, the first, are not drafts'. Those that are end before
            the block's last position.
        context_len: int32 ``[num_requests]``, tokens before the first row.
        parents: int32 ``[sum(num_rows)]``, each row's parent as an offset inside its request, smaller than the row's
            own; -1 where there is none.
        reading: of codecs whose rows read less, or are watched; None: there is none of either.

    Raises:
        ValueError: shapes, dtypes, strides or devices that do not fit. The values are not looked at.
    """

    block_table: torch.Tensor
    first_row: torch.Tensor
    num_rows: torch.Tensor
    num_settled: torch.Tensor
    context_len: torch.Tensor
    parents: torch.Tensor
    reading: Reading | None = None

    def __post_init__(self) -> None:
        requests = self.block_table.shape[0]
        for name, tensor in vars(self).items():
            if name == "reading":
                continue
            good = tensor.dtype == torch.int32 and tensor.device == self.parents.device
            if name == "block_table":
                good = good and tensor.dim() == 2 and (tensor.shape[1] == 1 or tensor.stride(1) == 1)
            else:
                good = good and tensor.dim() == 1 and tensor.is_contiguous()
                good = good and (name == "parents" or len(tensor) == requests)
            if not good:
                raise ValueError(
                    f"{name}: {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device} "
                    "must be torch.int32 on the device of parents, contiguous, [num_requests]; block_table is "
                    "[num_requests, max_blocks], parents [sum(num_rows)]"
                )

    @functools.cached_property
    def prepared(self) -> dict[Any, dict[str, Any]]:
        """By the form of the other tensors: they were looked at, and what a backend keeps from layer to layer."""
        return {}

    def parts(self, codec: BlockFormat) -> list[tuple[EncodedRows, torch.Tensor | None]]:
        """What is read one after the other, and by request the span that is merged behind each; see `encoded_spans`."""
        if not codec.span_blocks:
            return [(self, None)]
        from vllm_ext.kernels import encoded_spans

        found = self.prepared.setdefault(("parts", codec), {})
        if not found:
            found["parts"] = list(encoded_spans.cut(self, codec))
        parts: list[tuple[EncodedRows, torch.Tensor | None]] = found["parts"]
        return parts


def encoded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    output: torch.Tensor,
    rows: EncodedRows,
    codec: BlockFormat,
    scale: float,
    backend: Backend = "auto",
) -> None:
    """Put a step's keys and values into the cache, then softmax attention of its rows, in float32 inside.

    Args:
        query: float32, bfloat16 or float16 ``[num_tokens, num_heads, head_size]``, last dimension contiguous.
        key: the same dtype, ``[num_tokens, num_kv_heads, head_size]``, last dimension contiguous; ``num_heads`` is a
            multiple of ``num_kv_heads``.
        value: as ``key``.
        pages: uint8 ``[num_blocks, num_kv_heads, block_size, codec.bytes_per_token]``, the last two dimensions
            contiguous. Written.
        output: shape and dtype of ``query``. Written at the rows and nowhere else.
        rows: on query's device. Each request's ``block_table`` has ``codec.tail_blocks`` of what may stand in a block,
            rows of drafts among it, behind the block of its last settled row.
        codec: `KVCodec.format` of the pages' codec.
        scale: factor of the scores.
        backend: "auto" takes numba on the CPU and torch elsewhere; "triton" has rows that decode over codec kivi.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit, or a codec without a form for the backend.
    """
    tensors = (query, key, value, pages, output)
    kind = codec, *[(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
    if kind not in rows.prepared:
        _validate(query, key, value, pages, output, codec)
        rows.prepared[kind] = {}
    if backend == "auto" and query.device.type != "cpu":
        backend = "torch"
    # Imported here: a backend that is not used may be missing, and costs nothing.
    match backends.choose(backend, query):
        case "numba":
            from vllm_ext.kernels.encoded_attention_numba import encoded_attention_numba as attend
            from vllm_ext.kernels.merge_spans_numba import merge_spans_numba as merge_spans
        case "torch":
            from vllm_ext.kernels.encoded_attention_ref import encoded_attention_ref as attend
            from vllm_ext.kernels.encoded_attention_ref import merge_spans_ref as merge_spans
        case "triton":
            from vllm_ext.kernels.encoded_attention_ref import merge_spans_ref as merge_spans
            from vllm_ext.kernels.encoded_attention_triton import encoded_attention_triton as attend
        case other:
            raise ValueError(
                f"backend={other!r}: encoded_attention has 'numba', 'torch' and 'triton'; use backend='auto'"
            )
    for part, due in rows.parts(codec):
        attend(query, key, value, pages, output, part, codec, scale, part.prepared.setdefault(kind, {}))
        if due is not None:
            merge_spans(pages, part, due, codec)


def _validate(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    output: torch.Tensor,
    codec: BlockFormat,
) -> None:
    dtypes = {tensor.dtype for tensor in (query, key, value, output)}
    if len(dtypes) > 1 or query.dtype not in DTYPES:
        raise ValueError(
            f"dtypes of query, key, value and output are {sorted(map(str, dtypes))}; they must be one of "
            f"{', '.join(map(str, DTYPES))}, the same for all four"
        )
    size = codec.head_size
    if query.dim() != 3 or query.shape[2] != size or output.shape != query.shape:
        raise ValueError(
            f"query.shape={tuple(query.shape)} and output.shape={tuple(output.shape)} must be [num_tokens, num_heads, "
            f"{size}]"
        )
    num_kv_heads = pages.shape[1]
    if (
        key.shape != (query.shape[0], num_kv_heads, size)
        or value.shape != key.shape
        or query.shape[1] % num_kv_heads
    ):
        raise ValueError(
            f"key.shape={tuple(key.shape)} and value.shape={tuple(value.shape)} must be [num_tokens, "
            f"{num_kv_heads}, {size}] with pages' number of heads, which divides query's {query.shape[1]}"
        )
    width = codec.bytes_per_token
    if (
        pages.dtype != torch.uint8
        or tuple(pages.shape[2:]) != (codec.block_size, width)
        or pages.stride()[2:] != (width, 1)
        or any(each % query.element_size() for each in (*pages.stride()[:2], pages.storage_offset()))
    ):
        raise ValueError(
            f"pages: {pages.dtype} {tuple(pages.shape)} with strides {pages.stride()} must be torch.uint8 "
            f"[num_blocks, num_kv_heads, {codec.block_size}, {width}], the last two contiguous, heads at multiples of "
            f"{query.element_size()} bytes"
        )
    if any(tensor.stride(2) != 1 for tensor in (query, key, value, output)):
        raise ValueError(
            "query, key, value and output must have their last dimension contiguous; pass contiguous()"
        )
