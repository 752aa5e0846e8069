# SPDX-License-Identifier: Apache-2.0
"""The goodput budget: how much of each draft tree is worth verifying at the current load.

A tree's nodes stand in descending path probability and every prefix is a tree, so a step in which request
``i`` verifies ``n_i`` nodes puts out ``sum_i (1 + P_i1 + ... + P_in_i)`` expected tokens, and takes a time
that depends on the sum of ``n_i + 1`` alone. For each total the best choice is therefore the largest
probabilities of the whole batch: merge, sort, add up, take away what the predicted time is worth, take the
maximum. No search, and nothing to tune by load: where verification is free trees are verified whole, where it
does not pay nothing is.

A second is worth the tokens that steps put out in it on average, at this load. With the most tokens per second
of each step by itself, sure texts would get too few nodes and unsure ones too many, and drafts that cost time
would look cheap where little is known.

What keeps that from being a loss:

- Probabilities are multiplied by a learnt correction: tokens accepted over tokens predicted, of the nodes
  verified, of all requests; times what a request does better or worse than that.
- Speculation must promise 2 % more than none, and no step is more than twice the largest ever measured.
- What is never done is never measured, so there are probes: totals of which the cost model knows little and
  that may be better, a plain step where there has been none for 32, one node for requests that have had none
  for 8. Each is paid from savings: 0.3 % of every step's time for the cost model (and half a step to begin
  with), 0.2 % for idle requests. Each costs its predicted loss, at least the 2 % below which predictions mean
  nothing (for idle requests 0.5 % a node). Probing therefore loses at most 0.5 % of the time, as predicted;
  without speculation the way back takes 10 to 100 steps, longest where little is to be gained.

Source: SmartSpec, arXiv 2406.14066 (goodput, the greedy per-request lengths). Deviations: draft trees instead
of a chain with one acceptance rate; the worth of time, corrections, margin and probes are ours. A node costs
the same in every request: the time takes the batch's mean context.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_ext.proposers.step_cost import Float64, StepCost
from vllm_ext.proposers.tree import Float32

MARGIN = 0.02
WARM_UP_STEPS = 5  # plain ones, so that there is a unit of time
COST_INCOME = 0.003  # savings for probes, in steps for each step
IDLE_INCOME = 0.002
MOST_SAVINGS = 0.5
PLAIN_STEPS = 32
IDLE_STEPS = 8
IDLE_NODE_COST = 0.005

FADE = 0.96  # of evidence, a step
RATE_FADE = 0.99  # likewise, of what steps put out
# Over a pause evidence fades to this many predicted tokens, not further: the correction stands meanwhile, one
# failed probe changes it little and a successful one much.
SUFFICIENT = 8.0
SHRINKAGE = 8.0  # predicted tokens' worth of trust that a request is like the others
CORRECTION_RANGE = (0.001, 4.0)
# With none accepted of n predicted tokens in a row the correction is below UNLIKELY / n almost surely. Fading
# alone would take a collapse for noise a while longer.
UNLIKELY = 4.0


class _Evidence:
    """Accepted and predicted tokens of verified nodes, faded."""

    __slots__ = ("accepted", "predicted", "step")

    def __init__(self, step: int, tokens: float = 0.0) -> None:
        self.accepted = tokens
        self.predicted = tokens
        self.step = step

    def add(self, step: int, accepted: float, predicted: float) -> None:
        keep = FADE ** max(step - self.step, 1)
        keep = max(keep, min(SUFFICIENT / max(self.predicted, 1e-9), 1.0))
        self.accepted = self.accepted * keep + accepted
        self.predicted = self.predicted * keep + predicted
        self.step = step


class _Request:
    """What the budget remembers of a request."""

    __slots__ = ("chosen", "evidence", "nodes", "speculated")

    def __init__(self, step: int) -> None:
        self.evidence = _Evidence(step)
        self.nodes = 0  # of the last choice that was no plain probe
        self.chosen = 0  # of the last choice
        self.speculated = step  # when it last had a node, or came


class GoodputBudget:
    """Cuts trees to the prefixes with the most expected tokens per second of the batch.

    Each step: ``choose``, then, of the step it led to, ``observe`` and, if it held no prompt tokens,
    ``cost.record``. Both may come late; a step that is never reported is no evidence.

    Args:
        ceiling: most nodes of one request, at least 0.
        cost: the model of step times; the caller may have calibrated it.
    """

    def __init__(self, ceiling: int, cost: StepCost | None = None) -> None:
        self.ceiling = ceiling
        self.cost = StepCost() if cost is None else cost
        self._step = 0
        self._all = _Evidence(0, SUFFICIENT)
        self._run = 0.0  # tokens predicted since the last one accepted, of all requests
        self._requests: dict[str, _Request] = {}
        self._speculated = 0  # step at which any request last had a node
        self._probed = 0  # step of the last probe of idle requests
        self._plain = 0  # step at which none had
        # In steps.
        self._cost_savings = MOST_SAVINGS
        self._idle_savings = 0.0
        self._mean = 0  # nodes of a request, of the last choice
        self._state: dict[str, float] = {}
        # Expected tokens and time of all choices, beside those of steps without drafts; faded.
        self._tokens = self._time = 0.0
        # Tokens per second that steps at this load put out on average.
        self.rate = 0.0

    def choose(
        self, request_ids: Sequence[str], probabilities: Sequence[Float32], context_tokens: int
    ) -> list[int]:
        """How many nodes of each tree the next step should verify.

        Args:
            request_ids: ``[num_requests]`` every request that decodes in the next step.
            probabilities: ``[num_requests]`` of float32 ``[num_nodes]``: the path probabilities of each tree,
                descending; possibly none.
            context_tokens: tokens in the KV cache, of all requests together.

        Returns:
            ``[num_requests]`` nodes, at most ``ceiling`` and the tree's own number.
        """
        if not request_ids:
            return []
        self._step += 1
        self._cost_savings = min(self._cost_savings + COST_INCOME, MOST_SAVINGS)
        self._idle_savings = min(self._idle_savings + IDLE_INCOME, MOST_SAVINGS)
        batch_size = len(request_ids)
        requests = [self._request(name) for name in request_ids]
        trees = [tree[: self.ceiling] for tree in probabilities]
        sizes = [len(tree) for tree in trees]
        owner = np.repeat(np.arange(batch_size), sizes)
        correction = np.array([self._correction(request) for request in requests])
        # fmax and fmin turn a NaN into a number: one bad tree is not everyone's problem.
        gains = np.fmin(np.fmax(np.concatenate(trees) * correction[owner], 0.0), 1.0)
        order = np.argsort(-gains)
        # Nobody knows what a step costs that is far larger than any before.
        order = order[: 2 * max(self.cost.largest_query_tokens, batch_size) - batch_size]
        # Index n of the three arrays below: n nodes in all.
        tokens = np.full(len(order) + 1, float(batch_size))
        tokens[1:] += np.cumsum(gains[order])
        query_tokens = np.arange(batch_size, batch_size + len(tokens))
        seconds = self.cost.seconds(query_tokens, batch_size, context_tokens)
        rate = tokens / seconds
        self.rate = float(rate.max() if self._time == 0.0 else self._tokens / self._time * rate[0])
        worth = tokens - self.rate * seconds
        best = int(worth.argmax())
        if worth[best] < worth[0] + MARGIN * batch_size or self._step <= WARM_UP_STEPS:
            best = 0
        nodes: list[int] = np.bincount(owner[order[:best]], minlength=batch_size).tolist()
        for request, count in zip(requests, nodes, strict=True):
            request.nodes = count
        if self._step > WARM_UP_STEPS:
            self._tokens = RATE_FADE * self._tokens + float(tokens[best]) / batch_size
            self._time = RATE_FADE * self._time + float(seconds[best] / seconds[0])
        self._state = {
            "step_seconds": float(seconds[best]),
            "nodes_per_request": best / batch_size,
            "gain": float(rate[best] / rate[0]),
            "target_efficiency": float(seconds[0] / seconds[best]),
        }

        # What each total loses to the best, in steps. The prediction does not tell small losses from none.
        loss = np.maximum((worth[best] - worth) / tokens[best], MARGIN)
        probe = int((tokens - self.rate * seconds * (1.0 - self.cost.doubt(query_tokens))).argmax())
        if self._step - self._plain >= PLAIN_STEPS:
            probe = 0
        if self._step > WARM_UP_STEPS and probe != best and loss[probe] <= self._cost_savings:
            self._cost_savings -= float(loss[probe])
            nodes = np.bincount(owner[order[:probe]], minlength=batch_size).tolist()
        else:
            self._probe_idle(requests, sizes, gains, nodes, tokens[best], seconds[best:] / seconds[best])
        self._mean = round(sum(nodes) / batch_size)
        for request, count in zip(requests, nodes, strict=True):
            request.chosen = count
            if count:
                request.speculated = self._step
        if any(nodes):
            self._speculated = self._step
        else:
            self._plain = self._step
        return nodes

    def _probe_idle(
        self,
        requests: Sequence[_Request],
        sizes: Sequence[int],
        gains: Float64,
        nodes: list[int],
        tokens: float,
        relative_seconds: Float64,
    ) -> None:
        """Give one node to as many idle requests as the savings pay for, the longest idle first.

        Args:
            requests: ``[num_requests]``.
            sizes: ``[num_requests]`` nodes of each tree.
            gains: ``[sum(sizes)]`` expected tokens of each node.
            nodes: ``[num_requests]`` the choice, changed in place.
            tokens: expected tokens of the choice.
            relative_seconds: ``[1 + nodes left]`` time of a step with that many nodes more than chosen.
        """
        if self._step - self._probed < IDLE_STEPS:
            return
        # Where nobody speculates, requests may come and go faster than any of them is idle for long.
        longest = self._step if self._step - self._speculated >= IDLE_STEPS else self._step - IDLE_STEPS
        idle = [i for i, r in enumerate(requests) if not nodes[i] and sizes[i] and r.speculated <= longest]
        if not idle:
            return
        idle.sort(key=lambda i: requests[i].speculated)
        idle = idle[: len(relative_seconds) - 1]
        first = np.cumsum([0, *sizes])[idle]
        loss = relative_seconds[1 : len(idle) + 1] - 1.0 - np.cumsum(gains[first]) / tokens
        loss = np.maximum(loss, IDLE_NODE_COST * np.arange(1, len(idle) + 1))
        affordable = np.flatnonzero(loss <= self._idle_savings)
        if len(affordable):
            last = int(affordable[-1])
            self._idle_savings -= float(loss[last])
            self._probed = self._step
            for i in idle[: last + 1]:
                nodes[i] = 1

    def observe(
        self, request_ids: Sequence[str], predicted: Sequence[float], accepted: Sequence[int]
    ) -> None:
        """Learn from one verified step how good the drafter's probabilities are.

        Args:
            request_ids: ``[num_requests]``, in any order; the unknown are ignored.
            predicted: ``[num_requests]`` sum of the path probabilities the drafter gave the nodes
                that were verified; 0 where none was, which is no evidence.
            accepted: ``[num_requests]`` how many of them were accepted.
        """
        known = [
            (request, p, a)
            for name, p, a in zip(request_ids, predicted, accepted, strict=True)
            if p > 0.0 and (request := self._requests.get(name)) is not None
        ]
        if not known:
            return
        shared = self._shared_correction()
        for request, p, a in known:
            request.evidence.add(self._step, a, p * shared)
        all_predicted, all_accepted = sum(k[1] for k in known), sum(k[2] for k in known)
        self._all.add(self._step, all_accepted, all_predicted)
        self._run = 0.0 if all_accepted else self._run + all_predicted

    def hint(self, request_id: str) -> int:
        """How many nodes of a request's next tree may be of use: twice the last choice and 8.

        At most ``ceiling``; also that for an unknown request. A larger tree is work for nothing, and the next
        choice may still be larger than the last.
        """
        request = self._requests.get(request_id)
        if request is None:
            return self.ceiling
        return min(2 * request.nodes + 8, self.ceiling)

    def chosen(self, request_id: str) -> int:
        """How many nodes of a request the last choice was, of an unknown one what others had on average.

        For trees that may not be cut by what they hold: the one after a tree is verified as far as that was worth.
        """
        request = self._requests.get(request_id)
        return self._mean if request is None else request.chosen

    def finish(self, request_id: str) -> None:
        """Forget a request; an unknown one is fine."""
        self._requests.pop(request_id, None)

    def state(self) -> dict[str, float]:
        """Figures for metrics, of the last choice, probes left out.

        ``step_seconds``: predicted; ``nodes_per_request``: chosen; ``gain``: predicted tokens per second over
        those without drafts; ``target_efficiency``: predicted time of a step without drafts over that of the chosen
        one, T(B, 1) / T(B, n) of MoESD (arXiv 2505.19645); ``correction``: that of all requests.
        """
        return {**self._state, "correction": self._shared_correction()}

    def _request(self, request_id: str) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = _Request(self._step)
        return request

    def _shared_correction(self) -> float:
        return self._clip(min(self._all.accepted / self._all.predicted, UNLIKELY / max(self._run, 1e-9)))

    def _correction(self, request: _Request) -> float:
        own = request.evidence
        return self._clip(
            self._shared_correction() * (own.accepted + SHRINKAGE) / (own.predicted + SHRINKAGE)
        )

    @staticmethod
    def _clip(correction: float) -> float:
        low, high = CORRECTION_RANGE
        return min(max(correction, low), high)
