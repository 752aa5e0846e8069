# SPDX-License-Identifier: Apache-2.0
"""Which layers of the target a draft begins as: an evolutionary search before training.

One set of layers is the parent. Its children are made by level switches: one, two or three times a layer that is kept
gives way to one that is not. Selection has rounds: all children are scored on few tokens, the best of them on more, and
the last ones, with the parent, on all. The best is the next parent; so what was found never gets worse on all tokens.

Source: "EvoPress: Accurate Dynamic Model Compression via Evolutionary Search", arXiv 2410.14649, section 3 and
algorithm 1. Deviations: a score is what a draft is trained by, the cross-entropy of the target's distribution and the
draft's on answers that the target gave, where the paper has perplexity or the divergence on a corpus; the children of
all generations are scored on the same tokens, and no set is scored twice; the search ends with the time that it is
given.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_ext.data.answers import Answer
from vllm_ext.training.draft_model import Batches, Recipe, from_layers, loss_of, multiplies_bfloat16

FOUND = "layers.json"  # in the work folder

Layers = tuple[int, ...]  # ascending
# Of some layers the loss on so many answers, the first ones.
Score = Callable[[Layers, int], float]


@dataclass(frozen=True)
class SearchRecipe:
    """How it is searched."""

    children: int = 16  # of a generation
    survivors: Sequence[int] = (4, 2)  # of each round but the last, whose one survivor is the next parent
    # Answers that each round scores by: the first round's are the fewest.
    answers: Sequence[int] = (2, 6, 24)
    most_switches: int = 3
    minutes: float = 10.0
    generations: int = 1000  # at most
    seed: int = 0


@dataclass(frozen=True)
class Found:
    """What a search has come to."""

    layers: Layers
    loss: float
    generations: int
    scored: int  # sets of layers, each on one number of answers


def spread(num_layers: int, count: int) -> Layers:
    """Where the search begins: ascending, spread evenly, the first and the last among them."""
    return tuple(sorted({int(place) for place in np.linspace(0, num_layers - 1, count).round()}))


def mutated(layers: Layers, num_layers: int, most_switches: int, noise: np.random.Generator) -> Layers:
    """A child: as many layers, some of them others. Few switches are the likelier ones, as in the paper's code."""
    kept = set(layers)
    for _ in range(min(noise.integers(1, most_switches + 1, size=2))):
        others = [layer for layer in range(num_layers) if layer not in kept]
        if not others:
            break
        kept.remove(int(noise.choice(sorted(kept))))
        kept.add(int(noise.choice(others)))
    return tuple(sorted(kept))


def search(
    score: Score,
    num_layers: int,
    start: Sequence[int],
    recipe: SearchRecipe,
    log: Callable[[str], None] = lambda _: None,
) -> Found:
    """Search from some layers on; as many are kept.

    Args:
        score: the loss of a set of layers.
        num_layers: of the target.
        start: the first parent.
        recipe: how.
        log: takes a line for each generation that has found something better.
    """
    noise = np.random.default_rng(recipe.seed)
    known: dict[tuple[Layers, int], float] = {}

    def loss(layers: Layers, answers: int) -> float:
        if (layers, answers) not in known:
            known[layers, answers] = score(layers, answers)
        return known[layers, answers]

    until = time.monotonic() + 60 * recipe.minutes
    parent: Layers = tuple(sorted(start))
    *rounds, last = recipe.answers
    generation = 0
    while generation < recipe.generations and time.monotonic() < until and 0 < len(parent) < num_layers:
        generation += 1
        children = list(
            dict.fromkeys(
                mutated(parent, num_layers, recipe.most_switches, noise) for _ in range(recipe.children)
            )
        )
        for answers, survivors in zip(rounds, recipe.survivors, strict=True):
            children = sorted(children, key=lambda child: loss(child, answers))[:survivors]
        best = min([parent, *children], key=lambda child: loss(child, last))
        if best != parent:
            parent = best
            log(f"generation {generation}: {','.join(map(str, parent))}, loss {loss(parent, last):.3f}")
    return Found(parent, loss(parent, last), generation, len(known))


class AnswerLoss:
    """Scores layers of a model on answers of the target, by the loss that training has.

    Args:
        model: the whole target; it is given its layers back by `close`.
        answers: of the target, in the order in which rounds take them.
        recipe: how answers are read.
    """

    def __init__(self, model: Any, answers: Sequence[Answer], recipe: Recipe) -> None:
        self._model, self._layers = model.eval(), model.model.layers
        self._answers = answers
        device = str(next(model.parameters()).device)
        self._batches = Batches(answers, recipe, device)
        self._products = torch.autocast(
            torch.device(device).type, torch.bfloat16, enabled=multiplies_bfloat16(device)
        )

    @property
    def num_layers(self) -> int:
        """How many layers the target has."""
        return len(self._layers)

    def keep(self, layers: Layers) -> Any:
        """The model with these layers alone; its weights are the target's."""
        self._model.model.layers = torch.nn.ModuleList(self._layers[layer] for layer in layers)
        for place, layer in enumerate(self._model.model.layers):
            layer.self_attn.layer_idx = place
        self._model.config.num_hidden_layers = len(layers)
        return self._model

    @torch.inference_mode()
    def __call__(self, layers: Layers, answers: int) -> float:
        """See `Score`."""
        model = self.keep(layers)
        total, tokens = 0.0, 0
        for answer in self._answers[:answers]:
            ids, mask, top_ids, top_logp = self._batches.tensors([answer])
            with self._products:
                logits = model.lm_head(model.model(input_ids=ids, use_cache=False).last_hidden_state[mask])
            total += float(loss_of(logits.float(), top_ids, top_logp)) * len(top_ids)
            tokens += len(top_ids)
        return total / tokens

    def close(self) -> None:
        """Give the model its layers back."""
        self.keep(tuple(range(len(self._layers))))


def found_layers(
    target: Path,
    answers: Sequence[Answer],
    count: int,
    recipe: Recipe,
    minutes: float,
    folder: Path,
    device: str,
    log: Callable[[str], None],
) -> list[int]:
    """Search layers of a target; what an interrupted training has found before is kept.

    Args:
        target: folder of the model.
        answers: that the draft will learn from.
        count: of the layers.
        recipe: of the training to come.
        minutes: of the search.
        folder: where the result lies.
        device: of the model.
        log: takes a line with the loss for each step forward.

    Raises:
        ValueError: a model that is not made of ``model.layers``.
    """
    file = folder / FOUND
    if file.exists():
        kept: list[int] = json.loads(file.read_text())
        return kept
    search_recipe = SearchRecipe(minutes=minutes, seed=recipe.seed)
    order = np.random.default_rng(recipe.seed).permutation(len(answers))
    read = [answers[place] for place in order[: search_recipe.answers[-1]].tolist()]
    from transformers import AutoConfig

    num_layers: int = AutoConfig.from_pretrained(target).num_hidden_layers
    model = from_layers(target, range(num_layers), device)
    found = search(AnswerLoss(model, read, recipe), num_layers, spread(num_layers, count), search_recipe, log)
    log(f"{found.generations} generations in {minutes:g} minutes, loss {found.loss:.3f}")
    file.write_text(json.dumps(list(found.layers)))
    return list(found.layers)
