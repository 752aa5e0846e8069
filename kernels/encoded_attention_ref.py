# SPDX-License-Identifier: Apache-2.0
"""`encoded_attention` as it is defined, one request at a time: the readable form the other is tested against."""

import torch

from vllm_ext.codecs.base import KVCodec
from vllm_ext.kernels.encoded_attention import EncodedRows


def encoded_attention_ref(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    output: torch.Tensor,
    rows: EncodedRows,
    codec: KVCodec,
    scale: float,
) -> None:
    """See `vllm_ext.kernels.encoded_attention.encoded_attention`, which validates."""
    columns = (rows.first_row, rows.num_rows, rows.num_settled, rows.context_len)
    requests = list(zip(*(column.tolist() for column in columns), rows.block_table.tolist(), strict=True))
    # All write before one reads: a block may be found in the cache in the step that fills it.
    raw = [_write(key, value, pages, codec, *request) for request in requests]
    start = 0
    for (first, num, settled, context, table), (keys, values) in zip(requests, raw, strict=True):
        parents = rows.parents[start : start + num].tolist()
        _attend(
            query, pages, output, codec, scale, first, num, settled, context, table, keys, values, parents
        )
        start += num


def _tail(
    pages: torch.Tensor, codec: KVCodec, dtype: torch.dtype, table: list[int], block: int, place: int
) -> torch.Tensor:
    """The key and value at a place of a block that fills up: ``[num_kv_heads, 2, head_size]``, the cache's memory."""
    per_block = codec.raw_tokens_per_block(dtype.itemsize)
    width = 2 * codec.head_size * dtype.itemsize
    page = pages[table[block + 1 + place // per_block]].flatten(1)
    start = place % per_block * width
    found: torch.Tensor = page[:, start : start + width].view(dtype)
    return found.view(len(page), 2, codec.head_size)


def _write(
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    codec: KVCodec,
    first: int,
    num: int,
    settled: int,
    context: int,
    table: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values from the block the rows begin in on: ``[num_kv_heads, tokens, head_size]``."""
    size = codec.block_size
    begin = context // size * size
    old = [_tail(pages, codec, key.dtype, table, begin // size, place) for place in range(context - begin)]
    new = torch.stack([key[first : first + num], value[first : first + num]], 2)
    both = torch.cat([torch.stack(old), new]) if old else new.clone()
    keys, values = both.permute(2, 1, 0, 3)
    end = context + settled
    for block in range(begin // size, end // size):
        part = slice(block * size - begin, (block + 1) * size - begin)
        encoded = codec.encode(keys[:, part].float(), values[:, part].float())
        pages[table[block]] = encoded.view(pages.shape[1:])
    left = max(end // size * size, begin)
    for place in range(max(context, left) - left, context + num - left):
        _tail(pages, codec, key.dtype, table, left // size, place)[:] = both[left - begin + place]
    return keys.float(), values.float()


def _attend(
    query: torch.Tensor,
    pages: torch.Tensor,
    output: torch.Tensor,
    codec: KVCodec,
    scale: float,
    first: int,
    num: int,
    settled: int,
    context: int,
    table: list[int],
    keys: torch.Tensor,
    values: torch.Tensor,
    parents: list[int],
) -> None:
    size = codec.block_size
    begin = context // size * size
    group = query.shape[1] // pages.shape[1]
    for row in range(num):
        block = (context + row) // size if settled == num else context // size
        before = codec.decode(pages[table[:block]].flatten(2))
        # [blocks, heads, tokens, head] -> [heads, tokens, head]
        encoded = [side.transpose(0, 1).flatten(1, 2) for side in before]
        seen = {context + row}
        ancestor = parents[row]
        while ancestor >= 0:
            seen.add(context + ancestor)
            ancestor = parents[ancestor]
        own = [i for i in range(block * size, context + num) if i < context or i in seen]
        own = [i - begin for i in own]
        k, v = (
            torch.cat([side, raw[:, own]], 1).repeat_interleave(group, 0)
            for side, raw in zip(encoded, (keys, values), strict=True)
        )
        scores = (k @ query[first + row].float()[:, :, None])[:, :, 0] * scale
        mixed = scores.softmax(1)[:, None] @ v
        output[first + row] = mixed[:, 0].to(output.dtype)
