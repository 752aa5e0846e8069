# SPDX-License-Identifier: Apache-2.0
"""Models made of the demo model's first layers and tokens: fast to start, to compile, to train and to sample from."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

# The tokenizer's first: of the whole, the output head is more work than all of a few layers.
VOCABULARY = 4096
QUIET = 0.02


def write(
    source: Path,
    target: Path,
    *,
    layers: int,
    heads: int = 9,
    kv_heads: int = 3,
    vocabulary: int | None = VOCABULARY,
    quiet_from: int | None = None,
) -> str:
    """The folder ``target`` with a model of the first layers, heads and tokens of ``source``.

    Args:
        vocabulary: how many tokens; none: all. With few of them a layer's first words are less often the model's.
        quiet_from: what layers from this one on add to the residual stream is scaled by `QUIET`; none: no layer.
    """
    config = json.loads((source / "config.json").read_text())
    head = config["hidden_size"] // config["num_attention_heads"]
    weights = {}
    for name, value in load_file(source / "model.safetensors").items():
        parts = name.split(".")
        layer = int(parts[2]) if parts[1] == "layers" else -1
        if layer >= layers:
            continue
        if "embed_tokens" in name:
            value = value[:vocabulary]
        elif "q_proj" in name:
            value = value[: heads * head]
        elif "k_proj" in name or "v_proj" in name:
            value = value[: kv_heads * head]
        elif "o_proj" in name:
            value = value[:, : heads * head]
        if quiet_from is not None and layer >= quiet_from and parts[4] in ("o_proj", "down_proj"):
            value = value * QUIET
        weights[name] = value.contiguous()
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja") and "index" not in file.name:
            (target / file.name).write_bytes(file.read_bytes())
    config |= {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
    }
    if vocabulary is not None:
        config["vocab_size"] = vocabulary
        cut_tokenizer(target / "tokenizer.json", vocabulary)
    (target / "config.json").write_text(json.dumps(config))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def cut_tokenizer(file: Path, vocabulary: int) -> None:
    """Byte pairs merged less far: tokens are numbered in the order in which merges made them."""
    tokenizer = json.loads(file.read_text())
    model = tokenizer["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < vocabulary}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    file.write_text(json.dumps(tokenizer))
