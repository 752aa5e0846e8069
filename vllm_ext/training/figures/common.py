# SPDX-License-Identifier: Apache-2.0
"""What heads are worth on answers held out: how often right, by depth and rank, and tokens a step with trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vllm_ext.kernels.sparse import Float64, Int32
from vllm_ext.proposers.base import Sampling
from vllm_ext.proposers.tree import DraftTree

RANKS = 32
MOST_TOKENS = 4000  # of answers that figures come from, about
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)


class HeadFigures(NamedTuple):
    """On greedy answers held out."""

    right: Float64  # [depths, RANKS] how often the choice of this rank is the token, by depth
    tokens_per_step: dict[
        int, tuple[float, float]
    ]  # by nodes of a tree, the mean and half of its 95 % interval
    num_tokens: int


def tokens_per_step(
    came: Sequence[Int32],
    grow: Callable[[Sequence[tuple[int, int]], int], Sequence[DraftTree]],
    sizes: Sequence[int],
    max_depth: int,
) -> dict[int, tuple[float, float]]:
    """Decode greedy answers as the method would, and count what verification accepts.

    A step begins where the last one ended: what is hard to guess takes more of them than its share of the text.

    Args:
        came: by text ``[num_tokens]``; a tree at place ``i`` guesses token ``i`` and those that follow it.
        grow: of texts and places in them, and a number of nodes, the trees.
        sizes: nodes of trees.
        max_depth: of trees; a text's last tokens, fewer than this, have none.

    Returns:
        by size, the mean and half of its 95 % interval.
    """
    found = {}
    for size in sizes:
        places = [0] * len(came)
        steps: list[int] = []
        while going := [text for text, place in enumerate(places) if place + max_depth <= len(came[text])]:
            trees = grow([(text, places[text]) for text in going], size)
            for text, tree in zip(going, trees, strict=True):
                step = 1 + len(tree.path(came[text][places[text] : places[text] + max_depth].tolist()))
                steps.append(step)
                places[text] += step
        found[size] = interval(steps)
    return found


def interval(steps: Sequence[int]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval."""
    return float(np.mean(steps)), float(1.96 * np.std(steps) / np.sqrt(len(steps)))


def per_doubling(points: Sequence[tuple[int, float]]) -> float | None:
    """What twice the training brings, by a line through what heads were worth over the logarithm of the tokens seen.

    Source: "Scaling Laws for Speculative Decoding", arXiv 2505.07858: acceptance grows with the logarithm of the tokens
    of training. Here those of one run, whose learning rate falls, with all answers seen again and again.

    Args:
        points: tokens learnt from, and tokens a step.

    Returns:
        None: there are too few points.
    """
    known = {seen: worth for seen, worth in points if seen > 0}
    if len(known) < 3:
        return None
    slope, _ = np.polyfit(np.log2(list(known)), list(known.values()), 1)
    return float(slope)
