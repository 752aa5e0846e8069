# SPDX-License-Identifier: Apache-2.0
"""The nodes of the largest path probabilities by a draft model: for greedy and seeded requests, and `tree_walk`."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from vllm_ext.kernels.sparse import Sparse
from vllm_ext.proposers.sampled import ASKED_PER_NODE, ROOT, TreeBuilder, largest, share


class LikeliestTree(TreeBuilder):
    """A tree that is chosen, not drawn.

    Args:
        num_nodes: most nodes of the tree.
        max_depth: deepest nodes.
        asked_per_node: for each of them, after how many the distribution may be asked for.
        width: most children of a node; 1 is a chain.
        worth: of a node's probability, given its parents, the chance that it is accepted if they are.
        least_worth: below nodes whose chance, their parents' times their own, is less, nothing is asked for.
    """

    def __init__(
        self,
        num_nodes: int,
        max_depth: int,
        asked_per_node: int = ASKED_PER_NODE,
        width: int | None = None,
        worth: Callable[[float], float] = lambda probability: probability,
        least_worth: float = 0.0,
    ) -> None:
        super().__init__()
        self.values: list[float] = []  # path probabilities, in no order
        self._num_nodes, self._max_depth = num_nodes, min(max_depth, num_nodes)
        self._width = min(width or num_nodes, num_nodes)
        self._worth, self._least_worth = worth, least_worth
        self._chances: list[float] = []  # by node
        self._room = asked_per_node * num_nodes  # nodes that may still be asked for
        self._wanted = [ROOT] if num_nodes > 0 and max_depth > 0 else []

    def wanted(self) -> list[int]:
        """See `TreeBuilder.wanted`."""
        return self._wanted

    def give(self, rows: Sequence[Sparse]) -> None:
        """See `TreeBuilder.give`."""
        first = len(self.tokens)
        for node, row in zip(self._wanted, rows, strict=True):
            self.q[node] = row
            above, chance = (self.values[node], self._chances[node]) if node != ROOT else (1.0, 1.0)
            order = np.lexsort((row.ids, -row.q))[: self._width]
            least = self._least_kept()
            for token, q in zip(row.ids[order].tolist(), row.q[order].tolist(), strict=True):
                if above * q <= least:
                    break
                self.add(token, node)
                self.values.append(above * q)
                self._chances.append(chance * self._worth(q))
        self._wanted = []
        if len(self.tokens) > first and self.depth(first) < self._max_depth:
            # What is not among the best now is not in the tree, and nothing below it.
            best = [n for n in self.kept() if n >= first and self._chances[n] >= self._least_worth]
            self._wanted = best[: share(self._room)]
            self._room -= len(self._wanted)

    def _least_kept(self) -> float:
        """What a node must be worth more than to be among the best: those that there are came first."""
        full = len(self.values) >= self._num_nodes
        return heapq.nlargest(self._num_nodes, self.values)[-1] if full else 0.0

    def reach(self) -> float:
        """See `TreeBuilder.reach`."""
        return sum(self.values[node] for node in self._wanted)

    def kept(self) -> list[int]:
        """The most probable nodes."""
        return largest(self.values, self._num_nodes)

    def drawn(self, q: dict[int, Sparse]) -> None:
        """See `TreeBuilder.drawn`."""
