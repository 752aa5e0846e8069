# SPDX-License-Identifier: Apache-2.0
"""Models with M-RoPE, as small checkpoints of random weights: Qwen2.5-VL and Qwen3-VL, with two layers that see.

As in `zoo`, few tokens are ever likely. An image of so many tokens takes fewer positions, so that text behind it stands
elsewhere than its tokens are counted.
"""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import torch
import zoo
from PIL import Image

NAMES = ("qwen2_5_vl", "qwen3_vl")
VIDEO_PROCESSORS = {"qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}
# What each has of interest, for docs/models.md.
ABOUT = {
    "qwen2_5_vl": "M-RoPE in sections, requests with images",
    "qwen3_vl": "M-RoPE interleaved, what is seen goes into two depths, requests with images",
}
# Of engines; and so few blocks that some of the requests of `prompts` are preempted.
OPTIONS: dict[str, Any] = {"limit_mm_per_prompt": {"image": 2, "video": 0}, "num_gpu_blocks_override": 20}
PATCH_SIZE, MERGED = 4, 2
# For the processes that vLLM starts; those of tests have it by pyproject.toml.
ENVIRONMENT = {
    "PYTHONPATH": f"{Path(__file__).parent / 'small_torchvision'}:{os.environ.get('PYTHONPATH', '')}"
}
# What special tokens are called instead, in which nothing of ours is written.
TOKENS = {
    "<repo_name>": "<|image_pad|>",
    "<file_sep>": "<|vision_start|>",
    "<filename>": "<|vision_end|>",
    "<gh_stars>": "<|video_pad|>",
}
WORDS = range(20, 20 + zoo.LIKELY)  # tokens of prompts and answers, none of them special
TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": zoo.SIZES["hidden_size"],
    "patch_size": PATCH_SIZE,
    "spatial_merge_size": MERGED,
}


def _config(name: str, ids: dict[str, int]) -> Any:
    import transformers

    text = dict(zoo.SIZES)
    special = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
    }
    if name == "qwen2_5_vl":
        del text["head_dim"]  # heads have the width's rest
        text |= {"num_attention_heads": 2, "num_key_value_heads": 1}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
        tower = {**TOWER, "window_size": 4 * PATCH_SIZE * MERGED, "fullatt_block_indexes": [1]}
        return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=tower, **special)
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
    tower = {**TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=tower, **special)


def write(name: str, tokenizer: Path, folder: Path) -> str:
    """A checkpoint in ``folder``, with the tokenizer of the folder ``tokenizer``."""
    import transformers

    for file in ("tokenizer.json", "tokenizer_config.json"):
        text = (tokenizer / file).read_text()
        for old, new in TOKENS.items():
            text = text.replace(json.dumps(old), json.dumps(new))
        (folder / file).write_text(text)
    known = transformers.AutoTokenizer.from_pretrained(folder)
    config = _config(name, {each: known.convert_tokens_to_ids(each) for each in TOKENS.values()})
    torch.manual_seed(0)
    model = getattr(transformers, f"{type(config).__name__.removesuffix('Config')}ForConditionalGeneration")(
        config
    ).to(torch.float32)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.dim() > 1:
                value.normal_(std=1 / math.sqrt(value[0].numel()))
            elif "visual" in key and key.endswith("bias"):
                value.normal_()
        model.model.language_model.embed_tokens.weight.normal_(std=zoo.SIZES["initializer_range"])
        head = model.lm_head.weight
        head[: WORDS.start] = 0
        head[WORDS.stop :] = 0
    model.save_pretrained(folder)
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": f"{type(config).__name__.removesuffix('Config')}Processor",
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": 2,
        "merge_size": MERGED,
        "size": {"shortest_edge": 64, "longest_edge": 48 * 48},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    videos = {**images, "video_processor_type": VIDEO_PROCESSORS[name]}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return str(folder)


def image(seed: int, width: int, height: int) -> Any:
    """One of colours at random."""
    draw = random.Random(seed)
    return Image.frombytes("RGB", (width, height), draw.randbytes(3 * width * height))


def prompt(tokenizer: Any, length: int, images: dict[int, Any], seed: int) -> dict[str, Any]:
    """A prompt of so many words with images behind some of them, as vLLM takes it."""
    start, pad, end = (
        tokenizer.convert_tokens_to_ids(f"<|{each}|>") for each in ("vision_start", "image_pad", "vision_end")
    )
    tokens: list[int] = []
    for place, word in enumerate(random.Random(seed).choices(WORDS, k=length)):
        tokens += [word, start, pad, end] if place in images else [word]
    given: dict[str, Any] = {"prompt_token_ids": tokens}
    return {**given, "multi_modal_data": {"image": list(images.values())}} if images else given


def prompts(tokenizer: Any) -> list[dict[str, Any]]:
    """With one image, with two and with none, of several sizes."""
    return [
        prompt(tokenizer, 10, {3: image(1, 48, 48)}, 1),
        prompt(tokenizer, 60, {0: image(2, 16, 24), 40: image(3, 64, 32)}, 2),
        prompt(tokenizer, 100, {}, 3),
        prompt(tokenizer, 200, {150: image(1, 48, 48)}, 4),
        prompt(tokenizer, 12, {5: image(4, 30, 70), 11: image(5, 90, 50)}, 5),
    ]
