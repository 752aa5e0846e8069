# SPDX-License-Identifier: Apache-2.0
"""Heads of random weights for models by their shapes alone: what their passes cost, and whether tokens stay right."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from shapes import Shape

EAGLE_ROWS = 32000  # of its language head, at most, as published ones have
MEDUSA_HEADS = 4


def eagle(shape: Shape, folder: Path) -> str:
    """An EAGLE-3 head: its config alone, as vLLM fills it with dummy weights beside a model that has them."""
    folder = shape.write(folder)
    config = json.loads((folder / "config.json").read_text())
    layers = [min(1, shape.layers), shape.layers // 2, shape.layers - 1]
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": min(EAGLE_ROWS, shape.vocab_size // 2),
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": sorted(set(layers))},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def medusa(shape: Shape, folder: Path) -> str:
    """Medusa heads with one language head, of half of the vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, size = shape.vocab_size // 2, shape.hidden
    draw, dtype = torch.Generator().manual_seed(0), getattr(torch, shape.dtype)

    def weight(count: int) -> torch.Tensor:
        return (torch.randn(count, size, generator=draw) / math.sqrt(size)).to(dtype)

    tensors = {f"blocks.{head}.layers.0.weight": weight(size) for head in range(MEDUSA_HEADS)}
    tensors |= {"lm_heads.0.weight": weight(rows), "token_map": 2 * torch.arange(rows)}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "medusa",
        "hidden_size": size,
        "vocab_size": shape.vocab_size,
        "truncated_vocab_size": rows,
        "num_heads": MEDUSA_HEADS,
        "num_hidden_layers": 1,
        "original_lm_head": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
