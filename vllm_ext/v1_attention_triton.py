# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton attention backend, and trees."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_ext.v1_attention import TreeAttention


class TreeTritonAttentionImpl(TreeAttention, TritonAttentionImpl):  # type: ignore[misc]
    """The stock kernel for all rows but a tree's."""

    @staticmethod
    def make_views(layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TreeAttention.make_views`: vLLM's own order, keys and values side by side."""
        head_size = kv_cache.shape[-1] // 2
        return kv_cache[..., :head_size], kv_cache[..., head_size:]


class TreeTritonAttentionMetadataBuilder(TritonAttentionMetadataBuilder):  # type: ignore[misc]
    """Keeps attention out of CUDA graphs: a replay would not see that a step has trees."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER


class TreeTritonAttentionBackend(TritonAttentionBackend):  # type: ignore[misc]
    """vLLM's backend with the two above."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """See vLLM's ``AttentionBackend``."""
        return TreeTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """See vLLM's ``AttentionBackend``."""
        return TreeTritonAttentionMetadataBuilder
