# SPDX-License-Identifier: Apache-2.0
"""DySpec: grow the tree where a token more is most likely to be accepted.

A *slot* is a place for one more child of a node; its value is the chance that a token drawn there is accepted. The slot
of the largest value gets a token drawn from what is left of the node's distribution. Two slots follow: the next
child's, which counts if the token is rejected, and the first one below the token, which counts if it is accepted.

Source: "DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure", arXiv 2410.11744, section 4,
algorithm 1.

Deviations, ours:

- The paper takes the probability that a token was drawn with for its chance of acceptance, and the chance that
  verification comes to a slot for the slot's value. But a token that was unlikely to be drawn is accepted where the
  target agrees. Chances are learnt from what verification accepts (`acceptance`), and a slot's value has the expected
  chance of its token in it.
- No threshold (its algorithm 2) is needed to draft layer by layer: each forward pass takes all nodes below which a
  slot may be among those filled in the end, and slots are filled ahead, of which the best are kept. The tree is the
  greedy one, in no more passes than it is deep. Which slots are kept depends on their values, which are what they were
  before their tokens were drawn.
- Of a greedy request drawn siblings would be worth nothing: it gets the `LikeliestTree`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vllm_ext.kernels.chance import Chance
from vllm_ext.kernels.sparse import Float64, Sparse
from vllm_ext.proposers.acceptance import Acceptance
from vllm_ext.proposers.base import Request, VerifiedRows
from vllm_ext.proposers.joint_tree import JointProposer
from vllm_ext.proposers.sampled import ROOT, TreeBuilder, largest, widths
from vllm_ext.proposers.specdec_pp import StoppedChain
from vllm_ext.proposers.sure_text import SureChain

if TYPE_CHECKING:
    from vllm_ext.proposers.sampled_device import Growth  # with torch


class SampledTree(TreeBuilder):
    """A tree for requests that sample.

    Args:
        num_nodes: most nodes.
        max_depth: deepest nodes; the root's children have depth 1.
        chance: of this request alone; not verification's.
        acceptance: what is known of draws; not written to.
        least_value: slots below are left empty. Chosen before anything is drawn: a tree that is cut afterwards, by what
            was drawn, changes the law of the output.
    """

    def __init__(
        self,
        num_nodes: int,
        max_depth: int,
        chance: Chance,
        acceptance: Acceptance,
        least_value: float = 0.0,
    ) -> None:
        super().__init__()
        self.values: list[float] = []  # of each node's slot; not above its parent's, nor its elder siblings'
        self.groups: list[int] = []  # by node, which estimate its chance is
        self._num_nodes, self._max_depth, self._least = num_nodes, max_depth, least_value
        # Most nodes asked for by round. Fixed: what was drawn must not take the place of nodes that come before it.
        self._rounds = [1, *widths(num_nodes, max_depth)]
        self._round = 0
        self._chance, self._acceptance = chance, acceptance
        self._left: dict[int, Float64] = {}  # what of a node's distribution was not drawn yet
        self._reach: dict[int, float] = {}  # by node, the chance that verification tries its next child
        self._ranks: dict[int, int] = {}  # by node, children it has
        self._slots: list[tuple[float, int]] = []  # a heap: value negated, node whose distribution is known
        self._waiting: list[tuple[float, int]] = []  # first slots of other nodes, and their values at most
        self._open(ROOT, 1.0, 1.0)

    def _open(self, node: int, reach: float, most: float) -> None:
        """A slot, of which no more is known than what was drawn before.

        Args:
            node: whose child it is for.
            reach: the chance that verification tries that child.
            most: the value of the slot that was filled before. In the order of values the next may not be before it.
        """
        self._reach[node] = reach
        value = min(reach, most)
        if node in self._left:
            left = self._left[node]
            value = min(most, reach * self._expected(self._ranks[node], left / left.sum()))
        if value <= 0.0 or value < self._least or self.depth(node) >= self._max_depth:
            return
        if node in self._left:
            heapq.heappush(self._slots, (-value, node))
        elif self._round < len(self._rounds):
            self._waiting.append((-value, node))

    def _expected(self, rank: int, chances: Float64) -> float:
        """The chance that a token is accepted that is drawn with these."""
        accepted = self._acceptance.estimates(self._acceptance.groups(rank, chances))
        return float((chances * accepted).sum())

    def _better(self, value: float) -> int:
        """How many tokens come before one in a slot of this value, for all that is known."""
        waiting = sum(-negated >= value for negated, _ in self._waiting)
        return waiting + sum(other >= value for other in self.values)

    def wanted(self) -> list[int]:
        """See `TreeBuilder.wanted`."""
        # No slot is worth more than the one it comes from: what is not among the best now will not be.
        best = [entry for entry in sorted(self._waiting) if self._better(-entry[0]) <= self._num_nodes]
        return [node for _, node in best[: self._rounds[self._round]]] if best else []

    def give(self, rows: Sequence[Sparse]) -> None:
        """See `TreeBuilder.give`."""
        asked = self.wanted()
        self._round += 1
        for node, row in zip(asked, rows, strict=True):
            self.q[node], self._left[node], self._ranks[node] = row, row.q.copy(), 0
        waiting, self._waiting = self._waiting, []
        for negated, node in waiting:
            if node in self._left:  # the others get no children: decided before any of theirs was drawn
                self._open(node, self._reach[node], -negated)
        while self._slots and self._better(-self._slots[0][0]) < self._num_nodes:
            negated, node = heapq.heappop(self._slots)
            self._fill(node, -negated)

    def _fill(self, node: int, value: float) -> None:
        left, reach = self._left[node], self._reach[node]
        place = self._chance.draw(left)
        group = self._acceptance.groups(self._ranks[node], left[place] / left.sum())
        accepted = float(self._acceptance.estimates(group))
        left[place] = 0.0
        child = self.add(int(self.q[node].ids[place]), node)
        self.values.append(value)
        self.groups.append(int(group))
        self._ranks[node] += 1
        self._open(child, reach * accepted, value)
        if left.any():
            self._open(node, reach * (1.0 - accepted), value)

    def kept(self) -> list[int]:
        """Those of the largest values: what one slot after the other would have been filled with."""
        return largest(self.values, self._num_nodes)

    def judge(self, accepted: Sequence[bool], acceptance: Acceptance) -> None:
        """Count what verification got to.

        Args:
            accepted: of the finished tree's first nodes, those that were verified.
            acceptance: written to.
        """
        trying = {ROOT}  # accepted, and none of its children so far
        for node, hit in zip(self.kept(), accepted, strict=False):
            if (parent := self.parents[node]) in trying:
                acceptance.count(self.groups[node], hit)
                if hit:
                    trying.remove(parent)
                    trying.add(node)


class DynamicTreeProposer(JointProposer):
    """Trees that are drawn grow where acceptance is likely, whatever drafts."""

    on_v2 = "device"

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.acceptance = Acceptance()
        self._drawn: dict[str, SampledTree] = {}  # by request, what the next step verifies

    def _builder(self, request: Request) -> TreeBuilder:
        builder = super()._builder(request)
        if isinstance(builder, SampledTree):
            self._drawn[request.request_id] = builder
        return builder

    def observe(self, rows: VerifiedRows) -> None:
        """Judge the trees of the last `propose`, as far as they were verified."""
        super().observe(rows)
        for name, start, end in zip(rows.request_ids, rows.row_start[:-1], rows.row_start[1:], strict=True):
            if (builder := self._drawn.pop(name, None)) is not None:
                builder.judge(rows.accepted[start + 1 : end].tolist(), self.acceptance)

    def finish(self, request_id: str) -> None:
        """See `Proposer.finish`."""
        super().finish(request_id)
        self._drawn.pop(request_id, None)

    def drawn(self, num_nodes: int, max_depth: int) -> TreeBuilder:
        """See `DraftModelProposer.drawn`."""
        return SampledTree(num_nodes, max_depth, self.chance, self.acceptance)

    def drawn_on_device(self, num_nodes: int) -> Growth:
        """See `DraftModelProposer.drawn_on_device`."""
        from vllm_ext.proposers.dyspec_device import DynamicTrees

        return DynamicTrees(num_nodes, self.most_depth)


class DySpec(DynamicTreeProposer):
    """Dynamic trees of a draft model."""

    summary: ClassVar[str] = "a draft model's tree, grown where the target likely agrees"
    paper: ClassVar[str] = "arXiv 2410.11744"
    writes_text = True

    def sure_chain(self, num_nodes: int, chance: Chance | None, sure: SureChain) -> TreeBuilder:
        """See `DraftModelProposer.sure_chain`. It never stops by itself."""
        return StoppedChain(num_nodes, sure.chance, 1.0, chance)
