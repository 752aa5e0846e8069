# SPDX-License-Identifier: Apache-2.0
"""Trees that are sampled from a draft model, in rounds: what all builders of them have in common.

A builder asks for the draft's distributions after some of its nodes, all of which are computed in one forward pass,
adds nodes, and asks again. Verification by `samplers.recursive_rejection` or `samplers.k_seq` needs to know what each
token was drawn from: a builder keeps the distribution of every node that has children.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ROOT = -1

Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]
# The draft's distributions, float64 [asked, vocab], after nodes given as builder (an index) and node.
Draft = Callable[[Sequence[tuple[int, int]]], Float64]


class SampledTree(NamedTuple):
    """A tree that is finished, with what its verifier must know."""

    tokens: Int32  # [num_nodes]
    parents: Int32  # [num_nodes] an earlier node, or ROOT; siblings stand in the order they were drawn
    q: dict[int, Float64]  # by node that has children, ROOT too: what the first of them was drawn from


class TreeBuilder(ABC):
    """One request's tree while it grows. A node is an index; children stand behind their parents."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []  # ROOT, or an earlier node
        self.q: dict[int, Float64] = {}  # by node, the distribution of what follows it

    @abstractmethod
    def wanted(self) -> list[int]:
        """After which nodes the distribution must be known for the tree to grow on; none: it is finished."""

    @abstractmethod
    def give(self, rows: Float64) -> None:
        """Grow as far as possible.

        Args:
            rows: float64 ``[len(wanted()), vocab]``, each adding up to 1.
        """

    def kept(self) -> list[int]:
        """The nodes that are the finished tree, parents before children: all of them, unless a builder says."""
        return list(range(len(self.tokens)))

    def tree(self) -> SampledTree:
        """The finished tree."""
        kept = self.kept()
        place = {ROOT: ROOT} | {node: index for index, node in enumerate(kept)}
        parents = [place[self.parents[node]] for node in kept]
        return SampledTree(
            np.array([self.tokens[node] for node in kept], np.int32),
            np.array(parents, np.int32),
            {parent: self.q[([ROOT, *kept])[parent + 1]] for parent in set(parents)},
        )

    def add(self, token: int, parent: int) -> int:
        """Add a node, and return it."""
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def depth(self, node: int) -> int:
        """How many nodes there are from below the root to this one; 0 for the root."""
        depth = 0
        while node != ROOT:
            node, depth = self.parents[node], depth + 1
        return depth


def largest(values: Sequence[float], count: int) -> list[int]:
    """The indices of the largest values, descending; of equals the first."""
    return sorted(range(len(values)), key=lambda index: (-values[index], index))[:count]


def grow(builders: Sequence[TreeBuilder], draft: Draft) -> int:
    """Grow all trees; returns how many forward passes that took: as many as the one that took most."""
    rounds = 0
    while True:
        wanted = [builder.wanted() for builder in builders]
        asked = [(index, node) for index, nodes in enumerate(wanted) for node in nodes]
        if not asked:
            return rounds
        rounds += 1
        rows = draft(asked)
        start = 0
        for builder, nodes in zip(builders, wanted, strict=True):
            if nodes:
                builder.give(rows[start : start + len(nodes)])
                start += len(nodes)
