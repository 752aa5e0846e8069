# SPDX-License-Identifier: Apache-2.0
"""The symbols of vLLM that let drafts give way where KV blocks are short, with either runner."""

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
)
