# SPDX-License-Identifier: Apache-2.0
"""Requests with pairs, some of them with images, and the prompts that their pairs read."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tiny_idefics
from PIL import Image
from tiny_idefics import IMAGE

SYSTEM, OTHER = (
    "You are a kind and patient teacher.",
    "You are a pirate. You shout all the time, and you hate the sea.",
)
CHAT = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n"
SEEN = CHAT % f"{IMAGE}Who is this?"
PAGE = f"The first page: {IMAGE} The town is old. The second page: {IMAGE} What do you see? I see"


@functools.cache
def image(seed: int) -> Image.Image:
    size = (tiny_idefics.IMAGE_SIZE, tiny_idefics.IMAGE_SIZE, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8))


# Prompt, its images, the request's parameters, and the other prompt, in which are the same images or none.
CASES: list[tuple[str, list[int], dict[str, Any], str]] = [
    (
        CHAT % "Hi! Who are you?",
        [],
        {"cad_context": SYSTEM, "cad_negative": OTHER},
        (CHAT % "Hi! Who are you?").replace(SYSTEM, OTHER),
    ),
    (SEEN, [1], {"cad_context": SYSTEM}, SEEN.replace(SYSTEM, "")),
    (SEEN, [1], {"cad_context": SYSTEM, "cad_negative": OTHER}, SEEN.replace(SYSTEM, OTHER)),
    (PAGE, [1, 2], {"cad_context": "The town is old."}, PAGE.replace(" The town is old.", "")),
    (
        PAGE,
        [1, 2],
        {"cad_context": "The town is old.", "cad_negative": "No town is older."},
        PAGE.replace("The town is old.", "No town is older."),
    ),
    (
        PAGE,
        [2, 2],
        {"cad_context": "The first page:", "cad_negative": "1."},
        PAGE.replace("The first page:", "1."),
    ),
    (PAGE, [2, 1], {"cad_negative": "It is cold. I see"}, "It is cold. I see"),
    (PAGE, [2, 1], {"cad_negative": ""}, " see"),
    ("The sea is", [], {"cad_negative": "The mountains are", "cad_alpha": 0.5}, "The mountains are"),
    ("The sea is", [], {"cad_negative": ""}, " is"),
]
