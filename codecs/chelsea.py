# SPDX-License-Identifier: Apache-2.0
"""Codec chelsea: before a window of the last tokens, those whose keys are alike become one, which counts for all.

Chunked soft matching: of a chunk, tokens at even places are matched with the most similar ones at odd places, and those
of the most similar pairs merged into their weighted mean; then again among what remains, until one in ``ratio`` does.
The logarithm of how many tokens a mean stands for is added to its score. So much would be right if its keys were all
alike; where they differ, a query meets some of them much better than their mean, and by the convexity of the
exponential they weigh more together: for queries without a direction of their own by half the variance of their
scores, which is added too (``spread``).

Source: "Efficient KV Cache Merging via Chunk-wise Clustering" (Chelsea), arXiv 2506.11418, section 3.
Deviations: a chunk is ``ratio`` whole blocks, which become one; of the pairs a part is merged at a time (``rounds``),
so that what is like nothing else can remain; the block of the first tokens stays as it is, attention sinks among them;
``spread`` is ours.
Keys are those of the cache, with their positions in them.
"""

from __future__ import annotations

import torch
from pydantic import Field

from vllm_ext.codecs.base import CodecOptions
from vllm_ext.codecs.halves import HalvesCodec

MILLION = 1_000_000


class ChelseaOptions(CodecOptions):
    window: int = Field(
        default=1024,
        ge=1,
        description="how many tokens before its own block a token reads as they are, rounded up to whole blocks; "
        "those before are merged",
    )
    ratio: int = Field(default=4, ge=2, le=32, description="how many tokens become one, in the mean")
    rounds: int = Field(
        default=4,
        ge=1,
        le=16,
        description="in how many parts the pairs of a chunk are merged, the most similar first",
    )
    spread: float = Field(
        default=1.25,
        ge=0.0,
        le=16.0,
        description="mean square of a query's elements by which a mean weighs more the more its keys differ; 0: it "
        "weighs as many tokens as it stands for",
    )


class Chelsea(HalvesCodec):
    """As the base class, and then by token the logarithm of what it weighs, float32."""

    name = "chelsea"
    summary = "the last tokens as they are, those before merged by their keys"
    paper = "arXiv 2506.11418"
    Options = ChelseaOptions
    EXAMPLES = ({"window": 128, "ratio": 2},)
    CACHES_PREFIXES = False
    WHY_V1 = (
        "merges blocks, and adds weights to scores, which attention does on CPUs alone, on vLLM's V1 runner"
    )

    @property
    def bytes_per_token(self) -> int:
        return super().bytes_per_token + 4

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.options.rounds, round(self.options.spread * MILLION))

    @property
    def span_blocks(self) -> int:
        return int(self.options.ratio)

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        logs = torch.zeros((*keys.shape[:-1], 4), dtype=torch.uint8)  # of one
        return torch.cat([super().encode(keys, values), logs.flatten(-2)], -1)

    def log_counts(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks[..., super().bytes_per_token * self.block_size :].contiguous().view(torch.float32)

    def merge(self, spans: torch.Tensor) -> torch.Tensor:
        keys, values = (side.flatten(-3, -2) for side in self.decode(spans))
        squares = keys.square().sum(-1, keepdim=True)
        sums = torch.cat([keys, values, torch.ones_like(squares), squares], -1)
        flat = [self._matched(each) for each in sums.view(-1, *sums.shape[-2:])]
        merged = torch.stack(flat).view(*sums.shape[:-2], self.block_size, -1)
        counts, squares = merged[..., -2], merged[..., -1]
        keys, values = (merged[..., :-2] / counts[..., None]).chunk(2, -1)
        apart = (squares / counts - keys.square().sum(-1)).clamp(min=0)
        apart[counts == 1] = 0  # not what is rounded
        logs = counts.log() + self.options.spread / (2 * self.head_size) * apart
        encoded = self.encode(keys, values)
        encoded[..., super().bytes_per_token * self.block_size :] = logs.contiguous().view(torch.uint8)
        return encoded

    def _matched(self, sums: torch.Tensor) -> torch.Tensor:
        """Until a block of tokens is left.

        Args:
            sums: ``[tokens, 2 * head_size + 2]``: of keys, of values, how many, and of squares of keys.
        """
        while (left := len(sums) - self.block_size) > 0:
            num = min(left, -(-(len(sums) // 2) // self.options.rounds))
            directions = torch.nn.functional.normalize(sums[:, : self.head_size], dim=-1)
            alike, best = (directions[0::2] @ directions[1::2].T).max(1)
            merged = alike.sort(dim=0, descending=True, stable=True).indices[:num]
            sums.index_add_(0, 2 * best[merged] + 1, sums[2 * merged])
            remains = torch.ones(len(sums), dtype=torch.bool)
            remains[2 * merged] = False
            sums = sums[remains]
        return sums
