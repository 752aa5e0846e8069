# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of random weights for a model of the tests, large enough to change its answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

RANK = 8
# One place more than there are adapters: on CPUs vLLM 0.32 gives requests without one that of the last place, index -1.
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK}


def write(model: str, folder: Path, seed: int) -> str:
    """In PEFT's format, of the queries and values of all layers; returns its path."""
    config = json.loads((Path(model) / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    rows = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in rows.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) * hidden**-0.5
            weights[f"{place}.lora_B.weight"] = torch.randn(width, RANK, generator=generator)
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    adapter = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 4 * RANK,
        "target_modules": [*rows],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return str(folder)


def none_and_two(model: str, folder: Path) -> list[Any]:
    """What requests name: no adapter, and each of two."""
    paths = [write(model, folder / str(seed), seed) for seed in (1, 2)]
    return [None, *(LoRARequest(f"a{number}", number, path) for number, path in enumerate(paths, 1))]


def all_differ(answers: Sequence[Any], count: int) -> bool:
    """Whether adapters change answers, which are by text and then by adapter, of which there are so many."""
    return all(a != b for a, b in combinations([answers[i::count] for i in range(count)], 2))
