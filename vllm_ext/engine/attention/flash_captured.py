# SPDX-License-Identifier: Apache-2.0
"""vLLM's FlashAttention backend, and trees whose rows lie in buffers that stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder

from vllm_ext.engine.attention import flash
from vllm_ext.engine.attention.triton_captured import InGraphs, TreeTritonAttentionImpl
from vllm_ext.engine.tree_layers import takes_trees
from vllm_ext.kernels.backends import Backend


class TreeFlashAttentionImpl(flash.TreeFlashAttentionImpl):
    """V1's, that moves keys and values of all layers at once."""

    backend: ClassVar[Backend] = "triton"

    @classmethod
    def path_mover(cls, layers: Sequence[Any]) -> Callable[..., None]:
        """See `TreeTritonAttentionImpl.path_mover`."""
        return TreeTritonAttentionImpl.path_mover(layers)


class TreeFlashAttentionMetadataBuilder(InGraphs, FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """See `InGraphs`."""

    def _store_scheduler_metadata(self, scheduler_metadata: Any) -> Any:
        """vLLM's, which has room for as many requests as run at once.

        Prompts may be in more parts (`kept_blocks`), and no graph has those.
        """
        stored = getattr(self, "scheduler_metadata", None)
        if scheduler_metadata is not None and stored is not None and len(scheduler_metadata) > len(stored):
            return scheduler_metadata
        return super()._store_scheduler_metadata(scheduler_metadata)


@takes_trees
class TreeFlashAttentionBackend(FlashAttentionBackend):  # type: ignore[misc]
    """vLLM's backend with the two above."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """See vLLM's ``AttentionBackend``."""
        return TreeFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """See vLLM's ``AttentionBackend``."""
        return TreeFlashAttentionMetadataBuilder
