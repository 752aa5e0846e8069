# SPDX-License-Identifier: Apache-2.0
"""Heads of EAGLE-3's kind and texts for them, of random numbers, for tests of training."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch

from vllm_ext.training.eagle import Head
from vllm_ext.training.eagle_texts import EagleTexts

AnyHead = TypeVar("AnyHead", bound=Head)
SIZE, VOCAB, TOP = 16, 40, 3
CONFIG: dict[str, Any] = {
    "hidden_size": SIZE,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eagle_aux_hidden_state_layer_ids": [1, 2],
    "torch_dtype": "float32",
}
LENGTHS, LEARNING = [9, 6], [7, 5]


def random(kind: type[AnyHead], **config: Any) -> AnyHead:
    """Of weights that make everything in it matter."""
    torch.manual_seed(0)
    own = {**CONFIG, "architectures": [kind.architecture], **config}
    made = kind(own, torch.randn(VOCAB, SIZE), np.arange(VOCAB, dtype=np.int32))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    return made.eval()


def texts_of(seed: int) -> EagleTexts:
    """Answers that were sampled: what came is not what the target ranked first."""
    draw = torch.Generator().manual_seed(seed)
    rows, learning = sum(LENGTHS), sum(LEARNING)
    return EagleTexts(
        torch.randn(rows, 2 * SIZE, generator=draw).to(torch.bfloat16),
        torch.randint(VOCAB // 2, (rows,), generator=draw),
        torch.cat([torch.arange(length) for length in LENGTHS]),
        torch.tensor([0, *np.cumsum(LENGTHS)]),
        VOCAB // 2 + torch.randint(VOCAB // 2, (learning, TOP), generator=draw),
        torch.full((learning, TOP), -1.5),
        torch.tensor([0, *np.cumsum(LEARNING)]),
        torch.tensor([False, False]),
    )
