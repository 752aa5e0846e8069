# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton attention backend, and trees."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_ext.engine.attention.tree_backend import OutOfGraphs, TreeAttention, halves, head_problem
from vllm_ext.engine.tree_layers import takes_trees


class TreeTritonAttentionImpl(TreeAttention, TritonAttentionImpl):  # type: ignore[misc]
    """The stock kernel for all rows but a tree's."""

    @staticmethod
    def make_views(layer: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TreeAttention.make_views`."""
        return halves(kv_cache)

    @staticmethod
    def layout_problem(layer: Any) -> str | None:
        """See `TreeAttention.layout_problem`."""
        return head_problem(layer)


class TreeTritonAttentionMetadataBuilder(OutOfGraphs, TritonAttentionMetadataBuilder):  # type: ignore[misc]
    """See `OutOfGraphs`."""


@takes_trees
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
