# SPDX-License-Identifier: Apache-2.0
"""Train Clover's heads from the target's own answers, the tokens of the answer on the branch.

What is learnt at depth ``i`` is the target's own distribution ``i + 1`` tokens behind the last one: as of Medusa's
heads, whose texts, loss and weights of depths these have. The language head stays the target's rows of the most
frequent tokens.

Source: the heads' own module, `vllm_ext.engine.models.clover_heads`. Hydra trains likewise: teacher-forced, with the
target's distribution (section 4.1 of arXiv 2402.05109).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_ext.engine.models.clover_heads import ARCHITECTURE, CloverHeads, CloverShape
from vllm_ext.kernels.sparse import Int32
from vllm_ext.training.medusa import CONFIG, WEIGHTS, Guessing, Texts

INITIAL = 0.02  # standard deviation of weights before training


@dataclass(frozen=True)
class Sizes:
    """What is chosen; other sizes are the target's."""

    num_heads: int = 5  # depths that training unrolls to
    intermediate_size: int = 0  # of the cell's MLP; 0: twice the target's hidden size
    num_rows: int = 8192  # of the language head, at most


class Heads(Guessing):
    """The heads in training, float32, beside the target's embeddings.

    Args:
        cell: the heads.
        embedding: ``[vocab_size, hidden_size]`` the target's, which is neither trained nor saved.
        num_heads: depths that training unrolls to.
    """

    embedding: torch.Tensor

    def __init__(self, cell: CloverHeads, embedding: torch.Tensor, num_heads: int) -> None:
        super().__init__()
        self.cell, self.num_heads = cell, num_heads
        self.register_buffer("embedding", embedding.detach(), persistent=False)

    def embeds(self, tokens: torch.Tensor) -> torch.Tensor:
        """float32 ``[num_rows, hidden_size]`` of int64 ``[num_rows]``, on the heads' device."""
        return self.embedding[tokens.to(self.embedding.device)].float()

    def states(self, texts: Texts, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """States behind tokens of texts, depth by depth, the answers' own tokens on the way.

        Args:
            texts: of which some rows are read.
            rows: int64 ``[num_rows]``.

        Yields:
            int64 ``[num_states]`` the row of the texts that follows, and the states ``[num_states, hidden_size]``.
        """
        device = self.embedding.device
        rows = rows[texts.left[rows] > 0]
        states = self.cell.first(texts.hidden[rows].to(device).float(), self.embeds(texts.tokens[rows]))
        for depth in range(self.num_heads):
            if depth:
                there = texts.left[rows] > depth
                rows, states = rows[there], states[there.to(device)]
                states = self.cell.following(states, self.embeds(texts.tokens[rows + depth]))
            yield rows + depth + 1, states

    def guesses(self, texts: Texts, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """See `medusa.Guessing`."""
        for following, states in self.states(texts, rows):
            yield following, self.cell.logits(states)


@torch.no_grad()
def begun(target: Any, sizes: Sizes, token_map: Int32, texts: Texts) -> Heads:
    """Heads to train.

    Args:
        target: a causal model of transformers.
        sizes: of the heads.
        token_map: of `medusa.frequent`.
        texts: to learn from; states begin at their scale.
    """
    embedding = target.get_input_embeddings().weight
    language = target.get_output_embeddings().weight
    size = language.shape[1]
    vocab_size = target.config.get_text_config().vocab_size
    shape = CloverShape(size, sizes.intermediate_size or 2 * size, vocab_size, len(token_map))
    cell = CloverHeads(shape).to(language.device)
    for parameter in cell.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=INITIAL)
    for zero in (cell.augment, cell.down):
        torch.nn.init.zeros_(zero.weight)
    cell.norm.fill_(texts.hidden.float().square().mean(1).sqrt().mean())
    cell.token_map.copy_(torch.from_numpy(token_map).long())
    cell.lm_head.weight.copy_(language[cell.token_map])
    cell.lm_head.weight.requires_grad_(False)
    return Heads(cell, embedding, sizes.num_heads)


def save(heads: Heads, dtype: torch.dtype, folder: Path) -> None:
    """Write a checkpoint, which `vllm_ext.engine.models.clover_heads` reads."""
    from safetensors.torch import save_file

    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in heads.cell.state_dict().items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "clover_heads",
        **heads.cell.shape._asdict(),
        "num_heads": heads.num_heads,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
