# SPDX-License-Identifier: Apache-2.0
"""Exact laws of code that makes random decisions: all of them are taken, each with its weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from vllm_ext.kernels.sparse import Sparse
from vllm_ext.samplers.tree_walk import walk

T = TypeVar("T")
VOCAB = 3


class Script:
    """A `Chance` that follows a list of choices, and takes the first possible one where the list ends."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._given = list(choices)
        self.weight = 1.0
        self.taken: list[int] = []
        self.options: list[list[int]] = []  # at each decision, what has a chance

    def accepts(self, numerator: float, denominator: float) -> bool:
        chance = min(1.0, numerator / denominator) if denominator > 0 else float(numerator > 0)
        return bool(self._decide([1.0 - chance, chance]))

    def draw(self, weights: np.ndarray) -> int:
        return self._decide((np.asarray(weights) / np.sum(weights)).tolist())

    def _decide(self, chances: list[float]) -> int:
        possible = [option for option, chance in enumerate(chances) if chance > 0]
        place = len(self.taken)
        choice = self._given[place] if place < len(self._given) else possible[0]
        self.taken.append(choice)
        self.options.append(possible)
        self.weight *= chances[choice]
        return choice


def outcomes(code: Callable[[Script], T]) -> Iterator[tuple[T, float]]:
    """Every outcome of the code, with its probability; equal ones may come several times."""
    choices: list[int] = []
    while True:
        script = Script(choices)
        yield code(script), script.weight
        choices = script.taken
        while choices and choices[-1] == script.options[len(choices) - 1][-1]:
            choices.pop()
        if not choices:
            return
        options = script.options[len(choices) - 1]
        choices[-1] = options[options.index(choices[-1]) + 1]


class Model:
    """A random order-1 model: float64 ``[vocab, vocab]``, a row for each last token."""

    def __init__(self, seed: int, vocab: int = VOCAB) -> None:
        self.rows = np.random.default_rng(seed).dirichlet(np.ones(vocab), size=vocab)

    def after(self, tokens: Sequence[int]) -> np.ndarray:
        """What comes after these tokens; the root's is 0."""
        row: np.ndarray = self.rows[tokens[-1] if len(tokens) else 0]
        return row

    def law(self, length: int) -> np.ndarray:
        """Of the first ``length`` tokens: float64 ``[vocab] * length``."""
        law: np.ndarray = self.rows[0]
        for _ in range(length - 1):
            law = law[..., None] * self.rows  # the last axis is the last token
        return law


def law_of(code: Callable[[Script], Sequence[int]], target: Model, length: int) -> np.ndarray:
    """The law of the first ``length`` tokens of what the code puts out, which plain decoding continues."""
    vocab = len(target.rows)
    law = np.zeros((vocab,) * length)
    for emitted, weight in outcomes(code):
        rest = target.rows[emitted[-1]] if len(emitted) < length else np.ones(())
        for _ in range(length - len(emitted) - 1):
            rest = rest[..., None] * target.rows
        law[tuple(emitted[:length])] += weight * rest
    return law


def sparse(row: np.ndarray) -> Sparse:
    """A whole vocabulary's distribution, as verifiers and builders take it."""
    return Sparse(np.arange(len(row), dtype=np.int32), row)


def verify(tokens: Sequence[int], parents: Sequence[int], draw: Callable[[int, list[int]], int]) -> list[int]:
    """What one request's walk puts out.

    Args:
        tokens: of the rows, the root's first.
        parents: of the rows; the root's is -1.
        draw: the next token after a row that has these child rows.
    """
    _, (emitted,) = walk(
        np.array([0, len(tokens)], np.int32),
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        lambda _, rows, __: [draw(rows[0], [r for r, parent in enumerate(parents) if parent == rows[0]])],
    )
    return emitted
