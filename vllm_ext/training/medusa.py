# SPDX-License-Identifier: Apache-2.0
"""Train Medusa's heads from the target's own answers; the target stays as it is.

The target reads its answers once; its last hidden states are kept. Head ``i`` at a token learns the target's own
distribution ``i + 2`` tokens on, as far as its `top_k` alternatives go. All heads share one language head, which begins
as the target's rows of the most frequent tokens: what a step reads of it, it reads once for all of them.

Source: Medusa-1, arXiv 2401.10774, section 2.2: residual blocks that begin as the identity, a loss of each head that
weighs ``0.8**i``. Deviations: distributions instead of tokens, one language head for all, fewer rows of it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_ext.data.answers import Answer, leading
from vllm_ext.data.atomic_files import Progress
from vllm_ext.kernels.sparse import Int32
from vllm_ext.training.draft_model import Batches, Recipe, multiplies_bfloat16
from vllm_ext.training.timed import train_for

DECAY = 0.8  # of the heads' weights in the loss
WEIGHTS, CONFIG = "model.safetensors", "config.json"


@dataclass(frozen=True)
class MedusaShape:
    """How many heads there are, and how large they are."""

    num_heads: int = 4
    num_layers: int = 1  # of each head's residual block
    num_rows: int = 8192  # of the language head, at most


@dataclass(frozen=True)
class Texts:
    """What the target computes over answers, answer after answer, at the tokens that its outputs follow."""

    hidden: torch.Tensor  # bfloat16 [num_tokens, hidden_size], behind its last norm
    top_ids: torch.Tensor  # int64 [num_tokens, top_k] its alternatives for the next token, best first
    top_logp: torch.Tensor  # float32 [num_tokens, top_k]
    tokens: torch.Tensor  # int64 [num_tokens] the next token itself
    left: torch.Tensor  # int64 [num_tokens] how many tokens of the same answer follow
    greedy: torch.Tensor  # bool [num_tokens] whether the answer is the target's first choice throughout


class Guessing(torch.nn.Module, ABC):
    """Heads in training; parameters that need no gradient stay as they are."""

    num_heads: int  # the deepest guess that is learnt

    @abstractmethod
    def guesses(self, texts: Texts, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is guessed behind tokens of texts, depth by depth.

        Args:
            texts: in which the answers' own tokens stand on the way.
            rows: int64 ``[num_rows]`` of the texts.

        Yields:
            int64 ``[num_guesses]`` which of the texts' rows has what is guessed, and the logits ``[num_guesses,
            rows of the language head]``. Of an answer's end there is nothing.
        """


