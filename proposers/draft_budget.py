# SPDX-License-Identifier: Apache-2.0
"""How many nodes to draft with a model: decided before, because drafting costs and drawn trees must not be cut.

The goodput of `budget`, with the draft's own time in it. A step in which ``b`` requests have ``n`` nodes each puts out
``b (1 + a_1 + ... + a_n)`` expected tokens, with ``a_r`` the learnt chance that a tree's node of rank ``r`` is
accepted. It takes the target's step of ``b (1 + n)`` rows and the draft's: passes as many as the first ``n`` nodes are
deep and some that find nothing better, of so many rows as they have inner nodes. Those that get any get the same
number: which trees turn out well is known only when they are drawn.

While they grow more is known. A pass over nodes that verification comes to with chances ``c`` puts out ``g sum(c)``
tokens more, with ``g`` learnt from what became of such passes. Where that is less than the whole puts out in the pass's
time otherwise, trees are finished as they are (`least_reach`).

A draft with caches of its own must also read what it has not read of a request (`reading_cost`). The requests that have
least to be read come first, and perhaps only they are drafted for.

Source: SmartSpec, arXiv 2406.14066 (goodput). Deviations: ranks of a tree's nodes instead of positions of a
chain, the draft's time by pass, passes that are not worth it, what is unread, probes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vllm_ext.proposers.reading_cost import READING_ROWS, ReadingCost
from vllm_ext.proposers.step_cost import Float64, StepCost
from vllm_ext.proposers.thrift import Thrift
from vllm_ext.proposers.tree import DraftTree

FADE = 0.98  # of evidence, a step
TRUST = 8.0  # trees' worth of it that a node is accepted FALL times as often as the one of the rank before
FALL = 0.85
FIRST = 0.6  # what is believed of the first node
HOST_SECONDS = 2e-4  # of a tree besides the passes, before the first is measured
HOST_RATE = 0.1


def record_one(
    costs: Sequence[StepCost],
    measured: StepCost,
    seconds: float,
    rows: int,
    batch_size: int,
    context_tokens: int,
) -> None:
    """`StepCost.record`; what it tells of the machine's speed holds for what is not measured now, too."""
    before = measured.unit if measured.settled else None
    measured.record(seconds, rows, batch_size, context_tokens)
    if before is not None:
        for other in costs:
            if other is not measured:
                other.scale(measured.unit / before)


