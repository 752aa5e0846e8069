# SPDX-License-Identifier: Apache-2.0
"""DySpec: grow the tree where the draft model says that a token more is most likely to be accepted.

A *slot* is a place for one more child of a node; its value is the chance that verification comes to it, if the target
agrees with the draft. The slot of the largest value gets a token drawn from what is left of the node's distribution.
With R the chance that it was given, two slots follow: the next child's, worth ``1 - R`` of the value (the token may be
rejected), and the first one below the token, worth ``R`` of it.

Source: "DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure", arXiv 2410.11744, section 4,
algorithm 1.

Deviations, ours:

- No threshold (its algorithm 2) is needed to draft layer by layer: each forward pass takes all nodes below which a
  slot may be among those filled in the end, and slots are filled ahead, of which the best are kept. The tree is the
  greedy one, in no more passes than it is deep. Which slots are kept depends on their values, which are what they were
  before their tokens were drawn.
- Of a greedy request drawn siblings would be worth nothing: it gets the `LikeliestTree`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from vllm_ext.kernels.chance import Chance
from vllm_ext.kernels.sparse import Float64, Sparse
from vllm_ext.proposers.joint_tree import JointProposer
from vllm_ext.proposers.sampled import ASKED_PER_NODE, ROOT, TreeBuilder, largest, share

if TYPE_CHECKING:
    from vllm_ext.proposers.sampled_device import Growth  # with torch


class SampledTree(TreeBuilder):
    """A tree for requests that sample.

    Args:
        num_nodes: most nodes.
        max_depth: deepest nodes; the root's children have depth 1.
        chance: of this request alone; not verification's.
        least_value: slots below are left empty. Chosen before anything is drawn: a tree that is cut afterwards, by what
            was drawn, changes the law of the output.
    """

    def __init__(self, num_nodes: int, max_depth: int, chance: Chance, least_value: float = 0.0) -> None:
        super().__init__()
        self.values: list[float] = []  # of each node's slot; not above its parent's, nor its elder siblings'
        self._num_nodes, self._max_depth, self._least = num_nodes, max_depth, least_value
        self._room = ASKED_PER_NODE * num_nodes  # nodes that may still be asked for
        self._chance = chance
        self._left: dict[int, Float64] = {}  # what of a node's distribution was not drawn yet
        self._slots: list[tuple[float, int]] = []  # a heap: value negated, node whose distribution is known
        self._waiting: list[tuple[float, int]] = []  # the first slots of nodes whose distribution is not
        self._open(ROOT, 1.0)

    def _open(self, node: int, value: float) -> None:
        if value > 0.0 and value >= self._least and self.depth(node) < self._max_depth:
            if node in self._left:
                heapq.heappush(self._slots, (-value, node))
            else:
                self._waiting.append((-value, node))

    def _better(self, value: float) -> int:
        """How many tokens come before one in a slot of this value, for all that is known."""
        waiting = sum(-negated >= value for negated, _ in self._waiting)
        return waiting + sum(other >= value for other in self.values)

    def wanted(self) -> list[int]:
        """See `TreeBuilder.wanted`."""
        # No slot is worth more than the one it comes from: what is not among the best now will not be.
        best = [entry for entry in sorted(self._waiting) if self._better(-entry[0]) <= self._num_nodes]
        return [node for _, node in best[: share(self._room)]]

    def give(self, rows: Sequence[Sparse]) -> None:
        """See `TreeBuilder.give`."""
        asked = self.wanted()
        self._room -= sum(node != ROOT for node in asked)
        for node, row in zip(asked, rows, strict=True):
            self.q[node], self._left[node] = row, row.q.copy()
        waiting, self._waiting = self._waiting, []
        for negated, node in waiting:
            if node in self._left:  # the others get no children: decided before any of theirs was drawn
                self._open(node, -negated)
        while self._slots and self._better(-self._slots[0][0]) < self._num_nodes:
            negated, node = heapq.heappop(self._slots)
            self._fill(node, -negated)

    def _fill(self, node: int, value: float) -> None:
        left = self._left[node]
        place = self._chance.draw(left)
        given = float(left[place] / left.sum())
        left[place] = 0.0
        child = self.add(int(self.q[node].ids[place]), node)
        self.values.append(value)
        self._open(child, value * given)
        if left.any():
            self._open(node, value * (1.0 - given))

    def kept(self) -> list[int]:
        """Those of the largest values: what one slot after the other would have been filled with."""
        return largest(self.values, self._num_nodes)


class DynamicTreeProposer(JointProposer):
    """Trees that are drawn grow where acceptance is likely, whatever drafts."""

    on_v2 = "device"

    def drawn(self, num_nodes: int, max_depth: int) -> TreeBuilder:
        """See `DraftModelProposer.drawn`."""
        return SampledTree(num_nodes, max_depth, self.chance)

    def drawn_on_device(self, num_nodes: int) -> Growth:
        """See `DraftModelProposer.drawn_on_device`."""
        from vllm_ext.proposers.dyspec_device import DynamicTrees

        return DynamicTrees(num_nodes, self.most_depth)


class DySpec(DynamicTreeProposer):
    """Dynamic trees of a draft model."""

    summary: ClassVar[str] = "a draft model's tree, grown where the target likely agrees"
    paper: ClassVar[str] = "arXiv 2410.11744"
