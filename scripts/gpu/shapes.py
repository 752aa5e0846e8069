# SPDX-License-Identifier: Apache-2.0
"""Models by their shapes alone, with random weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """A Llama."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    dtype: str
    tied: bool = False
    kv_cache_bytes: int = 0
    max_model_len: int = 1024
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192

    def write(self, folder: Path) -> Path:
        """The folder with its ``config.json``."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": max(8192, self.max_model_len),
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "torch_dtype": self.dtype,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        (folder / "config.json").write_text(json.dumps(config))
        return folder


# Llama 3.1 8B; SmolLM2-135M with room for the traces' own ids.
EIGHT_B = Shape(32, 4096, 14336, 32, 8, 128, 128256, "bfloat16", kv_cache_bytes=6 << 30)
SMOL = Shape(30, 576, 1536, 9, 3, 64, 49152 + 128, "bfloat16", tied=True, kv_cache_bytes=2 << 30)
SHAPES = {"8b": EIGHT_B, "smol": SMOL}
CORRECT = {
    "float32": Shape(4, 512, 1024, 8, 2, 64, 2048, "float32", kv_cache_bytes=1 << 30, max_num_seqs=16),
    "bfloat16": Shape(4, 1024, 2048, 8, 2, 128, 2048, "bfloat16", kv_cache_bytes=1 << 30, max_num_seqs=16),
}
DRY = Shape(
    2, 128, 256, 4, 2, 32, 1024, "float32", max_model_len=192, max_num_seqs=4, max_num_batched_tokens=256
)
