# SPDX-License-Identifier: Apache-2.0
"""The attention backends of the V2 runner: those of V1, whose Triton one may be captured in CUDA graphs here.

What a graph of it reads lies in buffers that stay (`model_state`), and a graph is captured for steps in which every
request has a tree.
"""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


def register() -> None:
    """Register our backends instead of vLLM's; see `vllm_ext.engine.attention.tree_backend.register`."""
    register_backend(AttentionBackendEnum.CPU_ATTN, "vllm_ext.engine.attention.cpu.TreeCPUAttentionBackend")
    register_backend(
        AttentionBackendEnum.TRITON_ATTN,
        "vllm_ext.engine.attention.triton_captured.TreeTritonAttentionBackend",
    )
    register_backend(
        AttentionBackendEnum.FLASH_ATTN, "vllm_ext.engine.attention.flash_captured.TreeFlashAttentionBackend"
    )
