# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention layers and groups of them, as far as `engine.tree_layers` looks: real classes, no weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_ext.engine.attention.triton import TreeTritonAttentionBackend

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
SUPPORTED: dict[str, Any] = {
    "sliding_window": -1,
    "alibi_slopes": None,
    "logits_soft_cap": 0,
    "sinks": None,
    "kv_cache_dtype": "auto",
    "attn_type": "decoder",
    "head_size": 64,
}


def layer(
    backend: Any = TreeTritonAttentionBackend,
    spec: Any = SPEC,
    impl: Any = None,
    isa: str = "vec",
    use_mm_prefix: bool = False,
    **features: Any,
) -> SimpleNamespace:
    """A layer with this backend, whose implementation has been made with these features."""
    made = object.__new__(impl or backend.get_impl_cls())
    vars(made).update({**SUPPORTED, **features})
    return SimpleNamespace(
        impl=made,
        isa=isa,
        attn_type=made.attn_type,
        use_mm_prefix=use_mm_prefix,
        get_attn_backend=lambda: backend,
        get_kv_cache_spec=lambda vllm_config: spec,
    )


def group(backend: Any = TreeTritonAttentionBackend, builder: Any = None, **fields: Any) -> SimpleNamespace:
    """The runner's group of layers "a" and "b"."""
    builder = builder or backend.get_builder_cls()
    made = {"layer_names": ["a", "b"], "kv_cache_spec": SPEC, "kernel_block_size": None, **fields}
    return SimpleNamespace(backend=backend, metadata_builders=[object.__new__(builder)], **made)


def config(of_model: dict[str, Any] | None = None, **layers: Any) -> SimpleNamespace:
    """The engine's configuration with these layers."""
    return SimpleNamespace(
        num_speculative_tokens=8,
        model_config=SimpleNamespace(**{"rswa_window": None, **(of_model or {})}),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
