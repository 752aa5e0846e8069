# SPDX-License-Identifier: Apache-2.0
"""A model that sees: Idefics3 around a slice of the demo model, with a vision tower of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

IMAGE_SIZE, PATCH_SIZE, SCALE = 24, 6, 2
NUM_EMBEDS = (IMAGE_SIZE // PATCH_SIZE // SCALE) ** 2
LENGTH = NUM_EMBEDS + 3  # of an image's placeholder, in tokens
# What special tokens of the slice are called instead, in which nothing of ours is written.
TOKENS = {
    "<repo_name>": "<image>",
    "<file_sep>": "<fake_token_around_image>",
    "<filename>": "<global-img>",
    "<gh_stars>": "<end_of_utterance>",
}
IMAGE = "<image>"


def write(source: str, target: Path) -> str:
    """The folder ``target`` with the model around that of ``source``."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    for file in Path(source).iterdir():
        if file.suffix == ".jinja" or file.name.startswith("token"):
            text = file.read_text()
            for old, new in TOKENS.items():
                text = text.replace(json.dumps(old), json.dumps(new))
            (target / file.name).write_text(text)
    ids = {
        each["content"]: each["id"]
        for each in json.loads((target / "tokenizer.json").read_text())["added_tokens"]
    }
    language = json.loads((Path(source) / "config.json").read_text())
    tower = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
    }
    config = Idefics3Config(
        text_config=language,
        vision_config=tower,
        scale_factor=SCALE,
        image_token_id=ids[IMAGE],
        pad_token_id=0,
        tie_word_embeddings=language["tie_word_embeddings"],
    )
    config.eos_token_id = config.text_config.eos_token_id = language["eos_token_id"]
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).float()
    weights = load_file(Path(source) / "model.safetensors")
    model.model.text_model.load_state_dict(
        {
            name.removeprefix("model."): value.float()
            for name, value in weights.items()
            if "lm_head" not in name
        }
    )
    # Images are to say something.
    torch.nn.init.normal_(model.model.connector.modality_projection.proj.weight, std=0.3)
    model.save_pretrained(target)
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_convert_rgb": True,
        "do_image_splitting": False,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": IMAGE_SIZE},
        "size": {"longest_edge": IMAGE_SIZE},
        "resample": 1,
    }
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": NUM_EMBEDS}
    (target / "preprocessor_config.json").write_text(json.dumps(images))
    (target / "processor_config.json").write_text(json.dumps(processor))
    return str(target)
