# SPDX-License-Identifier: Apache-2.0
"""The attention backends of the V2 runner: those of V1, whose Triton one may be captured in CUDA graphs here.

What a graph of it reads lies in buffers that stay (`model_state`), and a graph is captured for steps in which every
request has a tree.
"""

from __future__ import annotations

from vllm_ext.engine import backend_overrides


def register() -> None:
    """Register our backends instead of vLLM's; see `vllm_ext.engine.attention.tree_backend.register`."""
    backend_overrides.register(
        {
            "CPU_ATTN": "vllm_ext.engine.attention.cpu.TreeCPUAttentionBackend",
            "TRITON_ATTN": "vllm_ext.engine.attention.triton_captured.TreeTritonAttentionBackend",
            "FLASH_ATTN": "vllm_ext.engine.attention.flash_captured.TreeFlashAttentionBackend",
        }
    )
