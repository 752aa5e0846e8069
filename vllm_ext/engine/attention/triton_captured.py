# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton attention backend, and trees whose rows lie in buffers that stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionMetadataBuilder

from vllm_ext.engine.attention import triton
from vllm_ext.engine.tree_layers import takes_trees
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.path_move import Caches, move_paths


class TreeTritonAttentionImpl(triton.TreeTritonAttentionImpl):
    """V1's, that moves keys and values of all layers at once."""

    backend: ClassVar[Backend] = "triton"

    @classmethod
    def path_mover(cls, layers: Sequence[Any]) -> Callable[..., None]:
        """What moves paths in the layers' caches; see `vllm_ext.kernels.path_move.move_paths`."""
        kinds: dict[Any, list[torch.Tensor]] = {}
        for layer in layers:
            cache = layer.kv_cache
            kinds.setdefault((cache.shape, cache.dtype, cache.stride()), []).append(cache)
        all_caches = [Caches(caches) for caches in kinds.values()]

        def move(path: torch.Tensor, first_row: torch.Tensor, slots: torch.Tensor) -> None:
            for caches in all_caches:
                move_paths(caches, path, first_row, slots, cls.backend)

        return move


class InGraphs:
    """Mixin in front of a stock metadata builder.

    In CUDA graphs where all requests have as many rows: of mixed steps a graph would not see which have trees.

    Or where all have trees, if of a root alone: see `vllm_ext.engine.v2.shares`.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
        """Rows of the largest tree; vLLM asks where `TreeSpeculator.enable_adaptive_verification`."""
        nodes: int = vllm_config.num_speculative_tokens
        return 1 + nodes


class TreeTritonAttentionMetadataBuilder(InGraphs, TritonAttentionMetadataBuilder):  # type: ignore[misc]
    """See `InGraphs`."""


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
