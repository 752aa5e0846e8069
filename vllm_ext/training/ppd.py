# SPDX-License-Identifier: Apache-2.0
"""Train the embeddings of prompt tokens from the target's own answers; the target stays as it is.

The target reads an answer once. Chains of prompt tokens then stand behind tokens of it, many chains in one pass: each
sees the text up to its token, and of the prompt tokens those of its own chain alone. Prompt token ``i`` learns the
target's own distribution ``i + 2`` tokens behind that token, as far as its `top_k` alternatives go. No gradient passes
through the text, so that a step costs two passes over the chains and one over the text.

Source: PPD, arXiv 2405.18628, section 3: distillation at random places, a loss of each prompt token that weighs
``0.8**i``. Deviations: one embedding for each prompt token (the paper's ensembles of several are not there), tokens
drawn instead of most of the vocabulary, and embeddings that begin as the mean of the target's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_ext.data.answers import Answer, leading
from vllm_ext.data.atomic_files import Progress
from vllm_ext.kernels.sparse import Int32
from vllm_ext.training.draft_model import Recipe, candidates, loss_of
from vllm_ext.training.timed import train_for

DECAY = 0.8  # of the prompt tokens' weights in the loss
LEARNING_RATE = 1e-2
NOISE = 0.1  # of the embeddings' deviation, in what prompt tokens begin as
WEIGHTS, CONFIG = "model.safetensors", "config.json"


class Chains(NamedTuple):
    """Where chains of prompt tokens stand in one answer."""

    ids: torch.Tensor  # int64 [1, num_tokens] the text
    places: torch.Tensor  # int64 [num_chains] the token above each chain


class Prompts(torch.nn.Module):
    """The embeddings in training, float32.

    Args:
        model: the target, as transformers loads it.
        count: prompt tokens.
        seed: of what they begin as.
    """

    def __init__(self, model: Any, count: int, seed: int = 0) -> None:
        super().__init__()
        table = model.get_input_embeddings()
        weight = table.weight.detach().float()
        noise = torch.randn(count, weight.shape[1], generator=torch.Generator().manual_seed(seed))
        begin = weight.mean(0) + NOISE * weight.std() * noise.to(weight.device)
        self.embeddings = torch.nn.Parameter(begin)  # [count, hidden_size], rows of the target's table
        self.scale = float(getattr(table, "scalar_embed_scale", 1.0))  # of what is looked up there

    def hidden(self, model: Any, chains: Chains) -> torch.Tensor:
        """What the target's head gets at the prompt tokens, ``[num_chains, num_prompt_tokens, hidden_size]``."""
        with torch.no_grad():
            cache = model.model(input_ids=chains.ids, use_cache=True).past_key_values
        count, num_chains, context = len(self.embeddings), len(chains.places), chains.ids.shape[1]
        rows = (self.scale * self.embeddings).to(model.dtype).repeat(num_chains, 1)
        own = torch.arange(count, device=rows.device)
        positions = chains.places[:, None] + 1 + own
        above = chains.places.repeat_interleave(count)
        sees = torch.arange(context, device=rows.device) <= above[:, None]
        of = torch.arange(num_chains, device=rows.device).repeat_interleave(count)
        step = own.repeat(num_chains)
        sees = torch.cat([sees, (of[:, None] == of) & (step[:, None] >= step)], 1)
        mask = torch.zeros(sees.shape, dtype=model.dtype, device=rows.device)
        mask.masked_fill_(~sees, torch.finfo(model.dtype).min)
        found: torch.Tensor = model.model(
            inputs_embeds=rows[None],
            position_ids=positions.reshape(1, -1),
            past_key_values=cache,
            attention_mask=mask[None, None],
        ).last_hidden_state
        return found.view(num_chains, count, -1)


def chains_of(answer: Answer, places: Int32, length: int, device: str) -> Chains:
    """Chains behind tokens of an answer, of whose text the last ``length`` tokens are read.

    Args:
        answer: with its prompt.
        places: int ``[num_chains]`` in ``answer.tokens``.
        length: most tokens.
        device: of the result.
    """
    cut = max(len(answer.tokens) - length, 0)
    ids = torch.from_numpy(answer.tokens[cut:].astype(np.int64))[None]
    return Chains(ids.to(device), torch.from_numpy(places.astype(np.int64) - cut).to(device))


