# SPDX-License-Identifier: Apache-2.0
"""Blocks of a KV method in vLLM's engine: their size, who hands them out, and when they go back to the pool.

vLLM has a place for each: a spec with its own page size, and a manager registered for the spec. On V1 blocks are the
codec's bytes; on V2 they are vLLM's own, and the method only says which of them are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

from vllm_ext.config import kv_cache
from vllm_ext.kernels.block_format import num_spans


class CodecManager(FullAttentionManager):  # type: ignore[misc]  # vLLM is untyped to us
    """vLLM's manager of full attention; each request has a few blocks more than its tokens fill, and where there is a
    window, fewer of those before it.
    """

    kv_cache_spec: Any
    block_size: int

    def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.max_admission_blocks_per_request = kv_cache_spec.most_blocks
        # By request id, until it ends: from which position on which blocks are read no more.
        self._evicted: dict[str, list[tuple[int, list[int]]]] = {}

    def evict(self, request_id: str, evicted: Sequence[tuple[int, list[int]]]) -> None:
        """The worker reads some blocks no more; see `EvictionPolicy.settle`."""
        self._evicted.setdefault(request_id, []).extend(evicted)

    def drop(self, request_id: str) -> None:
        """The request is over."""
        self._evicted.pop(request_id, None)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """vLLM's: what no token to come will read is freed. ``processed_computed_tokens``: settled ones."""
        spec = self.kv_cache_spec
        block = processed_computed_tokens // self.block_size
        if spec.span_blocks:
            num = num_spans(block, spec.window_blocks, spec.sink_blocks, spec.span_blocks)
            for first in range(spec.sink_blocks, spec.sink_blocks + num * spec.span_blocks, spec.span_blocks):
                self._remove_blocks_in_range(request_id, first + 1, first + spec.span_blocks)
        elif spec.window_blocks is not None:
            self._remove_blocks_in_range(request_id, spec.sink_blocks, block - spec.window_blocks)
        # A request that is read again reads its prompt whole first.
        for first, blocks in self._evicted.get(request_id, ()):
            if first <= processed_computed_tokens:
                self._remove(request_id, blocks)

    def _remove(self, request_id: str, places: Sequence[int]) -> None:
        blocks = self.req_to_blocks.get(request_id, [])
        freed = [blocks[i] for i in reversed(places) if i < len(blocks) and not blocks[i].is_null]
        for i in places:
            if i < len(blocks):
                blocks[i] = self._null_block
        if freed:
            self.block_pool.free_blocks(freed)

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, *, kv_cache_spec: Any, **kwargs: Any
    ) -> Any:
        """vLLM's; the tokens that are asked what they attend to are read, not found."""
        max_length = max(max_length - max(kv_cache_spec.watched_tokens - 1, 0), 0)
        return super().find_longest_cache_hit(block_hashes, max_length, kv_cache_spec=kv_cache_spec, **kwargs)

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """vLLM's; an answer's blocks are not those of a prompt that has the same tokens, where answers read less."""
        if self.kv_cache_spec.answers_read_less:
            num_tokens = min(num_tokens, request.num_prompt_tokens)
        super().cache_blocks(request, num_tokens, *args, **kwargs)

    def _with_tail(self, num_tokens: int) -> int:
        return num_tokens + int(self.kv_cache_spec.tail_blocks) * self.block_size

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        wanted = self._with_tail(num_tokens)
        num: int = super().get_num_blocks_to_allocate(request_id, wanted, *args, **kwargs)
        return num

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        return super().allocate_new_blocks(request_id, self._with_tail(num_tokens), *args, **kwargs)


# The table of specs is filled when it is first asked for, and only if it is empty. This module is imported where a spec
# is made or unpickled: in workers, and in the engine's core before it looks for a manager.
KVCacheSpecRegistry._ensure_registered()


