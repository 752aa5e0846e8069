# SPDX-License-Identifier: Apache-2.0
"""The symbols of vLLM's CUDA attention backends that we override, call or read."""

from __future__ import annotations

from vllm_ext.compat.hooks import Hook

_FORWARD = ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
_UPDATE = ("self", "layer", "key", "value", "kv_cache", "slot_mapping")
_TRITON = "vllm.v1.attention.backends.triton_attn"
_FLASH = "vllm.v1.attention.backends.flash_attn"
CUDA_HOOKS = (
    Hook(_TRITON, "TritonAttentionImpl.forward", _FORWARD, "attends over trees"),
    Hook(_TRITON, "TritonAttentionImpl.do_kv_cache_update", _UPDATE, "writes the accepted path's KV"),
    Hook(
        _TRITON,
        "TritonAttentionMetadataBuilder.get_cudagraph_support",
        ("vllm_config", "kv_cache_spec"),
        "keeps trees out of graphs on V1",
    ),
    Hook(_FLASH, "FlashAttentionImpl.forward", _FORWARD, "attends over trees"),
    Hook(_FLASH, "FlashAttentionImpl.do_kv_cache_update", _UPDATE, "writes the accepted path's KV"),
    Hook(
        _FLASH,
        "FlashAttentionMetadataBuilder.get_cudagraph_support",
        ("vllm_config", "kv_cache_spec"),
        "keeps trees out of graphs on V1",
    ),
    Hook(
        _FLASH,
        "FlashAttentionMetadata",
        ("num_actual_tokens", "max_query_len", "query_start_loc", "max_seq_len", "seq_lens", "block_table"),
        "tells how long contexts are at most",
    ),
    Hook(
        _FLASH,
        "FlashAttentionMetadataBuilder._store_scheduler_metadata",
        ("self", "scheduler_metadata"),
        "has room for some requests",
    ),
    Hook(_FLASH, "FlashAttentionMetadata.max_num_splits", None, "bounds the parts of keys in graphs"),
    Hook(
        "vllm.v1.attention.selector",
        "AttentionSelectorConfig",
        ("head_size", "dtype", "kv_cache_dtype", "block_size"),
        "tells doctor which backend vLLM chooses",
    ),
    Hook(
        "vllm.v1.attention.backends.fa_utils",
        "get_flash_attn_version",
        None,
        "tells which FlashAttention there is",
    ),
    Hook(
        "vllm.utils.torch_utils",
        "canonicalize_singleton_dim_strides",
        ("t",),
        "strides of a cache of one KV head",
    ),
    Hook(
        "vllm.vllm_flash_attn.flash_attn_interface",
        "flash_attn_varlen_func",
        ("q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "cu_seqlens_k", "seqused_k"),
        "attends to the context before a tree",
    ),
)