def first_place(answer: Answer, length: int) -> int:
    """The first token that a chain may stand behind: the prompt's last, or the first one that is read."""
    return max(answer.num_prompt_tokens - 1, len(answer.tokens) - length)


def train(
    model: Any,
    prompts: Prompts,
    answers: Sequence[Answer],
    recipe: Recipe,
    folder: Path,
    report: Progress,
    log: Callable[[str], None],
    worth: Callable[[], float] | None = None,
) -> tuple[list[dict[str, float]], list[tuple[int, float]]]:
    """Train in place, from the folder's checkpoint where there is one.

    Args:
        model: a causal model of transformers whose ``model`` puts out what its head gets; not changed.
        prompts: to be trained.
        answers: to learn from.
        recipe: how; its ``batch_tokens`` are the prompt tokens of a step, all behind tokens of one answer.
        folder: of the checkpoint and the curve.
        report: progress in seconds of training.
        log: takes a line with the loss at each checkpoint.
        worth: of the embeddings as they are; asked now and then.

    Returns:
        the loss curve, and by prompt tokens learnt from what the embeddings were worth then.

    Raises:
        ValueError: no answer is long enough to learn from.
    """
    device = str(prompts.embeddings.device)
    count = len(prompts.embeddings)
    num_chains = max(recipe.batch_tokens // count, 1)
    # Behind a chain's token one follows that it does not guess, and then one for each prompt token.
    ends = [len(answer.tokens) - 1 - count for answer in answers]
    usable = [
        answer
        for answer, end in zip(answers, ends, strict=True)
        if first_place(answer, recipe.max_length) < end
    ]
    if not usable:
        raise ValueError(
            f"none of {len(answers)} answers has {count + 2} tokens to learn from; raise --max-tokens, or lower "
            f"--prompt-tokens={count}"
        )
    model.requires_grad_(False)
    weight = model.get_output_embeddings().weight
    weights = torch.tensor([DECAY**i for i in range(count)], device=device)
    noise = torch.Generator()
    optimizer = torch.optim.AdamW(
        prompts.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )

    def loss_at(step: int, share: float) -> torch.Tensor:
        draw = np.random.default_rng([recipe.seed, step])
        answer = usable[int(draw.integers(len(usable)))]
        choice = np.arange(first_place(answer, recipe.max_length), len(answer.tokens) - 1 - count)
        places = np.sort(draw.permutation(choice)[:num_chains]).astype(np.int32)
        hidden = prompts.hidden(model, chains_of(answer, places, recipe.max_length, device))
        noise.manual_seed((recipe.seed << 32) + step)
        loss = torch.zeros((), device=device)
        for i, of_token in enumerate(hidden.unbind(1)):
            label = places + 2 + i - answer.num_prompt_tokens
            top_ids = torch.from_numpy(answer.top_ids[label].astype(np.int64)).to(device)
            top_logp = torch.from_numpy(answer.top_logp[label]).to(device)
            logits, own = candidates(weight, of_token, top_ids, noise)
            loss = loss + weights[i] * loss_of(logits, own, top_logp)
        return loss / weights.sum()

    curve, points = train_for(prompts, optimizer, loss_at, recipe, folder, report, log, worth)
    return curve, [(step * num_chains * count, each) for step, each in points]


def readable(answers: Sequence[Answer], most_tokens: int) -> list[Answer]:
    """The first answers, until they have so many tokens of outputs."""
    return leading(answers, most_tokens)[0]


def save(prompts: Prompts, vocab_size: int, dtype: torch.dtype, folder: Path) -> None:
    """Write a checkpoint, which `vllm_ext.engine.models.prompt_embeddings` reads."""
    from safetensors.torch import save_file

    embeddings = prompts.embeddings.detach().to(dtype).cpu().contiguous()
    save_file({"prompt_embeddings": embeddings}, folder / WEIGHTS, metadata={"format": "pt"})
    config = {
        "architectures": ["PromptTokens"],
        "model_type": "prompt_tokens",
        "hidden_size": embeddings.shape[1],
        "vocab_size": vocab_size,
        "num_prompt_tokens": len(embeddings),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
