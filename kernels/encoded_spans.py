# SPDX-License-Identifier: Apache-2.0
"""Spans of blocks that become one block in `encoded_attention`: when, and which rows still read them as they are.

A span is merged where its last reader's block ends. A prompt's part that goes on behind that is cut there, so that its
rows read what they would have read had they come one by one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_ext.kernels.block_format import BlockFormat
from vllm_ext.kernels.encoded_attention import EncodedRows


def cut(rows: EncodedRows, codec: BlockFormat) -> Iterator[tuple[EncodedRows, torch.Tensor | None]]:
    """Parts of ``rows`` to be read one after the other, and by request the span to merge behind each.

    Yields:
        Rows, and int32 ``[num_requests]``, -1 where there is none to merge; None: no request has one.
    """
    columns = (rows.num_rows, rows.num_settled, rows.context_len)
    requests = list(zip(*(column.tolist() for column in columns), strict=True))
    parts = [_cut_request(num, settled, context, codec) for num, settled, context in requests]
    starts = [0]
    for num, _, _ in requests:
        starts.append(starts[-1] + num)
    for i in range(max(map(len, parts))):
        members = [(request, of[i]) for request, of in enumerate(parts) if len(of) > i]
        index = torch.tensor([request for request, _ in members])
        begin, end, due = torch.tensor([part for _, part in members], dtype=torch.int32).T
        parents = [
            rows.parents[starts[request] + first : starts[request] + last] - first
            for request, (first, last, _) in members
        ]
        yield (
            EncodedRows(
                block_table=rows.block_table[index],
                first_row=rows.first_row[index] + begin,
                num_rows=end - begin,
                num_settled=(rows.num_settled[index] - begin).clamp(max=end - begin),
                context_len=rows.context_len[index] + begin,
                parents=torch.cat(parents).clamp(min=-1),
            ),
            due.contiguous() if bool((due >= 0).any()) else None,
        )


def _cut_request(num: int, settled: int, context: int, codec: BlockFormat) -> list[tuple[int, int, int]]:
    """By part, its first row and the one behind its last, and the span to merge then, or -1."""
    if settled < num:  # all of one block, whose last token is not among them
        return [(0, num, -1)]
    size, parts, begin = codec.block_size, [], 0
    for block in range(context // size + 1, (context + num) // size + 1):
        span = _span_that_ends(block, codec)
        if span >= 0:
            end = block * size - context
            parts.append((begin, end, span))
            begin = end
    if begin < num:
        parts.append((begin, num, -1))
    return parts


def _span_that_ends(block: int, codec: BlockFormat) -> int:
    """The span that a row of ``block`` reads as one and a row before does not; -1: there is none."""
    before, after = (codec.num_spans(each) for each in (block - 1, block))
    return before if after > before else -1
