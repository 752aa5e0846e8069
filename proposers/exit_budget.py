# SPDX-License-Identifier: Apache-2.0
"""Which exit drafts and how much, by expected tokens per second: `exit_choice` with measured costs, down to nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_ext.proposers.draft_budget import HOST_RATE, HOST_SECONDS, record_one
from vllm_ext.proposers.exit_choice import ExitChoice
from vllm_ext.proposers.step_cost import Float64, StepCost
from vllm_ext.proposers.thrift import Thrift
from vllm_ext.proposers.tree import DraftTree


class ExitBudget:
    """Costs of every exit, beside what is known of its drafts.

    Each step: `plan`; if anything was drafted `drafted` and ``record_pass`` for each pass; of the step it led to, if it
    held no prompt tokens, ``record_step`` without the draft's time.

    Args:
        choice: learns from shadow tokens.
    """

    def __init__(self, choice: ExitChoice) -> None:
        self.choice = choice
        self.exit = 0  # the one that drafts
        self.least_worth = 0.0  # of a path: below less no more is drafted
        self.cost = StepCost()  # of the whole model
        self.pass_costs = [StepCost() for _ in range(choice.num_exits)]
        self.rest_costs = [StepCost() for _ in range(choice.num_exits)]
        self._host = HOST_SECONDS
        self._thrift = Thrift()
        self._state: dict[str, float] = {}

    @property
    def settled(self) -> bool:
        """Whether steps may go by without a `plan`."""
        return self._thrift.settled

    def plan(self, request_ids: Sequence[str], context_tokens: int, rested: int = 0) -> int:
        """Most tokens to draft for each request of the next step; how is then in ``exit`` and ``least_worth``.

        Args:
            request_ids: of those that decode, at least one.
            context_tokens: tokens in the KV cache, of all requests together.
            rested: steps without drafts since the last call.
        """
        batch_size = len(request_ids)
        plain = float(self.cost.seconds(np.array([batch_size]), batch_size, context_tokens)[0])
        draft, rest = self._seconds(batch_size, context_tokens)
        seconds = np.concatenate([[plain], (draft + rest).ravel()])
        tokens = self.choice.tokens(request_ids)[:, 1:]
        rate = np.concatenate([[batch_size], tokens.ravel()]) / seconds
        best = self._thrift.choose(rate, rested)
        length = 0
        if best:
            self.exit, length = divmod(best - 1, self.choice.max_drafted)
            length += 1
            more = float(np.diff((draft + rest)[self.exit, :2]).sum())
            self.least_worth = self.choice.least_worth(request_ids, self.exit, float(rate[best]), more)
        self._state = {
            "step_seconds": float(seconds[best]),
            "nodes_per_request": float(length),
            "gain": float(rate[best] / rate[0]),
            # The layers that draft are the target's own.
            "target_efficiency": float(plain / seconds[best]),
            "draft_seconds": float(draft[self.exit, length - 1]) if length else 0.0,
        }
        return self.choice.max_drafted if length else 0

    def _seconds(self, batch_size: int, context_tokens: int) -> tuple[Float64, Float64]:
        """Of drafting and of verifying, float64 ``[num_exits, max_drafted]`` both."""
        lengths = np.arange(1, self.choice.max_drafted + 1)
        one, rows = np.array([batch_size]), batch_size * (1 + lengths)
        # The root, the inner nodes and the leaf: one after the other.
        passes = np.array([cost.seconds(one, batch_size, context_tokens)[0] for cost in self.pass_costs])
        draft = passes[:, None] * (1 + lengths) + batch_size * self._host
        rest = np.array([cost.seconds(rows, batch_size, context_tokens) for cost in self.rest_costs])
        return draft, rest

    def drafted(self, trees: Sequence[DraftTree], host_seconds: float) -> None:
        """Learn what drafting these has cost besides the passes."""
        self._host += HOST_RATE * (host_seconds / len(trees) - self._host)

    def record_pass(self, seconds: float, rows: int, batch_size: int, context_tokens: int) -> None:
        """A draft pass of the exit in use; see `StepCost.record`."""
        record_one(self._costs(), self.pass_costs[self.exit], seconds, rows, batch_size, context_tokens)

    def record_step(
        self, seconds: float, rows: int, batch_size: int, context_tokens: int, behind: int | None
    ) -> None:
        """A step of the target, begun behind an exit (its index) or not; see `StepCost.record`."""
        measured = self.cost if behind is None else self.rest_costs[behind]
        record_one(self._costs(), measured, seconds, rows, batch_size, context_tokens)

    def _costs(self) -> list[StepCost]:
        return [self.cost, *self.pass_costs, *self.rest_costs]

    def state(self) -> dict[str, float]:
        """Figures for metrics, as `GoodputBudget.state`."""
        return {**self._state, "correction": 1.0}
