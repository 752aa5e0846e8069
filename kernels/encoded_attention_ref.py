# SPDX-License-Identifier: Apache-2.0
"""`encoded_attention` as it is defined, one request at a time: the readable form the other is tested against."""

from typing import Any

import torch

from vllm_ext.kernels.block_format import BlockFormat
from vllm_ext.kernels.encoded_attention import EncodedRows, Reading

LISTED, RETRIEVED = 0, -2  # of `Reading.list_of_row`


def encoded_attention_ref(
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
    """See `vllm_ext.kernels.encoded_attention.encoded_attention`, which validates. Nothing is ``prepared``."""
    # All write before one reads: a block may be found in the cache in the step that fills it.
    raw, start = write_rows(query, key, value, pages, rows, codec), 0
    for (first, num, settled, context, table), vectors in zip(_requests(rows), raw, strict=True):
        parents = rows.parents[start : start + num].tolist()
        reads = None if rows.reading is None else _Reads(rows.reading, start)
        _attend(
            *(query, pages, output, codec, scale, first, num, settled, context, table, vectors),
            *(parents, reads),
        )
        start += num


def _requests(rows: EncodedRows) -> list[tuple[int, int, int, int, list[int]]]:
    columns = (rows.first_row, rows.num_rows, rows.num_settled, rows.context_len)
    return list(zip(*(column.tolist() for column in columns), rows.block_table.tolist(), strict=True))


def write_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    rows: EncodedRows,
    codec: BlockFormat,
) -> list[torch.Tensor]:
    """Put a step's keys and values into the cache; returns by request what `_write` does."""
    group = query.shape[1] // pages.shape[1]
    means = (query.float().reshape(len(query), -1, group, query.shape[2]).sum(2) * (1 / group)).to(
        query.dtype
    )
    vectors = torch.stack([key, value, means][: codec.raw_vectors], 2)
    return [_write(vectors, pages, codec, *request) for request in _requests(rows)]


class _Reads:
    """A request's part of what rows read; its first row is ``start`` among all."""

    def __init__(self, reading: Reading, start: int) -> None:
        self._reading, self._start = reading, start

    def kind(self, row: int) -> int:
        """LISTED, RETRIEVED, or another number: neither."""
        return min(int(self._reading.list_of_row[self._start + row]), LISTED)

    def blocks(self, row: int) -> list[int]:
        """Of a row that has a list."""
        which = int(self._reading.list_of_row[self._start + row])
        blocks: list[int] = self._reading.lists[which, : self._reading.lengths[which]].tolist()
        return blocks

    def tell(self, row: int, blocks: list[int], weights: torch.Tensor) -> None:
        """float32 ``[heads, blocks, block_size]`` of a row, which may be watched."""
        place = int(self._reading.watched[self._start + row])
        if place >= 0:
            self._reading.mass[place, blocks] += weights.sum((0, 2))


def _tail(
    pages: torch.Tensor, codec: BlockFormat, dtype: torch.dtype, table: list[int], block: int, place: int
) -> torch.Tensor:
    """What lies at a place of a block that fills up: ``[num_kv_heads, raw_vectors, head_size]``, the cache's memory."""
    per_block = codec.raw_tokens_per_block(dtype.itemsize)
    width = codec.raw_vectors * codec.head_size * dtype.itemsize
    page = pages[table[block + 1 + place // per_block]].flatten(1)
    start = place % per_block * width
    found: torch.Tensor = page[:, start : start + width].view(dtype)
    return found.view(len(page), codec.raw_vectors, codec.head_size)


def _write(
    vectors: torch.Tensor,
    pages: torch.Tensor,
    codec: BlockFormat,
    first: int,
    num: int,
    settled: int,
    context: int,
    table: list[int],
) -> torch.Tensor:
    """Returns `_tail`'s vectors from the block the rows begin in on: ``[raw_vectors, num_kv_heads, tokens, head]``."""
    size = codec.block_size
    begin = context // size * size
    old = [
        _tail(pages, codec, vectors.dtype, table, begin // size, place) for place in range(context - begin)
    ]
    new = vectors[first : first + num]
    both = torch.cat([torch.stack(old), new]) if old else new.clone()
    found = both.permute(2, 1, 0, 3)
    end = context + settled
    for block in range(begin // size, end // size):
        part = slice(block * size - begin, (block + 1) * size - begin)
        encoded = codec.encode(found[0, :, part].float(), found[1, :, part].float())
        pages[table[block]] = encoded.view(pages.shape[1:])
    left = max(end // size * size, begin)
    for place in range(max(context, left) - left, context + num - left):
        _tail(pages, codec, vectors.dtype, table, left // size, place)[:] = both[left - begin + place]
    return found.float()


def _attend(
    query: torch.Tensor,
    pages: torch.Tensor,
    output: torch.Tensor,
    codec: BlockFormat,
    scale: float,
    first: int,
    num: int,
    settled: int,
    context: int,
    table: list[int],
    vectors: torch.Tensor,
    parents: list[int],
    reads: _Reads | None,
) -> None:
    size = codec.block_size
    begin = context // size * size
    group = query.shape[1] // pages.shape[1]
    pages_before: dict[int, Any] = {}  # by block of a row, what is before it
    for row in range(num):
        block = (context + row) // size if settled == num else context // size
        seen = {context + row}
        ancestor = parents[row]
        while ancestor >= 0:
            seen.add(context + ancestor)
            ancestor = parents[ancestor]
        own = [i for i in range(block * size, context + num) if i < context or i in seen]
        own = [i - begin for i in own]
        if block not in pages_before:
            before = pages[table[:block]].flatten(2)
            pages_before[block] = before, codec.decode(before), codec.log_counts(before)
        before, decoded, logs = pages_before[block]
        for head in range(pages.shape[1]):
            read = codec.blocks_read(block)
            if reads is not None and reads.kind(row) == LISTED:
                read = reads.blocks(row)
            elif reads is not None and reads.kind(row) == RETRIEVED:
                read = codec.retrieve(vectors[2, head, own], before[:, head], scale)
            k, v = (
                torch.cat([side[read, head].flatten(0, 1), raw[head, own]])
                for side, raw in zip(decoded, vectors, strict=False)
            )
            q = query[first + row, head * group : (head + 1) * group].float()
            scores = q @ k.T * scale
            if logs is not None:
                scores[:, : len(read) * size] += logs[read, head].flatten()
            weights = scores.softmax(1)
            if reads is not None:
                reads.tell(row, read, weights[:, : len(read) * size].reshape(group, len(read), size))
            output[first + row, head * group : (head + 1) * group] = (weights @ v).to(output.dtype)


def merge_spans_ref(pages: torch.Tensor, rows: EncodedRows, due: torch.Tensor, codec: BlockFormat) -> None:
    """See `vllm_ext.kernels.encoded_attention.encoded_attention`: ``due`` is by request the span to merge, or -1."""
    for table, span in zip(rows.block_table.tolist(), due.tolist(), strict=True):
        if span >= 0:
            blocks = [table[i] for i in codec.blocks_of(span)]
            merged = codec.merge(pages[blocks].flatten(2).transpose(0, 1))
            pages[blocks[0]] = merged.view(pages.shape[1:])
