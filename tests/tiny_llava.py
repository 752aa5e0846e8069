# SPDX-License-Identifier: Apache-2.0
"""A model that sees: LLaVA's architecture around a slice of the demo model, with a vision tower of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

IMAGE_SIZE, PATCH_SIZE = 24, 8
NUM_IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
IMAGE_TOKEN, IMAGE_TOKEN_ID = "<jupyter_text>", 12  # a special token that no text of ours has


def write(source: str, target: Path) -> str:
    """The folder ``target`` with the model around that of ``source``."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    tower = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        projection_dim=32,
    )
    text = json.loads((Path(source) / "config.json").read_text())
    torch.manual_seed(0)
    weights = {f"vision_tower.{name}": value for name, value in CLIPVisionModel(tower).state_dict().items()}
    hidden, scale = text["hidden_size"], 2.0  # images are to say something
    for name, inputs in (("linear_1", tower.hidden_size), ("linear_2", hidden)):
        weights[f"multi_modal_projector.{name}.weight"] = scale * torch.randn(hidden, inputs) / inputs**0.5
        weights[f"multi_modal_projector.{name}.bias"] = torch.zeros(hidden)
    language = load_file(Path(source) / "model.safetensors")
    weights |= {f"language_model.{name}": value for name, value in language.items()}
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": text,
        "vision_config": tower.to_dict(),
        "image_token_index": IMAGE_TOKEN_ID,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "multimodal_projector_bias": True,
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "torch_dtype": "float32",
        **{name: text[name] for name in ("bos_token_id", "eos_token_id") if name in text},
    }
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "do_center_crop": True,
        "crop_size": size,
        "do_resize": True,
        "size": {"shortest_edge": IMAGE_SIZE},
        "do_normalize": True,
        "do_rescale": True,
        "do_convert_rgb": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
        "resample": 3,
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE_TOKEN,
        "patch_size": PATCH_SIZE,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }
    for name, values in (
        ("config.json", config),
        ("preprocessor_config.json", images),
        ("processor_config.json", processor),
    ):
        (target / name).write_text(json.dumps(values))
    for file in Path(source).iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            (target / file.name).write_bytes(file.read_bytes())
    return str(target)
