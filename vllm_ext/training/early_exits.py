# SPDX-License-Identifier: Apache-2.0
"""Heads for early exits: distilled from the model's own final distributions on its own answers.

A head begins as the affine map that takes an exit's normed hidden states nearest to the last layer's (least squares, in
closed form) and is then trained on what counts, the cross-entropy of the model's distribution and the exit's, as draft
models are (`draft_model`). The model itself is left as it is.

Source: the affine "tuned lens", arXiv 2303.08112, section 3: trained on the divergence from the final distribution.
Deviations: behind the norm, where the head is shared as it is; the start in closed form; distributions of the `top_k`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_ext.data.answers import Answer, leading
from vllm_ext.data.atomic_files import Progress
from vllm_ext.training.draft_model import Batches, Recipe, candidates, loss_of

RIDGE = 1e-3  # of the mean square, added to it
BATCH = 1024  # tokens of a training step
Head = tuple[torch.Tensor, torch.Tensor]  # float32 weight [hidden, hidden] and bias [hidden]


@dataclass(frozen=True)
class Features:
    """What the model computes over answers, at their output tokens."""

    exits: dict[int, torch.Tensor]  # by exit, float32 [num_tokens, hidden], behind the final norm
    last: torch.Tensor  # float32 [num_tokens, hidden], of the last layer, behind it too
    top_ids: torch.Tensor  # int64 [num_tokens, top_k]
    top_logp: torch.Tensor  # float32 [num_tokens, top_k]


@dataclass(frozen=True)
class Agreement:
    """Of an exit, on answers held out: how often its first choice is the model's, and the mean of min(p, q)."""

    greedy: float
    sampled: float


@torch.no_grad()
def features(
    model: Any, answers: Sequence[Answer], exits: Sequence[int], most_tokens: int, report: Progress
) -> Features:
    """Run the model over answers, so many tokens of them at most.

    Args:
        model: a Llama-like model of transformers, with ``model.norm`` and ``lm_head``.
        answers: shuffled, if there are more.
        exits: numbers of layers.
        most_tokens: output tokens.
        report: progress in tokens.

    Raises:
        ValueError: an exit that the model does not have.
    """
    layers = model.config.num_hidden_layers
    if wrong := [exit_layer for exit_layer in exits if not 0 < exit_layer < layers]:
        raise ValueError(
            f"exits {wrong} are not allowed; allowed: 1 to {layers - 1}, of a model with {layers} layers"
        )
    device = str(next(model.parameters()).device)
    kept, tokens = leading(answers, most_tokens)
    batches = Batches(kept, Recipe(batch_tokens=1024), device)
    found: dict[int, list[torch.Tensor]] = {exit_layer: [] for exit_layer in exits}
    last, tops, logps, done = [], [], [], 0
    for part in batches.parts:
        ids, mask, top_ids, top_logp = batches.tensors([kept[index] for index in part])
        hidden = model.model(input_ids=ids, output_hidden_states=True).hidden_states
        for exit_layer in exits:
            found[exit_layer].append(model.model.norm(hidden[exit_layer][mask]).float())
        last.append(hidden[-1][mask].float())
        tops.append(top_ids)
        logps.append(top_logp)
        done += len(top_ids)
        report("hidden states", done, tokens)
    return Features(
        {exit_layer: torch.cat(parts) for exit_layer, parts in found.items()},
        torch.cat(last),
        torch.cat(tops),
        torch.cat(logps),
    )


def closed_form(x: torch.Tensor, y: torch.Tensor) -> Head:
    """The affine map of ``x`` nearest to ``y``, by ridge regression; float32 ``[num_tokens, hidden]`` both."""
    mean_x, mean_y = x.mean(0), y.mean(0)
    centred = (x - mean_x).double()
    gram = centred.T @ centred
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    weight = torch.linalg.solve(gram, centred.T @ (y - mean_y).double()).T.float()
    return weight, mean_y - weight @ mean_x


def distil(
    model: Any,
    of: Features,
    exit_layer: int,
    epochs: int,
    learning_rate: float,
    seed: int,
    report: Progress,
) -> Head:
    """Train an exit's head.

    Args:
        model: of `features`.
        of: to learn from.
        exit_layer: which.
        epochs: over all tokens; 0 leaves the closed form.
        learning_rate: of Adam; it falls to 0.
        seed: of the order, and of the tokens that stand for the rest of the vocabulary.
        report: progress in steps.
    """
    x = of.exits[exit_layer]
    vocabulary = model.lm_head.weight.detach().float()
    weight, bias = (part.clone().requires_grad_() for part in closed_form(x, of.last))
    optimizer = torch.optim.Adam([weight, bias], lr=learning_rate)
    noise = torch.Generator().manual_seed(seed)
    steps = epochs * math.ceil(len(x) / BATCH)
    step = 0
    for _ in range(epochs):
        for chosen in torch.split(torch.randperm(len(x), generator=noise), BATCH):
            rows = chosen.to(x.device)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * 0.5 * (1.0 + math.cos(math.pi * step / steps))
            hidden = torch.nn.functional.linear(x[rows], weight, bias)
            logits, places = candidates(vocabulary, hidden, of.top_ids[rows], noise)
            loss = loss_of(logits, places, of.top_logp[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            report(f"exit after layer {exit_layer}", step, steps)
    return weight.detach(), bias.detach()


@torch.inference_mode()
def agreement(model: Any, of: Features, exit_layer: int, head: Head | None) -> Agreement:
    """How often drafts of an exit would be accepted; without a head, the model's own norm and head alone."""
    greedy, sampled = 0, 0.0
    for rows in torch.split(torch.arange(len(of.last)), BATCH):
        hidden = of.exits[exit_layer][rows]
        if head is not None:
            hidden = torch.nn.functional.linear(hidden, *head)
        logits = model.lm_head(hidden.to(model.lm_head.weight.dtype)).float()
        top_ids = of.top_ids[rows]
        greedy += int((logits.argmax(1) == top_ids[:, 0]).sum())
        sampled += float(torch.minimum(logits.softmax(1).gather(1, top_ids), of.top_logp[rows].exp()).sum())
    return Agreement(greedy / len(of.last), sampled / len(of.last))


def shuffled(answers: Sequence[Answer], seed: int) -> list[Answer]:
    """In an order that the seed gives."""
    return [answers[index] for index in np.random.default_rng(seed).permutation(len(answers))]