class Heads(Guessing):
    """The heads in training, float32, by the names of vLLM's layout.

    Args:
        shape: how many.
        weight: ``[num_rows, hidden_size]`` of the language head.
    """

    blocks: Any  # of each head a module with `layers`

    def __init__(self, shape: MedusaShape, weight: torch.Tensor) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        size = weight.shape[1]
        self.blocks = torch.nn.ModuleList()
        for _ in range(shape.num_heads):
            block = torch.nn.Module()
            block.layers = torch.nn.ModuleList(
                torch.nn.Linear(size, size, bias=False) for _ in range(shape.num_layers)
            )
            self.blocks.append(block)
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)
        self.lm_head = torch.nn.Parameter(weight.clone().float())

    def guesses(self, texts: Texts, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """See `Guessing`."""
        device = self.lm_head.device
        hidden = texts.hidden[rows].to(device).float()
        for head in range(self.num_heads):
            there = texts.left[rows] > head
            yield rows[there] + head + 1, self.state(head, hidden[there.to(device)]) @ self.lm_head.T

    def state(self, head: int, hidden: torch.Tensor) -> torch.Tensor:
        """What the language head gets of ``[num_rows, hidden_size]``."""
        for layer in self.blocks[head].layers:
            hidden = hidden + torch.nn.functional.silu(layer(hidden))
        return hidden


@torch.no_grad()
def read(model: Any, answers: Sequence[Answer], most_tokens: int, report: Progress) -> Texts:
    """Run the target over answers, so many tokens of outputs at most.

    Args:
        model: a causal model of transformers whose ``model`` puts out what its head gets.
        answers: shuffled, if there are more.
        most_tokens: of outputs.
        report: progress in tokens.
    """
    device = str(next(model.parameters()).device)
    kept, tokens = leading(answers, most_tokens)
    batches = Batches(kept, Recipe(batch_tokens=1024), device)
    parts: list[list[torch.Tensor]] = [[] for _ in range(6)]
    done = 0
    for part in batches.parts:
        of_part = [kept[index] for index in part]
        ids, mask, top_ids, top_logp = batches.tensors(of_part)
        hidden = model.model(input_ids=ids).last_hidden_state[mask].to(torch.bfloat16)
        counts = mask.sum(1)
        left = torch.cat([torch.arange(int(count) - 1, -1, -1) for count in counts])
        greedy = torch.tensor([answer.is_greedy for answer in of_part]).repeat_interleave(counts.cpu())
        following = [
            torch.from_numpy(answer.tokens[-int(count) :].astype(np.int64))
            for answer, count in zip(of_part, counts, strict=True)
        ]
        read = hidden, top_ids, top_logp, torch.cat(following), left, greedy
        for to, found in zip(parts, read, strict=True):
            to.append(found)
        done += len(top_ids)
        report("hidden states", done, tokens)
    return Texts(*(torch.cat(part) for part in parts))


def frequent(top_ids: torch.Tensor, top_logp: torch.Tensor, vocab_size: int, num_rows: int) -> Int32:
    """Ids of the tokens that stand in answers most often, ascending; all of them where there are few."""
    weight = top_logp.exp().flatten()
    counts = torch.zeros(vocab_size).scatter_add_(0, top_ids.flatten().cpu(), weight.cpu())
    chosen = torch.topk(counts, min(num_rows, vocab_size)).indices
    ids: Int32 = chosen.sort().values.numpy().astype(np.int32)
    return ids


def loss_of(logits: torch.Tensor, places: torch.Tensor, top_logp: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the target's distribution, as far as it is known and the head has rows, and the head's.

    Args:
        logits: float32 ``[num_tokens, num_rows]``.
        places: int64 ``[num_tokens, top_k]`` rows of the target's alternatives; -1: there is none.
        top_logp: float32 ``[num_tokens, top_k]``.
    """
    p = torch.where(places >= 0, top_logp.exp(), 0.0)
    log_q = logits.log_softmax(1).gather(1, places.clamp(min=0))
    return -(p * log_q).sum(1).mean()


def train(
    heads: Guessing,
    texts: Texts,
    token_map: Int32,
    recipe: Recipe,
    folder: Path,
    report: Progress,
    log: Callable[[str], None],
    worth: Callable[[], float] | None = None,
) -> tuple[list[dict[str, float]], list[tuple[int, float]]]:
    """Train in place, from the folder's checkpoint where there is one.

    Args:
        heads: of any kind.
        texts: to learn from.
        token_map: of `frequent`.
        recipe: how; its ``batch_tokens`` are a step's.
        folder: of the checkpoint and the curve.
        report: progress in seconds of training.
        log: takes a line with the loss at each checkpoint.
        worth: of the heads as they are; asked now and then.

    Returns:
        the loss curve, and by tokens learnt from what the heads were worth then.
    """
    learning = [parameter for parameter in heads.parameters() if parameter.requires_grad]
    device = learning[0].device
    places_of = torch.full((int(max(texts.top_ids.max(), token_map.max())) + 1,), -1)
    places_of[torch.from_numpy(token_map).long()] = torch.arange(len(token_map))
    places = places_of[texts.top_ids.cpu()]
    optimizer = torch.optim.AdamW(learning, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    products = torch.autocast(device.type, torch.bfloat16, enabled=multiplies_bfloat16(device.type))
    last = len(texts.hidden) - heads.num_heads - 1

    def loss_at(step: int, share: float) -> torch.Tensor:
        draw = np.random.default_rng([recipe.seed, step])
        rows = torch.from_numpy(draw.integers(0, max(last, 1), size=min(recipe.batch_tokens, last)))
        loss = torch.zeros((), device=device)
        with products:
            for depth, (target, logits) in enumerate(heads.guesses(texts, rows)):
                own = loss_of(logits.float(), places[target].to(device), texts.top_logp[target].to(device))
                loss = loss + DECAY**depth * own
        return loss

    curve, points = train_for(heads, optimizer, loss_at, recipe, folder, report, log, worth)
    return curve, [(step * recipe.batch_tokens, each) for step, each in points]


def save(heads: Heads, token_map: Int32, vocab_size: int, dtype: torch.dtype, folder: Path) -> None:
    """Write a checkpoint in vLLM's layout."""
    from safetensors.torch import save_file

    tensors = {
        f"blocks.{head}.layers.{layer}.weight": part.weight.detach().to(dtype).cpu().contiguous()
        for head, block in enumerate(heads.blocks)
        for layer, part in enumerate(block.layers)
    }
    tensors["lm_heads.0.weight"] = heads.lm_head.detach().to(dtype).cpu().contiguous()
    if len(token_map) < vocab_size:
        tensors["token_map"] = torch.from_numpy(token_map).long()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": heads.lm_head.shape[1],
        "vocab_size": vocab_size,
        "truncated_vocab_size": len(token_map),
        "num_heads": len(heads.blocks),
        "num_hidden_layers": len(heads.blocks[0].layers),
        "original_lm_head": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