@register_kv_cache_spec(manager_class=CodecManager, uniform_type_base_spec=FullAttentionSpec)
@dataclass(frozen=True, kw_only=True)
class CodecSpec(FullAttentionSpec):  # type: ignore[misc]
    """Blocks of bytes, or of vLLM's own keys and values of which some are forgotten.

    Args:
        tail_blocks: how many more a request has than its tokens fill.
        window_blocks: how many before a token's own it reads; None: all.
        sink_blocks: how many of the first it reads whatever the window is.
        span_blocks: how many before the window become one; 0: they are not read.
        most_blocks: how many a request ever has; None: those of its tokens and the tail.
        watched_tokens: how many of a prompt's last tokens are never found in the cache.
        answers_read_less: whether an answer's blocks are not cached.
    """

    tail_blocks: int = 0
    window_blocks: int | None = None
    sink_blocks: int = 0
    span_blocks: int = 0
    most_blocks: int | None = None
    watched_tokens: int = 0
    answers_read_less: bool = False

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        """vLLM's: the width of block tables."""
        return int(super().max_num_blocks_per_req(vllm_config, max_len)) + self.tail_blocks

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """vLLM's: of a request of the greatest length."""
        page = int(self.page_size_bytes)
        whole = int(super().max_memory_usage_bytes(vllm_config)) + self.tail_blocks * page
        return whole if self.most_blocks is None else min(whole, self.most_blocks * page)

    @classmethod
    def merge(cls, specs: Any) -> Any:
        """vLLM's, which knows no fields but its own."""
        # Heads of one size are encoded alike; of two sizes the one with the longer tail asks for enough.
        most = max(specs, key=lambda spec: spec.tail_blocks)
        return replace(super().merge(specs), **{name: getattr(most, name) for name in OWN_FIELDS})


OWN_FIELDS = (
    *("tail_blocks", "window_blocks", "sink_blocks", "span_blocks", "most_blocks"),
    *("watched_tokens", "answers_read_less"),
)


def codec_specs(vllm_config: Any, specs: dict[str, Any]) -> dict[str, Any]:
    """The layers' specs with the server's KV method.

    Raises:
        ValueError: a layer's attention is of a kind that no method knows.
    """
    settings = kv_cache.from_config(vllm_config)
    assert settings is not None
    num_drafts = vllm_config.num_speculative_tokens or 0
    found = {}
    for name, spec in specs.items():
        if type(spec) is not FullAttentionSpec or spec.sliding_window is not None or spec.non_causal:
            raise ValueError(
                f"{kv_cache.FIELD}: layer {name} has {type(spec).__name__}, of another kind than plain causal "
                "attention, which is what KV methods know. Remove it for this model."
            )
        codec = settings.codec(spec.block_size, spec.head_size)
        values = {field.name: getattr(spec, field.name) for field in fields(spec)}
        tail, lookahead = 0, num_drafts
        if not vllm_config.use_v2_model_runner:
            element_size = vllm_config.model_config.dtype.itemsize
            tail, lookahead = codec.format.tail_blocks(element_size, spec.block_size + num_drafts), 0
            values |= {"dtype": torch.uint8, "state_content_bytes": codec.bytes_per_token}
        values |= {
            "tail_blocks": tail,
            "window_blocks": codec.window_blocks,
            "sink_blocks": codec.sink_blocks,
            "span_blocks": codec.span_blocks,
            "watched_tokens": codec.watched_tokens,
            "answers_read_less": codec.ANSWERS_READ_LESS,
        }
        if codec.window_blocks is not None:
            # A step's tokens come on top, and neither they nor the window need begin with a block.
            in_step = -(-(vllm_config.max_in_flight_tokens + lookahead) // spec.block_size) + 1
            of_window = len(
                codec.format.blocks_read(vllm_config.model_config.max_model_len // spec.block_size)
            )
            of_window = max(of_window + codec.span_blocks - 1, codec.sink_blocks + codec.window_blocks)
            values["most_blocks"] = of_window + in_step + tail
        found[name] = CodecSpec(**values)
    return found
