# SPDX-License-Identifier: Apache-2.0
"""Clover heads for tests: of random weights; and for a target whose tokens have one successor each, that know it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from tiny_heads import VOCAB, WIDTH, head_of

INNER = 48


def write(
    folder: Path, tensors: dict[str, torch.Tensor], token_map: torch.Tensor | None = None, vocab_size: int = 0
) -> str:
    """A checkpoint.

    Args:
        folder: made if it is not there.
        tensors: by the names of the module; those of the cell that are left out are zeros, the norm ones.
        token_map: int64, which tokens the language head's rows are; None: all.
        vocab_size: the target's; 0: as many as rows.
    """
    from safetensors.torch import save_file

    head = tensors["lm_head.weight"]
    rows, width = head.shape
    whole = {
        "augment.weight": torch.zeros(width, width),
        "regress.weight": torch.zeros(width, 2 * width),
        "gate_up.weight": torch.zeros(2 * INNER, width),
        "down.weight": torch.zeros(width, INNER),
        "norm": torch.ones(width),
        **tensors,
    }
    whole = {name: tensor.to(head.dtype).clone().contiguous() for name, tensor in whole.items()}
    whole["token_map"] = torch.arange(rows) if token_map is None else token_map
    folder.mkdir(exist_ok=True, parents=True)
    save_file(whole, folder / "model.safetensors")
    config = {
        "architectures": ["CloverHeads"],
        "hidden_size": width,
        "intermediate_size": INNER,
        "vocab_size": vocab_size or rows,
        "num_rows": rows,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def drawn(head: torch.Tensor, seed: int = 0) -> dict[str, torch.Tensor]:
    """A random cell over a language head ``[num_rows, hidden_size]``."""
    draw = torch.Generator().manual_seed(seed)
    width = head.shape[1]

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) / math.sqrt(columns)

    return {
        "augment.weight": weight(width, width),
        "regress.weight": weight(width, 2 * width),
        "gate_up.weight": weight(2 * INNER, width),
        "down.weight": weight(width, INNER),
        "norm": 1.0 + 0.1 * torch.randn(width, generator=draw),
        "lm_head.weight": head,
    }


def random(folder: Path, target: Path) -> str:
    """A random cell on the target's own language head, whose states stay near the target's."""
    from safetensors.torch import load_file

    stored = load_file(target / "model.safetensors")
    head = stored.get("lm_head.weight", stored["model.embed_tokens.weight"])
    tensors = {name: 0.3 * tensor for name, tensor in drawn(head.float()).items()}
    # What the target says is as sure as its norm is large.
    tensors["norm"] = torch.ones(head.shape[1]) * stored["model.norm.weight"].float().square().mean().sqrt()
    return write(folder, {**tensors, "lm_head.weight": head})


def knowing(folder: Path, target: Path, after: torch.Tensor, by: str = "token", late: int = 0) -> str:
    """Heads that know the successors, or as many tokens too late.

    Args:
        folder: of the heads.
        target: of `tiny_heads.successors`.
        after: its successors.
        by: 'token': by the branch's last token, at all depths; 'hidden': by the target's hidden state, right for the
            first node only.
        late: how many tokens.
    """
    from safetensors.torch import load_file

    embeddings = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    assert embeddings.shape == (VOCAB, WIDTH)
    one = torch.eye(WIDTH)
    by_token = by == "token"
    # Out goes the state, in comes the token.
    regress = torch.cat([-one, one], 1) if by_token else torch.zeros(WIDTH, 2 * WIDTH)
    head = head_of(embeddings, after, (1 if by_token else 2) + late)
    return write(folder, {"regress.weight": regress, "lm_head.weight": head})
