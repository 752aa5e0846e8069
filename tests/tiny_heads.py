# SPDX-License-Identifier: Apache-2.0
"""Medusa heads for tests: of random weights; and for a target whose tokens have one successor each, that know it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams

VOCAB, WIDTH = 1024, 128
# Of engines, and of requests.
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "block_size": 32}
KINDS = [
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=80, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=4, max_tokens=60, repetition_penalty=1.1, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=70, presence_penalty=0.5, ignore_eos=True),
    SamplingParams(temperature=0.6, seed=5, max_tokens=80, logprobs=1, ignore_eos=True),
]


def write(
    folder: Path,
    heads: list[torch.Tensor],
    blocks: list[torch.Tensor],
    *,
    shared: bool = False,
    token_map: torch.Tensor | None = None,
    vocab_size: int | None = None,
) -> str:
    """A checkpoint in vLLM's layout.

    Args:
        folder: made if it is not there.
        heads: language heads ``[num_rows, hidden_size]``: one of each head, or a single one.
        blocks: of each head its block's weight ``[hidden_size, hidden_size]``.
        shared: whether a single language head serves all.
        token_map: int64, which tokens their rows are.
        vocab_size: the target's; None: as many as rows.
    """
    from safetensors.torch import save_file

    tensors = {f"blocks.{i}.layers.0.weight": block.contiguous() for i, block in enumerate(blocks)}
    tensors |= {f"lm_heads.{i}.weight": head.contiguous() for i, head in enumerate(heads)}
    if token_map is not None:
        tensors["token_map"] = token_map
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "medusa",
        "hidden_size": heads[0].shape[1],
        "vocab_size": vocab_size or len(heads[0]),
        "truncated_vocab_size": len(heads[0]),
        "num_heads": len(blocks),
        "num_hidden_layers": 1,
        "original_lm_head": shared,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def random(folder: Path, target: Path, num_heads: int = 3) -> str:
    """Heads of random blocks on the target's own language head."""
    from safetensors.torch import load_file

    stored = load_file(target / "model.safetensors")
    head = stored.get("lm_head.weight", stored["model.embed_tokens.weight"])
    width = head.shape[1]
    draw = torch.Generator().manual_seed(0)
    blocks = [torch.randn(width, width, generator=draw) / math.sqrt(width) for _ in range(num_heads)]
    return write(folder, [head.clone()], [block.to(head) for block in blocks], shared=True)


def successors(folder: Path, tokenizer: Path) -> tuple[str, torch.Tensor]:
    """A target whose layers add nothing, so that a token's successor is the token's alone: all of them, one cycle.

    Returns:
        its folder, and int64 ``[VOCAB]`` the successors.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    embeddings, after = cycle(WIDTH)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.copy_(head_of(embeddings, after, 1))
    return save(model, folder, tokenizer), after


def cycle(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings ``[VOCAB, width]`` of length one, and int64 ``[VOCAB]`` the tokens' successors: one cycle of all."""
    draw = torch.Generator().manual_seed(0)
    embeddings = torch.nn.functional.normalize(torch.randn(VOCAB, width, generator=draw))
    order = torch.randperm(VOCAB, generator=draw)
    after = torch.empty(VOCAB, dtype=torch.int64)
    after[order] = order.roll(-1)
    return embeddings, after


def save(model: Any, folder: Path, tokenizer: Path) -> str:
    """A target's folder, with a tokenizer's files in it."""
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder / file)
    return str(folder)


def head_of(embeddings: torch.Tensor, after: torch.Tensor, steps: int) -> torch.Tensor:
    """The language head that names the token so many steps after the one whose embedding it gets."""
    reached = torch.arange(VOCAB)
    for _ in range(steps):
        reached = after[reached]
    head = torch.empty_like(embeddings)
    head[reached] = embeddings
    return head


def second_choice(embeddings: torch.Tensor, after: torch.Tensor, steps: int) -> torch.Tensor:
    """As `head_of`, but it names the token behind that one first."""
    return head_of(embeddings, after, steps) + 1.05 * head_of(embeddings, after, steps + 1)


def knowing(
    folder: Path,
    target: Path,
    after: torch.Tensor,
    num_heads: int = 4,
    late: int = 0,
    naming: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] = head_of,
) -> str:
    """Heads that know the successors, or as many steps too late; ``naming`` is `head_of` or `second_choice`."""
    from safetensors.torch import load_file

    embeddings = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    heads = [naming(embeddings, after, depth + 2 + late) for depth in range(num_heads)]
    return write(folder, heads, [torch.zeros(WIDTH, WIDTH) for _ in heads])


def of_target(width: int, vocab: int) -> Any:
    """Of a VllmConfig what heads are checked against: a target's sizes."""
    model = SimpleNamespace(model="target", get_hidden_size=lambda: width, get_vocab_size=lambda: vocab)
    return SimpleNamespace(model_config=model)
