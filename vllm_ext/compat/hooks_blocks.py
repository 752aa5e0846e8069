# SPDX-License-Identifier: Apache-2.0
"""The symbols of vLLM that hand out KV blocks: fewer to drafts where they are short, and to what KV methods keep."""

from __future__ import annotations

from vllm_ext.compat.hooks import Hook

_CORE = "vllm.v1.core"
_MANAGERS = f"{_CORE}.single_type_kv_cache_manager"
_WHY = "gives blocks of drafts back"

BLOCK_HOOKS = (
    Hook(
        f"{_CORE}.sched.interface",
        "PauseState.PAUSED_ALL",
        None,
        "lets a step wait for the last one's drafts",
    ),
    Hook(f"{_CORE}.sched.interface", "PauseState.UNPAUSED", None, "tells whether requests may come in"),
    Hook(
        f"{_CORE}.kv_cache_manager",
        "KVCacheManager.prefix_cache_lookup_enabled",
        ("self", "request"),
        "tells what a waiting request would share",
    ),
    Hook(
        f"{_CORE}.kv_cache_coordinator",
        "KVCacheCoordinator.find_longest_cache_hit",
        ("self", "block_hashes", "max_cache_hit_length"),
        "tells what a waiting request would share",
    ),
    Hook(f"{_CORE}.block_pool", "BlockPool.free_blocks", ("self", "ordered_blocks"), _WHY),
    Hook(f"{_CORE}.block_pool", "BlockPool.get_num_free_blocks", ("self",), "tells whether blocks are short"),
    *(
        Hook(_MANAGERS, name, None, _WHY)
        for name in ("FullAttentionManager", "SlidingWindowManager", "MambaManager")
    ),
    Hook(
        _MANAGERS,
        "FullAttentionManager.remove_skipped_blocks",
        ("self", "request_id", "processed_computed_tokens"),
        "frees blocks that are read no more",
    ),
    Hook(
        _MANAGERS,
        "FullAttentionManager.find_longest_cache_hit",
        ("block_hashes", "max_length"),
        "leaves a prompt's last tokens to be read",
    ),
    Hook(
        _MANAGERS,
        "FullAttentionManager.cache_blocks",
        ("self", "request", "num_tokens"),
        "caches no blocks of answers that read less",
    ),
    Hook(
        _MANAGERS,
        "FullAttentionManager.get_num_blocks_to_allocate",
        ("self", "request_id", "num_tokens"),
        "gives requests room for the block that is not encoded yet",
    ),
    Hook(
        _MANAGERS,
        "FullAttentionManager.allocate_new_blocks",
        ("self", "request_id", "num_tokens"),
        "gives requests room for the block that is not encoded yet",
    ),
    Hook(
        "vllm.v1.kv_cache_interface",
        "FullAttentionSpec.max_num_blocks_per_req",
        ("self", "vllm_config", "max_len"),
        "tells how many blocks a request may have",
    ),
    Hook(
        "vllm.v1.kv_cache_spec_registry",
        "KVCacheSpecRegistry._ensure_registered",
        None,
        "adds encoded blocks to the kinds that vLLM has",
    ),
    Hook(
        "vllm.v1.kv_cache_spec_registry",
        "register_kv_cache_spec",
        ("manager_class", "uniform_type_base_spec"),
        "adds encoded blocks to the kinds that vLLM has",
    ),
)
V2_BLOCK_HOOKS = (
    *BLOCK_HOOKS,
    Hook(
        "vllm.v1.worker.gpu.model_states.interface",
        "ModelState.remove_request",
        ("self", "req_id"),
        "tells whose blocks are chosen",
    ),
    *(
        Hook("vllm.v1.worker.gpu.input_batch", f"InputBatch.{field}", None, "tells which blocks rows read")
        for field in ("num_computed_tokens_np", "num_scheduled_tokens", "seq_lens_cpu_upper_bound")
    ),
)
