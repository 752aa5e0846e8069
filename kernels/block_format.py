# SPDX-License-Identifier: Apache-2.0
"""What kernels know of a codec of KV blocks: its sizes, which blocks a row reads, and its functions in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def num_spans(block: int, window_blocks: int, sink_blocks: int, span_blocks: int) -> int:
    """How many spans are one block each for a row of ``block``: those before its window, behind the sinks."""
    if not span_blocks:
        return 0
    return max(block - window_blocks - sink_blocks, 0) // span_blocks


@dataclass(frozen=True, eq=False)  # told apart by identity: kernels look up what they prepared for one
class BlockFormat:
    """The blocks of a codec, for one size of block and head.

    Args:
        name: of the codec, as messages have it.
        kernels: ``kernels/<kernels>_numba.py`` has the codec's functions.
        block_size: tokens of a block.
        head_size: elements of a key, and of a value.
        bytes_per_token: of one KV head, keys and values.
        raw_vectors: of a token as it is: its key, its value, and maybe the mean of the queries that go with its key.
        numbers: what the codec's kernels are told besides the sizes: up to four.
        window_blocks: how many blocks before its own a row reads; None: all.
        sink_blocks: how many of the first blocks are read whatever the window is.
        span_blocks: how many blocks that lie before the window become one; 0: they are not read.
        encode: the readable form of what the kernels do, as are those behind it; `vllm_ext.codecs.base` has their
            arguments.
        decode: what `encode`'s bytes stand for.
        merge: the blocks of a span to one.
        log_counts: what is added to the scores of a block's tokens.
        retrieve: the blocks that a row reads, by its queries.
    """

    name: str
    kernels: str
    block_size: int
    head_size: int
    bytes_per_token: int
    raw_vectors: int
    numbers: tuple[int, ...]
    window_blocks: int | None
    sink_blocks: int
    span_blocks: int
    encode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    merge: Callable[[torch.Tensor], torch.Tensor]
    log_counts: Callable[[torch.Tensor], torch.Tensor | None]
    retrieve: Callable[[torch.Tensor, torch.Tensor, float], list[int]]

    def blocks_read(self, block: int) -> list[int]:
        """Those before the ``block`` of a row that the row reads."""
        first = 0 if self.window_blocks is None else max(block - self.window_blocks, 0)
        sinks = min(self.sink_blocks, first)
        if not self.span_blocks:
            return [*range(sinks), *range(first, block)]
        spans = self.num_spans(block)
        merged = [sinks + i * self.span_blocks for i in range(spans)]
        return [*range(sinks), *merged, *range(sinks + spans * self.span_blocks, block)]

    def num_spans(self, block: int) -> int:
        """How many spans a row of ``block`` reads as one block each."""
        return num_spans(block, self.window_blocks or 0, self.sink_blocks, self.span_blocks)

    def blocks_of(self, span: int) -> range:
        """Of a span; the first is the one that it becomes."""
        first = self.sink_blocks + span * self.span_blocks
        return range(first, first + self.span_blocks)

    def raw_tokens_per_block(self, element_size: int) -> int:
        """How many tokens as they are have room in the bytes of a block, none of them in two."""
        return self.block_size * self.bytes_per_token // (self.raw_vectors * self.head_size * element_size)

    def tail_blocks(self, element_size: int, num_tokens: int) -> int:
        """Blocks behind the one that fills up whose bytes hold its tokens as they are.

        Args:
            element_size: bytes of an element of a key.
            num_tokens: that may stand there, those of drafts among them.
        """
        return -(-num_tokens // self.raw_tokens_per_block(element_size))
