# SPDX-License-Identifier: Apache-2.0
"""Codec actqkv: all is kept, and a token behind the prompt reads the blocks that fit what the last tokens look for.

Each block has its mean key. The probe is a mean of the last tokens' queries in which those weigh more that stand out
from the others; its products with the mean keys, as a softmax, say how much of the attention each block is likely to
have. The likeliest are read until ``coverage`` of it is: few where a layer knows what it looks for, many where it does
not.

Source: "Activation-aware Probe-Query: Effective Key-Value Retrieval for Long-Context LLMs Inference" (ActQKV), arXiv
2502.13542, section 3: the activation bias and the probe, retrieval by blocks, and the dynamic cut-off by layer.
Deviations: whole blocks of the cache; prompts read all of themselves (the paper retrieves for each window of a prompt
too); the probe's window are the last ``probe`` tokens of the block that fills up, as their queries lie there beside
their keys, so that a token's probe depends on the text before it alone; the mean of the query heads that share a key
head is their query; each layer and head is cut off by its own scores, with a budget of its own (the paper deals out
one budget among the layers, by the scores of all).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field

from vllm_ext.codecs.base import CodecOptions
from vllm_ext.codecs.halves import HalvesCodec
from vllm_ext.codecs.selection import ALL, RETRIEVED, EvictionPolicy

TINY = 1e-6  # beside variances of queries
MILLION = 1_000_000


class ActQKVOptions(CodecOptions):
    budget: int = Field(
        default=1024,
        ge=1,
        description="how many tokens before its own block a token reads at most, rounded up to whole blocks",
    )
    window: int = Field(
        default=64,
        ge=1,
        description="how many of the last tokens before its own block are always read, rounded up to whole blocks",
    )
    coverage: float = Field(
        default=0.95, gt=0.0, le=1.0, description="the part of the likely attention that is enough to be read"
    )
    probe: int = Field(
        default=8, ge=1, le=64, description="how many of the last tokens say what is looked for"
    )


class Retrieving(EvictionPolicy):
    """Rows behind the prompt read what their queries choose."""

    def read_at(self, position: int) -> Sequence[int] | int:
        return ALL if position < self.prompt_len else RETRIEVED


class ActQKV(HalvesCodec):
    """As the base class, and then the mean key, float16."""

    name = "actqkv"
    summary = "all tokens as they are; answers read blocks that fit queries"
    paper = "arXiv 2502.13542"
    Options = ActQKVOptions
    EXAMPLES = ({"budget": 192},)
    ANSWERS_READ_LESS = True
    WHY_V1 = "chooses blocks by each layer's queries, which attention does on CPUs alone, on vLLM's V1 runner"
    RAW_VECTORS = 3

    def __init__(self, options: ActQKVOptions, block_size: int, head_size: int) -> None:
        super().__init__(options, block_size, head_size)
        self.budget_blocks = -(-options.budget // block_size)
        self.recent_blocks = -(-options.window // block_size)
        least = self.sink_blocks + self.recent_blocks
        if self.budget_blocks < least:
            raise ValueError(
                f"budget={options.budget} is not allowed with sinks={options.sinks}, window={options.window} and "
                f"blocks of {block_size}; allowed: {least * block_size} or more"
            )

    @property
    def bytes_per_token(self) -> int:
        return super().bytes_per_token - (-2 * self.head_size // self.block_size)

    @property
    def numbers(self) -> tuple[int, ...]:
        return (
            *(self.options.probe, self.budget_blocks, self.recent_blocks),
            round(self.options.coverage * MILLION),
        )

    @property
    def window_blocks(self) -> int | None:
        return None

    def choice(self, prompt_len: int) -> Retrieving:
        return Retrieving(prompt_len)

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        mean = keys.mean(-2).clamp(-65504.0, 65504.0).half().view(torch.uint8)
        block = super().encode(keys, values)
        room = self.block_size * self.bytes_per_token - block.shape[-1] - mean.shape[-1]
        return torch.cat([block, mean, mean.new_zeros(*mean.shape[:-1], room)], -1)

    def mean_keys(self, blocks: torch.Tensor) -> torch.Tensor:
        """float32 ``[..., head_size]``."""
        start = super().bytes_per_token * self.block_size
        means = blocks[..., start : start + 2 * self.head_size].contiguous().view(torch.float16)
        return means.float()

    def probe(self, queries: torch.Tensor) -> torch.Tensor:
        """Of a window's queries, the mean by how far each is from the mean of all, in units of their deviations.

        Args:
            queries: float32 ``[num, head_size]``, the row's own among them.

        Returns:
            float32 ``[head_size]``.
        """
        away = queries - queries.mean(0)
        activation = (away.square() / (away.square().mean(0) + TINY)).sum(1)
        weights = (activation + TINY) / (activation + TINY).sum()
        return weights @ queries

    def retrieve(self, queries: torch.Tensor, blocks: torch.Tensor, scale: float) -> list[int]:
        means, block = self.mean_keys(blocks), len(blocks)
        recent = max(block - self.recent_blocks, min(self.sink_blocks, block))
        sinks = min(self.sink_blocks, recent)
        likely = (means[sinks:recent] @ self.probe(queries[-self.options.probe :]) * scale).softmax(0)
        order = likely.sort(descending=True, stable=True)
        # The first with which enough is covered, at the latest where the budget ends.
        enough = int((order.values.cumsum(0) < self.options.coverage).sum()) + 1
        if self.options.coverage == 1:  # sums of floats reach it early
            enough = len(order.values)
        left = max(self.budget_blocks - sinks - (block - recent), 0)
        chosen = order.indices[: min(enough, left)] + sinks
        return [*range(sinks), *sorted(chosen.tolist()), *range(recent, block)]
