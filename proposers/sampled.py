# SPDX-License-Identifier: Apache-2.0
"""Trees that are sampled from a draft model, in rounds: what all builders of them have in common.

A builder asks for the draft's distributions after some of its nodes, all of which are computed in one forward pass,
adds nodes, and asks again. Verification by `samplers.recursive_rejection` or `samplers.k_seq` needs to know what each
token was drawn from: a builder keeps the distribution of every node that has children.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from vllm_ext.kernels.sparse import Sparse
from vllm_ext.proposers.tree import DraftTree, SampledDrafts

ROOT = -1
# Most nodes after which the distribution is asked for, for each of the finished tree: the draft's KV of all of them
# has a place, also of those that are not in the tree in the end.
ASKED_PER_NODE = 2
# On the device a batch may have trees of two kinds, whose nodes have places of their own.
MOST_READ = ASKED_PER_NODE + 1
# What it reads is a tree too, of 160 rows at most: `vllm_ext.kernels.ancestor_bits.MAX_ROWS`.
MOST_NODES_ON_DEVICE = 160 // MOST_READ

# The draft's distributions after nodes given as builder (an index) and node.
Draft = Callable[[Sequence[tuple[int, int]]], Sequence[Sparse]]


class TreeBuilder(ABC):
    """One request's tree while it grows. A node is an index; children stand behind their parents."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []  # ROOT, or an earlier node
        self.q: dict[int, Sparse] = {}  # by node, the distribution of what follows it
        self.reached: list[float] = []  # `reach` of each round after the first

    @abstractmethod
    def wanted(self) -> list[int]:
        """After which nodes the distribution must be known for the tree to grow on; none: it is finished."""

    @abstractmethod
    def give(self, rows: Sequence[Sparse]) -> None:
        """Grow as far as possible.

        Args:
            rows: the distribution after each of `wanted`.
        """

    def reach(self) -> float:
        """The chance that verification comes to one of `wanted`, by the draft.

        inf of a tree that must not stop early: what was drawn may have no say in how large a drawn tree is.
        """
        return math.inf

    def kept(self) -> list[int]:
        """The nodes that are the finished tree, parents before children: all of them, unless a builder says."""
        return list(range(len(self.tokens)))

    def tree(self) -> DraftTree:
        """The finished tree; its probabilities are the paths', and `drawn` what the verifier needs."""
        kept = self.kept()
        place = {ROOT: ROOT} | {node: index for index, node in enumerate(kept)}
        parents = [place[self.parents[node]] for node in kept]
        chances = [1.0] * (len(kept) + 1)  # the root's last
        for index, node in enumerate(kept):
            row = self.q[self.parents[node]]
            own = float(row.q[np.flatnonzero(row.ids == self.tokens[node])[0]])
            # As a tree's order wants it; siblings and depths are in the order that counts here.
            before = chances[index - 1] if index else 1.0
            chances[index] = min(chances[parents[index]] * own, before)
        return DraftTree(
            np.array([self.tokens[node] for node in kept], np.int32),
            np.array(parents, np.int32),
            np.array(chances[:-1], np.float32),
            self.drawn({parent: self.q[([ROOT, *kept])[parent + 1]] for parent in set(parents)}),
        )

    def drawn(self, q: dict[int, Sparse]) -> SampledDrafts | None:
        """What verification needs besides the tree; None of a tree that was chosen."""
        return SampledDrafts(q)

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


def share(room: int) -> int:
    """How many nodes of one depth to ask for when so many may be in all: half of them, the other half goes deeper."""
    return (room + 1) // 2


def widths(
    num_nodes: int, max_depth: int, asked_per_node: int = ASKED_PER_NODE, width: int | None = None
) -> list[int]:
    """How many nodes of each depth from 1 on to ask for: each a quarter of those that may still be.

    None of the deepest, which get no children.

    Args:
        num_nodes: most nodes of the tree.
        max_depth: deepest nodes.
        asked_per_node: for each of them, how many may be asked for.
        width: most children of a node.
    """
    room, found = asked_per_node * num_nodes, list[int]()
    for depth in range(1, max_depth):
        there = num_nodes if width is None else width**depth
        found.append(min(num_nodes, there, math.ceil(room / 4)))
        room -= found[-1]
        if not room:
            break
    return found


def largest(values: Sequence[float], count: int) -> list[int]:
    """The indices of the largest values, descending; of equals the first."""
    return sorted(range(len(values)), key=lambda index: (-values[index], index))[:count]


def grow(builders: Sequence[TreeBuilder], draft: Draft, least_reach: float = 0.0) -> int:
    """Grow all trees.

    Args:
        builders: of the trees.
        draft: answers one round of all of them.
        least_reach: where a round after the first would have less than this of `TreeBuilder.reach`, of all trees
            together, they are finished as they are.

    Returns:
        Rounds, as many as of the tree that took most; each is a forward pass.
    """
    rounds = 0
    while True:
        wanted = [builder.wanted() for builder in builders]
        asked = [(index, node) for index, nodes in enumerate(wanted) for node in nodes]
        if not asked:
            return rounds
        if rounds:
            reach = [
                builder.reach() if nodes else 0.0 for builder, nodes in zip(builders, wanted, strict=True)
            ]
            if sum(reach) < least_reach:
                return rounds
            for builder, chance in zip(builders, reach, strict=True):
                builder.reached.append(chance)
        rounds += 1
        rows = draft(asked)
        start = 0
        for builder, nodes in zip(builders, wanted, strict=True):
            if nodes:
                builder.give(rows[start : start + len(nodes)])
                start += len(nodes)
