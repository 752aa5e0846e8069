# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of random weights, a megabyte each, of the architectures that people serve.

Few tokens are ever likely (`LIKELY`), so that drafts are accepted, and attention says which: a drafter is right some
of the time, and a wrong mask, position or slot is another token.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LIKELY = 24  # tokens
WINDOW = 64
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 1 / math.sqrt(64),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
MIXED = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
MAMBA_HEADS = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 64,
    "mamba_expand": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Of architectures whose heads have the rest of the width, whatever `head_dim` says.
WIDE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
LATENT = {
    "kv_lora_rank": 512,  # what vLLM's CPU kernel is made for
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "q_lora_rank": None,
    "num_key_value_heads": 4,
    "head_dim": 64,  # that turns
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


def _of(name: str, **options: Any) -> Callable[..., Any]:
    """A model of transformers' class of that name."""

    def make(**changed: Any) -> Any:
        import transformers

        config_class = getattr(transformers, f"{name}Config")
        # Some say of themselves how wide a head is.
        sizes = {
            key: size
            for key, size in SIZES.items()
            if not isinstance(getattr(config_class, key, None), property)
        }
        config = config_class(**{**sizes, **options, **changed})
        return getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)

    return make


MODELS: dict[str, Callable[..., Any]] = {
    "llama": _of("Llama"),
    "qwen2": _of("Qwen2", **WIDE_HEADS),
    "qwen3": _of("Qwen3"),
    "qwen3_moe": _of("Qwen3Moe", **EXPERTS),
    "phi3": _of("Phi3", rope_theta=10000.0),
    "glm4": _of("Glm4", partial_rotary_factor=0.5),
    "mistral": _of("Mistral", sliding_window=WINDOW),
    "gemma2": _of("Gemma2", **GEMMA, attn_logit_softcapping=2.0),
    "gemma3": _of("Gemma3Text", **GEMMA, layer_types=MIXED),
    "gpt_oss": _of(
        "GptOss",
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "granite": _of("Granite", **WIDE_HEADS, logits_scaling=0.25),
    "cohere2": _of(
        "Cohere2", **WIDE_HEADS, sliding_window=WINDOW, layer_types=MIXED, tie_word_embeddings=True
    ),
    "opt": _of("OPT", num_attention_heads=2, ffn_dim=128, word_embed_proj_dim=64, init_std=1 / math.sqrt(64)),
    "falcon": _of(
        "Falcon", num_attention_heads=2, alibi=True, multi_query=False, bias=True, parallel_attn=False
    ),
    "llama4": _of(
        "Llama4Text",
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_chunk_size=WINDOW,
        floor_scale=100,  # tokens from which on a query's factor grows
        intermediate_size_mlp=128,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
    ),
    "mamba2": _of("Mamba2", num_heads=8, head_dim=16, state_size=32, n_groups=2, chunk_size=64),
    "granite4": _of(
        "GraniteMoeHybrid",
        **MAMBA_HEADS,
        **WIDE_HEADS,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        layer_types=["mamba", "mamba", "attention", "mamba"],
    ),
    "falcon_h1": _of("FalconH1", **MAMBA_HEADS, mamba_d_ssm=128),
    "nemotron_h": _of(
        "NemotronH",
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=32,
        n_groups=2,
        chunk_size=64,
        layers_block_type=["mamba", "attention", "mamba", "mlp"],
    ),
    "qwen3_next": _of(
        "Qwen3Next",
        # All experts: in bfloat16 those of random weights would be chosen by chance.
        **{**EXPERTS, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 64},
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    ),
    "llama_int8": _of("Llama"),
    "llama_int4": _of("Llama"),
    "deepseek_v2": _of("DeepseekV2", **LATENT),
    "deepseek_v3": _of("DeepseekV3", **LATENT, topk_method="noaux_tc", scoring_func="sigmoid"),
}
# Weights that are quantised by compressed-tensors, which vLLM reads them with: its scheme, and how many share a scale.
QUANTISED: dict[str, tuple[str, int | None]] = {"llama_int8": ("W8A8", None), "llama_int4": ("W4A16", 32)}
# What each has of interest, for docs/models.md.
ABOUT = {
    "llama": "grouped heads; SmolLM and many others",
    "qwen2": "biases of keys, queries and values",
    "qwen3": "norms of each head's keys and queries",
    "qwen3_moe": "experts, two of four",
    "phi3": "fused projections",
    "glm4": "rotary positions of half a head, norms behind each part",
    "mistral": f"a sliding window of {WINDOW} in all layers",
    "gemma2": f"a soft-cap, a window of {WINDOW} in every other layer",
    "gemma3": f"a window of {WINDOW} in three of four layers, norms of heads",
    "gpt_oss": f"sinks, experts, a window of {WINDOW} in every other layer",
    "granite": "multipliers of embeddings, residuals, attention and logits",
    "cohere2": f"attention beside the MLP, a window of {WINDOW} in three of four layers, no positions in the fourth",
    "opt": "learned positions, biases, no gates",
    "falcon": "ALiBi instead of positions",
    "llama4": f"chunks of {WINDOW} tokens in three of four layers, experts, no positions in the fourth",
    "mamba2": "Mamba-2 alone, no attention",
    "granite4": "Mamba-2 in three of four layers, experts, one of them shared",
    "falcon_h1": "Mamba-2 beside attention in each layer, multipliers",
    "nemotron_h": "layers of Mamba-2, of attention and of an MLP",
    "qwen3_next": "gated delta nets in three of four layers, experts; in bfloat16, as on CPUs no other is there",
    "llama_int8": "weights of int8 (W8A8), activations quantised token by token",
    "llama_int4": "weights of int4 (W4A16), 32 with a scale; in bfloat16, as on CPUs float32 is not there",
    "deepseek_v2": "latent attention (MLA), experts, one of them shared",
    "deepseek_v3": "latent attention (MLA), experts by sigmoid and groups, one of them shared",
}
# vLLM 0.32's rotary embedding in C reads parts of heads, which latent attention turns, as if rows lay side by side: on
# CPUs plain vLLM's answers then depend on a request's place in the batch.
NATIVE_ROTARY = {
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    "num_gpu_blocks_override": 70,
}
RECURRENT = {"enable_prefix_caching": False}  # plain vLLM fails with it on CPUs
BFLOAT16 = ("qwen3_next", "llama_int4")  # vLLM's kernels for CPUs have no other
# Of the engine, for models that need others than all do.
OPTIONS: dict[str, dict[str, Any]] = {
    "gemma2": {"num_gpu_blocks_override": 34},  # windowed layers have blocks of their own, in groups
    "gpt_oss": {"num_gpu_blocks_override": 34},
    "gemma3": {"num_gpu_blocks_override": 70},
    "cohere2": {"num_gpu_blocks_override": 70},
    "llama4": {"num_gpu_blocks_override": 70},
    "mamba2": RECURRENT,
    "granite4": {**RECURRENT, "num_gpu_blocks_override": 19},
    "falcon_h1": RECURRENT,
    "nemotron_h": RECURRENT,
    "qwen3_next": {**RECURRENT, "dtype": "bfloat16"},
    "llama_int4": {"dtype": "bfloat16"},
    "deepseek_v2": NATIVE_ROTARY,
    "deepseek_v3": NATIVE_ROTARY,
}

# Where no request is preempted: windows give blocks back, states take few, or other layers need more at start-up.
ROOMY = (
    *("cohere2", "deepseek_v2", "deepseek_v3", "falcon_h1", "gemma3", "gpt_oss", "llama4"),
    *("mamba2", "mistral", "nemotron_h", "qwen3_next"),
)


def write(name: str, tokenizer: Path, folder: Path, **changed: Any) -> str:
    """A checkpoint in ``folder``, with the tokenizer of the folder ``tokenizer``; ``changed`` of its configuration."""
    torch.manual_seed(0)
    model = MODELS[name](**changed).to(torch.float32)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith("sinks"):
                value.normal_()
        head = model.lm_head.weight
        head[LIKELY:] = 0
    if name in QUANTISED:
        compressor = _compress(model, *QUANTISED[name])
        model.save_pretrained(folder)
        compressor.update_config(str(folder))
    else:
        model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder / file)
    return str(folder)


def _compress(model: Any, scheme: str, group: int | None) -> Any:
    """Quantise all linear layers but the head; what then writes the config."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    how = preset_name_to_scheme(scheme, ["Linear"])
    how.weights.group_size = group
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": how}, ignore=["lm_head"]))
    for layer in model.modules():
        if hasattr(layer, "quantization_scheme"):
            groups = layer.weight.data.unflatten(1, (-1, group or layer.weight.shape[1]))
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), how.weights)
            layer.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    return compressor


def write_config(name: str, folder: Path) -> str:
    """A model's config alone in ``folder``."""
    model = MODELS[name]()
    model.config.architectures = [type(model).__name__]
    compressor = _compress(model, *QUANTISED[name]) if name in QUANTISED else None
    model.config.save_pretrained(folder)
    if compressor is not None:
        compressor.update_config(str(folder))
    return str(folder)
