# SPDX-License-Identifier: Apache-2.0
"""A target with a predictor of one token more in its checkpoint, as MiMo has, for tests: the predictor knows all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from tiny_heads import WIDTH


def knowing(folder: Path, target: Path) -> str:
    """A copy of `tiny_heads.successors` whose predictor names a token's successor by the token alone.

    Args:
        folder: made.
        target: a Llama, which becomes a MiMo: the same layers with biases, all zero.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(target, folder)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    for name in [
        name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    ]:
        weights[name.replace("weight", "bias")] = torch.zeros(len(weights[name]))
    own = "model.layers.0."
    predictor = {
        name.removeprefix(own): value.clone() for name, value in weights.items() if name.startswith(own)
    }
    norms = {f"{name}_layernorm.weight": torch.ones(WIDTH) for name in ("token", "hidden", "final")}
    # Of the target's hidden state and the token's embedding, side by side, the latter.
    projection = {"input_proj.weight": torch.eye(WIDTH, 2 * WIDTH).roll(WIDTH, 1)}
    weights |= {
        f"model.mtp_layers.0.{name}": value for name, value in (predictor | norms | projection).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "use_sliding_window": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
