# SPDX-License-Identifier: Apache-2.0
"""The attention backends of the V2 runner: those of V1, whose Triton one may be captured in CUDA graphs here.

What a graph of it reads lies in buffers that stay (`v2_model_state`), and a graph is captured for steps in which every
request has a tree.
"""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


def register() -> None:
    """Put our backends in the place of vLLM's; see `vllm_ext.v1_attention.register`."""
    register_backend(AttentionBackendEnum.CPU_ATTN, "vllm_ext.v1_attention_cpu.TreeCPUAttentionBackend")
    register_backend(
        AttentionBackendEnum.TRITON_ATTN, "vllm_ext.v2_attention_triton.TreeTritonAttentionBackend"
    )
    register_backend(AttentionBackendEnum.FLASH_ATTN, "vllm_ext.v2_attention_flash.TreeFlashAttentionBackend")
