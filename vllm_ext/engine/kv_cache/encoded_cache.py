# SPDX-License-Identifier: Apache-2.0
"""Attention over encoded KV blocks in the V1 engine on a CPU; `block_specs` has their size, and who hands them out.

The block that fills up lies, as it is, in the bytes of the blocks behind it, which a request so always has: what is raw
is paid for out of the same memory, and vLLM's own admission and preemption know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionMetadataBuilder, AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from vllm_ext.config import kv_cache
from vllm_ext.engine import backend_overrides
from vllm_ext.engine.kv_cache.encoded_rows import EncodedMetadata, raw_mover
from vllm_ext.kernels.encoded_attention import encoded_attention


class EncodedMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Prompts' parts and decoding rows alike."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # abstract in vLLM's class

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> EncodedMetadata:
        common = common_attn_metadata
        num_requests = common.num_reqs
        settings = kv_cache.from_config(self.vllm_config)
        assert settings is not None
        return EncodedMetadata(
            common.query_start_loc[: num_requests + 1],
            common.seq_lens[:num_requests],
            common.block_table_tensor[:num_requests],
            settings.codec(self.kv_cache_spec.block_size, self.kv_cache_spec.head_size),
            self.vllm_config.model_config.dtype,
        )


class EncodedCPUAttentionImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Writes and reads in one call."""

    takes_decoding = False  # see `tree_backend.TreeAttention`: rows of drafts are marked in the metadata

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        features = {
            "sliding windows": self.sliding_window not in (None, -1),
            "ALiBi": self.alibi_slopes is not None,
            "a logits soft-cap": bool(self.logits_soft_cap),
            "attention sinks": self.sinks is not None,
            "layers that share KV": self.kv_sharing_target_layer_name is not None,
            "attention that is not a decoder's": self.attn_type != AttentionType.DECODER,
        }
        if problem := next((feature for feature, present in features.items() if present), None):
            raise ValueError(f"{kv_cache.FIELD} does not work with a model that has {problem}. Remove it.")
        vllm_config = get_current_vllm_config()
        settings = kv_cache.from_config(vllm_config)
        assert settings is not None
        self.codec = settings.codec(vllm_config.cache_config.block_size, self.head_size)
        self.raw_dtype = vllm_config.model_config.dtype

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: EncodedMetadata | None,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """vLLM's ``AttentionImpl.forward``."""
        if attn_metadata is None:  # profiling
            return output
        num = attn_metadata.num_actual_tokens
        encoded_attention(
            query[:num],
            key[:num],
            value[:num],
            kv_cache,
            output[:num],
            attn_metadata.rows,
            self.codec.format,
            self.scale,
        )
        return output

    @classmethod
    def kv_mover(cls, layers: Sequence[Any]) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """See `tree_backend.TreeAttention.kv_mover`; slots are those of `EncodedMetadata.raw_slots`."""
        return raw_mover([layer.kv_cache for layer in layers], layers[0].impl.codec, layers[0].impl.raw_dtype)


class EncodedCPUAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    """Instead of vLLM's."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """See vLLM's ``AttentionBackend``."""
        return EncodedCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """See vLLM's ``AttentionBackend``."""
        return EncodedMetadataBuilder


def register() -> None:
    """Register the backend instead of vLLM's. In the worker, before the model is built."""
    backend_overrides.register(
        {"CPU_ATTN": "vllm_ext.engine.kv_cache.encoded_cache.EncodedCPUAttentionBackend"}
    )
