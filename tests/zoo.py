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
WINDOW = CHUNK = 64
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
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def _of(name: str, **options: Any) -> Callable[..., Any]:
    """A model of transformers' class of that name."""

    def make(**changed: Any) -> Any:
        import transformers

        config = getattr(transformers, f"{name}Config")(**{**SIZES, **options, **changed})
        return getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)

    return make


MODELS: dict[str, Callable[..., Any]] = {
    "llama": _of("Llama"),
    "qwen2": _of(
        "Qwen2", num_attention_heads=2, num_key_value_heads=1
    ),  # whose heads have the rest of the width
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
    "llama4": _of(
        "Llama4Text",
        attention_chunk_size=CHUNK,  # of three layers; the last attends to all
        intermediate_size_mlp=128,
        interleave_moe_layer_step=2,
        num_local_experts=4,
        num_experts_per_tok=1,
        floor_scale=100,  # tokens from which on a query's factor grows
    ),
}


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
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder / file)
    return str(folder)
