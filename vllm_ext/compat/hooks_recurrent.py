# SPDX-License-Identifier: Apache-2.0
"""The symbols of vLLM's recurrent layers that we override, call or read."""

from __future__ import annotations

from vllm_ext.compat.hooks import Hook

_MAMBA = "vllm.model_executor.layers.mamba"
_BASE, _MIXER2 = f"{_MAMBA}.abstract", f"{_MAMBA}.mamba_mixer2"
_DELTA = f"{_MAMBA}.gdn.qwen_gdn_linear_attn"
_METADATA = "vllm.v1.attention.backend"
RECURRENT_HOOKS = (
    Hook(_BASE, "MambaBase.bind_kv_cache", ("self", "kv_cache"), "makes room beside the states"),
    Hook(_BASE, "MambaBase.get_kv_cache_spec", ("self", "vllm_config"), "has a state for each request"),
    Hook("vllm.v1.kv_cache_interface", "MambaSpec.num_speculative_blocks", None, "states of drafts: none"),
    Hook(
        _MIXER2,
        "MambaMixer2.conv_ssm_forward",
        ("self", "projected_states", "output"),
        "reads the rows of requests that decode",
    ),
    Hook(_DELTA, "QwenGatedDeltaNetAttention.forward_cpu", ("self", "hidden_states"), "calls our operator"),
    Hook(
        _DELTA,
        "QwenGatedDeltaNetAttention._forward_core",
        ("self", "mixed_qkv", "b", "a", "core_attn_out"),
        "reads the rows of requests that decode, on CUDA",
    ),
    Hook(
        _DELTA,
        "QwenGatedDeltaNetAttention._output_projection",
        ("self", "core_attn_out", "z"),
        "ends the layer",
    ),
    Hook(
        _DELTA,
        "QwenGatedDeltaNetAttention.fix_query_key_value_ordering",
        ("self", "mixed_qkvz", "mixed_ba"),
        "takes projections apart",
    ),
    Hook(
        _DELTA,
        "QwenGatedDeltaNetAttention.rearrange_mixed_qkv",
        ("self", "mixed_qkv"),
        "takes what is convolved apart",
    ),
    Hook(f"{_MAMBA}.mamba_utils", "is_conv_state_dim_first", (), "tells how inputs of convolutions lie"),
    *(
        Hook(_METADATA, f"CommonAttentionMetadata.{name}", None, "is found out again for a part of a batch")
        for name in ("_num_computed_tokens_cache", "_token_to_req_indices_cache")
    ),
)
