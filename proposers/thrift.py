# SPDX-License-Identifier: Apache-2.0
"""Which of several ways to draft to take, when what is never tried is never learnt."""

from __future__ import annotations

from vllm_ext.proposers.step_cost import Float64

MARGIN = 0.02  # what drafting must promise above none
WARM_UP_STEPS = 5  # without drafts, so that there is a unit of time
INCOME = 0.002  # savings for probes, in steps for each step
FIRST_SAVINGS, MOST_SAVINGS = 0.5, 4.0


class Thrift:
    """Takes the best of several ways to go on, or none where that pays more; tries what it has not taken for long.

    What is never tried is never learnt: the least that loses little is, when that has been saved.
    """

    def __init__(self) -> None:
        self._step = 0
        self._savings = FIRST_SAVINGS

    @property
    def settled(self) -> bool:
        """Whether there is a unit of time."""
        return self._step > WARM_UP_STEPS

    def choose(self, rate: Float64, rested: int = 0, now: Float64 | None = None) -> int:
        """Once a step.

        Args:
            rate: float64 ``[num_ways]``, expected tokens per second of each; the first is to draft nothing.
            now: of the next step alone, where it takes time that is for later ones too.
            rested: steps without drafts since the last call, in which this was not asked.
        """
        self._step += 1
        self._savings = min(self._savings + INCOME * (1 + rested), MOST_SAVINGS)
        if self._step <= WARM_UP_STEPS:
            return 0
        best = int(rate.argmax())
        if rate[best] >= rate[0] * (1.0 + MARGIN):
            return best
        now = rate if now is None else now
        probe = 1 + int(now[1:].argmax())
        loss = max(float(now[0] / now[probe]) - 1.0, MARGIN)
        if loss <= self._savings:
            self._savings -= loss
            return probe
        return 0