class DraftBudget:
    """Chooses the number of nodes with the most expected tokens per second.

    Each step: `plan`; if anything was drafted `drafted` and ``record_pass`` for each pass; of the step it led to
    `observe` and, if it held no prompt tokens, ``record_step`` without the draft's time.

    Args:
        ceiling: most nodes of one request, at least 1.
        first_rows: rows of a request in a draft's first pass: what was committed since the last one, with a model that
            has caches of its own.
        reuses: whether the draft is a part of the target: then it computes the leaves too, in a pass more, and a step
            with drafts costs only the rest of the target.
        one_pass: whether the first pass tells all depths, as heads do.
        depths_a_pass: how many depths each pass tells, the first one too.
    """

    def __init__(
        self,
        ceiling: int,
        first_rows: int = 2,
        reuses: bool = False,
        one_pass: bool = False,
        depths_a_pass: int = 1,
    ) -> None:
        self._depths_a_pass = depths_a_pass
        self.ceiling, self.first_rows, self.one_pass = ceiling, first_rows, one_pass
        self.rest_cost = StepCost() if reuses else None
        self.cost = StepCost()  # of the target
        self.pass_cost = StepCost()  # of one forward pass of the draft
        self._trials: Float64 = np.zeros(ceiling)  # trees that had a node of this rank
        self._hits: Float64 = np.zeros(ceiling)
        self._weight: Float64 = np.zeros(ceiling + 1)  # trees known of at least so many nodes
        self._depth: Float64 = np.zeros(ceiling + 1)  # their sums: passes for the first so many nodes,
        self._inner: Float64 = np.zeros(ceiling + 1)  # and rows of these passes
        self._vain = 0.0  # rounds in which nothing better was found
        self._passed = 1.0  # share of rounds that are passes: a cascade spares some
        # Of passes after the first ones, and tokens accepted that they gave.
        self._reach = self._reach_hits = 0.0
        # Of such a pass of the next step: with less it does not pay; see `sampled.grow`.
        self.least_reach = 0.0
        self._host = HOST_SECONDS
        self.reading = ReadingCost()
        self._thrift = Thrift()
        self._state: dict[str, float] = {}

    @property
    def settled(self) -> bool:
        """Whether steps may go by without a `plan`."""
        return self._thrift.settled

    def plan(self, unread: Sequence[int], context_tokens: int, rested: int = 0) -> tuple[int, int]:
        """How much to draft for the next step.

        Args:
            unread: ``[batch_size]`` ascending, of each request that decodes its tokens that the draft has not read.
            context_tokens: tokens in the KV cache, of all requests together.
            rested: steps without drafts since the last call.

        Returns:
            Nodes of a request, and how many requests get them: the first ones.
        """
        batch_size = len(unread)
        ways = [batch_size]  # requests that are drafted for
        if self.rest_cost is None:  # else all begin one step
            ways = sorted({batch_size, *(1 << i for i in range(batch_size.bit_length()))})
        nodes = np.arange(self.ceiling + 1)
        accepted = np.concatenate([[0.0], np.cumsum(self.acceptance())])
        # A pass of so many is half of what is believed of a row's cost where many are read.
        otherwise = float(self.pass_cost.seconds(np.array([READING_ROWS]), 1, 0)[0]) / READING_ROWS
        read = self.reading.row_seconds(otherwise) * np.cumsum(
            np.maximum(np.array(unread) - self.first_rows, 0)
        )
        target, draft, each, reading = (np.zeros((len(ways), self.ceiling + 1)) for _ in range(4))
        for i, many in enumerate(ways):
            target[i] = self._target_seconds(nodes, many, batch_size, context_tokens)
            draft[i], each[i] = self._draft_seconds(nodes, many, context_tokens * many // batch_size)
            reading[i, 1:] = read[many - 1]
        tokens = batch_size + np.outer(ways, accepted)
        # Once in an answer, which takes the fewer steps the more is accepted.
        share = np.array([1.0 / self.reading.steps(of_step) for of_step in 1.0 + accepted])
        seconds = target + draft + reading * share
        rate, now = tokens / seconds, tokens / (target + draft + reading)
        # Without drafts all ways are one.
        best = self._thrift.choose(
            np.concatenate([rate[0, :1], rate[:, 1:].ravel()]),
            rested,
            np.concatenate([now[0, :1], now[:, 1:].ravel()]),
        )
        way, node = divmod(best - 1, self.ceiling) if best else (0, -1)
        chosen = way, node + 1
        many = ways[way] if best else 0
        if best:
            given = (self._reach_hits + TRUST * FIRST) / (self._reach + TRUST)
            self.least_reach = float(rate.max() * each[chosen]) / given * self._passed
        self._state = {
            "step_seconds": float(seconds[chosen]),
            "nodes_per_request": float(chosen[1] * many / batch_size),
            "gain": float(rate[chosen] / rate[0, 0]),
            "target_efficiency": float(target[0, 0] / target[chosen]),
            "draft_seconds": float(draft[chosen] + reading[chosen]),
        }
        return chosen[1], many

    def acceptance(self) -> Float64:
        """float64 ``[ceiling]``: the chance that a node is accepted, by its rank in its tree."""
        estimates = np.empty(self.ceiling)
        before = FIRST / FALL
        for rank in range(self.ceiling):
            before = (self._hits[rank] + TRUST * FALL * before) / (self._trials[rank] + TRUST)
            estimates[rank] = before
        return estimates

    def restart(self) -> None:
        """The draft is another one: how often it was right counts no longer, what it costs does."""
        for counts in (self._trials, self._hits):
            counts[:] = 0.0
        self._reach = self._reach_hits = 0.0

    def _target_seconds(self, nodes: np.ndarray, many: int, batch_size: int, context_tokens: int) -> Float64:
        rows = batch_size + many * nodes
        whole = self.cost.seconds(rows, batch_size, context_tokens)
        if self.rest_cost is None:
            return whole
        rest = self.rest_cost.seconds(rows, batch_size, context_tokens)
        seconds: Float64 = np.where(nodes > 0, rest, whole)
        return seconds

    def _draft_seconds(
        self, nodes: np.ndarray, batch_size: int, context_tokens: int
    ) -> tuple[Float64, Float64]:
        """By nodes of each tree, of all passes and the host together; and of one pass after the first."""
        depth, inner = self._shape(nodes)
        # One node is never followed by another.
        deep = np.maximum(depth - 1.0, 0.0) + self._vain
        passes = np.where(nodes > 1, deep / self._depths_a_pass * self._passed, 0.0)
        if self.one_pass:
            each = np.zeros(len(nodes))
        else:
            rows = np.maximum(np.rint(batch_size * inner / np.maximum(passes, 1.0)), 1).astype(np.int64)
            each = self.pass_cost.seconds(rows, batch_size, context_tokens)
        first = self.pass_cost.seconds(np.array([self.first_rows * batch_size]), batch_size, context_tokens)
        seconds = float(first[0]) + passes * each + batch_size * self._host
        if self.rest_cost is not None:
            leaves = np.maximum(np.rint(batch_size * (nodes - inner)), 1).astype(np.int64)
            seconds += self.pass_cost.seconds(leaves, batch_size, context_tokens)
        return np.where(nodes > 0, seconds, 0.0), each

    def _shape(self, nodes: np.ndarray) -> tuple[Float64, Float64]:
        """Of trees of so many nodes, depth and inner nodes; of unknown sizes a chain's."""
        known = self._weight > 0
        weight = np.where(known, self._weight, 1.0)
        return np.where(known, self._depth / weight, nodes), np.where(known, self._inner / weight, nodes)

    def drafted(self, trees: Sequence[DraftTree], host_seconds: float, passes: int, spared: int = 0) -> None:
        """Learn what trees look like.

        Args:
            trees: those that are not empty.
            host_seconds: time of them all besides the passes.
            passes: for them all, after the first: rounds of growth, if each pass tells several depths.
            spared: of these, how many took place in an earlier one.
        """
        if passes:
            self._passed += HOST_RATE * (1.0 - spared / passes - self._passed)
        if max(len(tree) for tree in trees) > 1:
            deep = float(np.mean([tree.depths().max() - 1 for tree in trees]))
            self._vain += HOST_RATE * (passes - deep - self._vain)
        self._weight *= FADE
        self._depth *= FADE
        self._inner *= FADE
        for tree in trees:
            size = min(len(tree), self.ceiling)
            depth = np.maximum.accumulate(tree.depths()[:size])
            inner = np.zeros(size)
            first_child = np.unique(tree.parents[:size], return_index=True)[1]
            inner[first_child] = 1.0  # with it its parent has become an inner node
            self._weight[1 : size + 1] += 1.0
            self._depth[1 : size + 1] += depth
            self._inner[1 : size + 1] += np.cumsum(inner) - 1.0  # the root's row is in the first pass
        self._host += HOST_RATE * (host_seconds / len(trees) - self._host)

    def observe(
        self,
        sizes: Sequence[int],
        accepted: Sequence[Sequence[int]],
        reached: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """Learn from one verified step.

        Args:
            sizes: nodes verified of each request, possibly none.
            accepted: by request the ranks of the accepted nodes, from 0.
            reached: by request, of each pass after the first what `TreeBuilder.reach` was; none: not known.
        """
        if not any(sizes):
            return
        self._trials *= FADE
        self._hits *= FADE
        for size, ranks in zip(sizes, accepted, strict=True):
            self._trials[:size] += 1.0
            self._hits[list(ranks)] += 1.0
        self._reach *= FADE
        self._reach_hits *= FADE
        for size, ranks, reach in zip(sizes, accepted, reached or [()] * len(sizes), strict=True):
            for depth, chance in enumerate(reach if size else (), 2):
                if math.isfinite(chance):
                    self._reach += chance
                    self._reach_hits += len(ranks) >= depth

    def record_pass(self, seconds: float, rows: int, batch_size: int, context_tokens: int) -> None:
        """A pass of the draft; see `StepCost.record`."""
        self.pass_cost.record(seconds, rows, batch_size, context_tokens)

    def record_step(
        self, seconds: float, rows: int, batch_size: int, context_tokens: int, behind: int | None = None
    ) -> None:
        """A step of the target, begun behind an exit (its index) or not; see `StepCost.record`."""
        if self.rest_cost is None:
            self.cost.record(seconds, rows, batch_size, context_tokens)
        else:
            measured = self.cost if behind is None else self.rest_cost
            record_one([self.cost, self.rest_cost], measured, seconds, rows, batch_size, context_tokens)

    def state(self) -> dict[str, float]:
        """Figures for metrics, as `GoodputBudget.state`."""
        return {**self._state, "correction": 1.0}
