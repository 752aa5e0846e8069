# SPDX-License-Identifier: Apache-2.0
"""The readable reference of `fuse_trees`, on dictionaries."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Node = tuple[int, int, float, int]  # token, parent, path probability, group


def fuse_trees_ref(
    trees: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]],
    estimates: npt.NDArray[np.float32],
    bounds: Sequence[float],
    budget: int,
) -> list[Node]:
    """The union of one request's trees, each a triple of tokens, parents and path probabilities."""
    masks: dict[tuple[int, ...], int] = {}  # by path, in the order found
    own: dict[tuple[int, ...], np.float32] = {}
    for number, (tokens, parents, probabilities) in enumerate(trees):
        paths: list[tuple[int, ...]] = []
        for token, parent, probability in zip(tokens, parents, probabilities, strict=True):
            above = np.float32(probabilities[parent] if parent >= 0 else 1.0)
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
            given_parent = np.float32(probability) / above if above > 0 else np.float32(0)
            masks[paths[-1]] = masks.get(paths[-1], 0) | 1 << number
            own[paths[-1]] = max(own.get(paths[-1], np.float32(0)), given_parent)
    num_bins, num_depths = estimates.shape[1:]
    chance: dict[tuple[int, ...], np.float32] = {(): np.float32(1)}
    groups: dict[tuple[int, ...], int] = {}
    for path, mask in masks.items():
        bin_ = sum(bool(own[path] > bound) for bound in bounds)
        groups[path] = (mask - 1) * num_bins + bin_
        chance[path] = chance[path[:-1]] * estimates[mask - 1, bin_, min(len(path) - 1, num_depths - 1)]
    best = sorted(masks, key=lambda path: -chance[path])[: max(budget, 0)]  # stable: parents stay in front
    place = {path: i for i, path in enumerate(best)}
    return [(path[-1], place.get(path[:-1], -1), float(chance[path]), groups[path]) for path in best]
