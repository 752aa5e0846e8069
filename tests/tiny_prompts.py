# SPDX-License-Identifier: Apache-2.0
"""Prompt tokens for tests: of random embeddings; and for a target that can read at a prompt token what it stands below.

That target's tokens have one successor each. A prompt token of its attends to the token so many places before it, by
rotary positions, and says that token's successors: right only where its position, its mask and its row are.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import tiny_heads
import torch
from tiny_heads import VOCAB

COUNT = 3  # prompt tokens, and attention heads: each reads by one of its own
HEAD = tiny_heads.WIDTH  # of a head, as wide as what it reads
FIRST_READ, TEXT = (
    HEAD,
    HEAD * (1 + COUNT),
)  # where in the hidden state what heads read begins; a mark of text
WIDTH = TEXT + 16
SHARP, WEAK, THETA = 30.0, 0.2, 100.0


def write(folder: Path, embeddings: torch.Tensor, vocab_size: int = VOCAB) -> str:
    """A checkpoint of ``[num_prompt_tokens, hidden_size]``."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    save_file({"prompt_embeddings": embeddings.contiguous()}, folder / "model.safetensors")
    config = {
        "architectures": ["PromptTokens"],
        "hidden_size": embeddings.shape[1],
        "vocab_size": vocab_size,
        "num_prompt_tokens": len(embeddings),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def random(folder: Path, target: Path, seed: int = 0) -> str:
    """Means of the target's own embeddings, each of a few."""
    from safetensors.torch import load_file

    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(table), (COUNT, 4), generator=draw)
    return write(folder, table[chosen].mean(1), len(table))


def knowing(folder: Path, far: int = 0) -> str:
    """Those of `reading`'s target, which read the token that they stand below, or the one before it."""
    marks = torch.zeros(COUNT, WIDTH)
    marks[range(COUNT), [_mark(i, far) for i in range(COUNT)]] = 1.0
    return write(folder, marks)


def _mark(prompt: int, far: int) -> int:
    """The dimension that tells a prompt token by its place in a chain, and how far beyond its node it reads."""
    return TEXT + 1 + COUNT * far + prompt


def reading(folder: Path, tokenizer: Path) -> tuple[str, torch.Tensor]:
    """A target whose tokens have one successor each, all of them one cycle, and that prompt tokens can make read.

    Returns:
        its folder, and int64 ``[VOCAB]`` the successors.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    embeddings, after = tiny_heads.cycle(HEAD)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=COUNT,
        num_key_value_heads=COUNT,
        head_dim=HEAD,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    layer = model.model.layers[0].self_attn
    # What the norm makes of 1 in a token's embedding, which has the mark beside it, and in a prompt token's.
    of_text, of_prompt = (WIDTH / 2) ** 0.5, WIDTH**0.5
    turn = THETA ** (-torch.arange(HEAD // 2) / (HEAD // 2))  # of a place, by pair of a head's dimensions
    texts = (
        torch.arange(HEAD // 2) % 2 == 0
    )  # pairs by which text is found; by the others prompt tokens themselves
    with torch.no_grad():
        for part in (
            layer.q_proj,
            layer.k_proj,
            layer.v_proj,
            layer.o_proj,
            model.model.layers[0].mlp.down_proj,
        ):
            part.weight.zero_()
        for head in range(COUNT):
            rows = slice(head * HEAD, (head + 1) * HEAD)
            pairs = torch.arange(HEAD // 2) + head * HEAD
            layer.k_proj.weight[pairs[texts], TEXT] = 1.0 / of_text
            for prompt, far in itertools.product(range(COUNT), range(2)):
                mark = _mark(prompt, far)
                layer.k_proj.weight[pairs[~texts], mark] = 1.0 / of_prompt
                sharp = SHARP * HEAD**0.5 / of_prompt
                if prompt == head:  # so many places back
                    angle = -(1 + prompt + far) * turn[texts]
                    layer.q_proj.weight[pairs[texts], mark] = sharp * angle.cos()
                    layer.q_proj.weight[pairs[texts] + HEAD // 2, mark] = sharp * angle.sin()
                else:  # itself, where there is nothing to read
                    layer.q_proj.weight[pairs[~texts], mark] = sharp
            layer.v_proj.weight[rows, :HEAD] = torch.eye(HEAD) / of_text
            read = slice(FIRST_READ + head * HEAD, FIRST_READ + (head + 1) * HEAD)
            layer.o_proj.weight[read, rows] = WEAK * torch.eye(HEAD)
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, :HEAD] = embeddings
        model.model.embed_tokens.weight[:, TEXT] = 1.0
        said = [tiny_heads.head_of(embeddings, after, 1 + steps) for steps in range(1 + COUNT)]
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :TEXT] = 10.0 * torch.cat(said, 1)
    return tiny_heads.save(model, folder, tokenizer), after
