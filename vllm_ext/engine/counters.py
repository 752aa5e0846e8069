# SPDX-License-Identifier: Apache-2.0
"""What a worker counts, and what of it has not been sent yet.

It leaves the worker with the outputs of steps, see `worker_part.Counts`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

# Why a step of a request went on with less than the method could do: without drafts, or with a chain.
FALLBACK_REASONS = (
    "proposer_error",
    "structured_output_chain",
    "no_grammar",
    "model_chain",
    "hidden_states_missing",
)

DOCUMENTATION = {
    "spec_draft_tokens": "Draft tokens (tree nodes) verified by the target.",
    "spec_accepted_tokens": "Draft tokens accepted.",
    "spec_emitted_tokens": "Tokens emitted, accepted drafts and the target's own.",
    "spec_entropy_tokens": "Of the accepted, draft tokens taken because the draft model was sure, which is lossy.",
    "spec_typical_tokens": "Of the accepted, draft tokens kept by typical acceptance, which is lossy.",
    "spec_steps": "Steps of a request that emitted tokens; emitted / steps is tokens per step.",
    "spec_draft_passes": "Forward passes of a draft model, heads or an exit, each of a whole batch (V1 runner).",
    "state_loads": "Starts that took over what was learnt before.",
    "state_set_aside": "Starts that found saved state they could not use; the log has the file and the reason.",
    "state_saves": "Times what was learnt was saved.",
    "state_save_errors": "Times it could not be saved; the log has the cause.",
}
FALLBACK = "fallbacks"
COUNTERS = (*DOCUMENTATION, *(f"{FALLBACK}:{reason}" for reason in FALLBACK_REASONS))

# What the goodput budget thinks, of the last step it decided.
GAUGES = {
    "spec_budget_nodes_per_request": "Draft nodes per request the goodput budget chose last.",
    "spec_budget_gain": "Tokens per second the budget expects, as a multiple of not speculating.",
    "spec_budget_step_seconds": "Step time the budget predicts for its choice.",
    "spec_budget_target_efficiency": "Predicted time of a step without drafts over that of the budget's choice.",
    "spec_budget_correction": "Accepted drafts as a multiple of those the drafter predicted, recently.",
}


class Counters:
    """Totals of `COUNTERS` and the last of `GAUGES`, in rank 0. Other ranks count nothing.

    Threads may share it: what is saved is counted beside the steps.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.counts: bool = vllm_config.parallel_config.rank == 0
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(COUNTERS, 0)
        self._gauges = dict.fromkeys(GAUGES, 0.0)
        self._new: dict[str, float] = {}

    def add(self, amounts: Mapping[str, int]) -> None:
        """Count. Keys are names of `COUNTERS`."""
        if not self.counts:
            return
        with self._lock:
            for name, amount in amounts.items():
                if amount:
                    self._totals[name] += int(amount)
                    merge(self._new, {name: int(amount)})

    def count(self, name: str, amount: int = 1) -> None:
        """Count what has one name."""
        self.add({name: amount})

    def show_budget(self, state: Mapping[str, float]) -> None:
        """A budget's figures, as its ``state`` names them; 0 for what it does not say."""
        if not self.counts:
            return
        with self._lock:
            for name, before in self._gauges.items():
                value = float(state.get(name.removeprefix("spec_budget_"), 0.0))
                if value != before:
                    self._gauges[name] = self._new[name] = value

    def take_new(self) -> dict[str, float]:
        """What was counted since the last call, and gauges that have changed."""
        if not self._new:
            return {}
        with self._lock:
            new, self._new = self._new, {}
        return new

    def totals(self) -> dict[str, int]:
        """All that was counted, by name; nothing on ranks that do not count."""
        return dict(self._totals) if self.counts else {}

    def gauges(self) -> dict[str, float]:
        """The values last set; zeros before."""
        return dict(self._gauges) if self.counts else {}


def merge(reports: dict[str, float], new: Mapping[str, float]) -> None:
    """Add what `Counters.take_new` gave to earlier ones that were not sent on: counts add up, gauges are replaced."""
    for name, value in new.items():
        reports[name] = value if name in GAUGES else reports.get(name, 0) + value
