# SPDX-License-Identifier: Apache-2.0
"""Rule anchored: as close to the target, the risky model, as a budget of divergence from a safe model allows.

Of a step's distributions ``q`` with ``KL(q || p_safe) <= k_t`` the one nearest to ``p_risky`` is taken, in KL from it.
It lies on the geometric path between the two, ``q ~ p_safe^(1 - theta) p_risky^theta``. ``k_t`` is what an answer's
tokens so far have earned, ``k`` nats each with this one, less what they have spent; so along any answer of ``T`` tokens
the divergences add up to ``k T`` at most, and the law of whole answers is within that of the safe model's. It is no
bound on how much likelier a certain answer may become, and greedy answers are not drawn from ``q``.

Source: "Anchored Decoding", arXiv 2602.07120, section 4 and algorithm 1. The prefix debt, which starts the account
below nothing where the prompt itself is likelier under the risky model, is left out: it needs logits of the prompt,
which prefix caching does not have. In its place ``debt`` says where the account starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field

from vllm_ext.samplers.base import Asked, Row, RuleParams
from vllm_ext.samplers.steering import CompanionOptions, SteeringRule

MARGIN = 1e-5  # nats: float32 is as coarse
TINY = 1e-9  # nats of a step's budget that are left
POLISHING = 4  # steps in float64 at most
STEPS = 60  # of a Newton iteration that bisects where it would leave its bracket


class AnchoredOptions(CompanionOptions):
    k: float = Field(default=0.15, ge=0.0, le=1000.0, description="nats of divergence that each token earns")
    debt: float = Field(
        default=0.0, ge=0.0, le=1e6, description="nats that an answer owes before its first token"
    )


class AnchoredParams(RuleParams):
    """Of a request; what it leaves out is the server's."""

    anchored: bool = Field(default=True, description="whether the request is under the rule")
    anchored_k: float | None = Field(default=None, ge=0.0, le=1000.0)
    anchored_debt: float | None = Field(default=None, ge=0.0, le=1e6)


class AnchoredRule(SteeringRule):
    """A budget of divergence from a safe companion model."""

    alone = True
    name = "anchored"
    summary = "the model, within a budget of divergence from a safe one"
    paper = "arXiv 2602.07120"
    Options = AnchoredOptions
    Params = AnchoredParams
    reports = "anchored_kl"

    @classmethod
    def problem(cls, options: AnchoredOptions, params: AnchoredParams, asked: Asked) -> str | None:
        """See the base class: whatever changes ``q`` afterwards breaks the promise."""
        given = ["top_k, top_p or min_p"] * asked.truncates + ["penalties or logit_bias"] * asked.penalizes
        given += ["allowed_token_ids or bad_words"] * asked.lists_tokens
        given += [f"min_tokens={asked.min_tokens}"] * (asked.min_tokens > 0)
        given += ["structured_outputs (response_format)"] * asked.structured
        if given:
            return (
                f"anchored does not go with {' nor '.join(given)}: its guarantee is about what is sampled from. Leave "
                "one of them out (anchored=false where the server has it on for all)"
            )
        if asked.num_answers > 1:
            return f"n={asked.num_answers} does not go with anchored: each answer has a budget of its own; ask as often"
        return None

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """See the base class. Both models at the request's temperature, which is undone for vLLM to apply."""
        heat = [row.asked.temperature or 1.0 for row in rows]
        temperature = torch.tensor(heat, dtype=torch.float64, device=logits.device)[:, None]
        risky = (logits.double() / temperature).log_softmax(1)
        safe = (self.aux_logits.companion().double() / temperature).log_softmax(1)
        spent = [_spent(row) for row in rows]
        budget = [
            max(self.value(row, "k") * (len(row.output) + 1) - self.value(row, "debt") - before, 0.0)
            for row, before in zip(rows, spent, strict=True)
        ]
        log_q, divergence = nearest(risky, safe, torch.tensor(budget, dtype=torch.float64).to(risky.device))
        for row, before, now in zip(rows, spent, divergence.tolist(), strict=True):
            row.kept[len(row.output)] = before + now
            row.notes[len(row.output)] = now
        logits.copy_(log_q * temperature)


def _spent(row: Row) -> float:
    """Before this row's token: by the tokens of its own path."""
    before: float = row.kept.get(len(row.output) - 1, 0.0)
    return before


def nearest(
    risky: torch.Tensor, safe: torch.Tensor, budget: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distributions of a geometric path that are nearest to its risky end within a budget, and what they cost.

    Args:
        risky: float64 ``[num_rows, vocab]`` log-probabilities.
        safe: the same of the path's other end; where it is minus infinity, so is what is returned.
        budget: float64 ``[num_rows]`` most KL divergence from ``safe``, in nats.

    Returns:
        log-probabilities ``[num_rows, vocab]`` and their divergence from ``safe``, ``[num_rows]``, above ``budget`` by
        rounding at most.
    """
    # float32 to look for the point, which takes most of the time; float64 to weigh it.
    path = _Path(risky.float(), safe.float())
    room = budget.float()
    below, above = torch.zeros_like(room), torch.ones_like(room)
    free = path.at(above)[1] <= room - MARGIN
    best, theta = torch.zeros_like(room), room / (room + 1.0)
    target = (room - MARGIN).clamp_min(0.0)
    for _ in range(STEPS):
        _, divergence, slope = path.at(theta)
        fits = divergence <= target
        below, above = torch.where(fits, theta, below), torch.where(fits, above, theta)
        best = torch.where(fits, divergence, best)
        if bool((free | (best >= target - MARGIN)).all()):
            break
        step = theta - (divergence - target + MARGIN / 2) / slope.clamp_min(1e-30)
        theta = torch.where((step > below) & (step < above), step, (below + above) / 2)
    path = _Path(risky, safe)
    chosen = torch.where(free, torch.ones_like(below), below).double()
    total, divergence, slope = path.at(chosen)
    # What float32 took to be within the budget may not be; the safe end is.
    outside = divergence > budget
    chosen, total, divergence = (torch.where(outside, 0.0, each) for each in (chosen, total, divergence))
    point, cost = chosen, divergence
    for _ in range(POLISHING):  # steps overshoot at first: the divergence is convex
        if bool((free | (divergence >= budget - 2 * TINY)).all()):
            break
        point = (point + (budget - TINY - cost) / slope.clamp_min(1e-300)).clamp(0.0, 1.0)
        of_point, cost, slope = path.at(point)
        better = (cost <= budget) & (cost > divergence)
        chosen, total, divergence = (
            torch.where(better, new, old)
            for new, old in ((point, chosen), (of_point, total), (cost, divergence))
        )
    safely = chosen == 0.0
    log_q = torch.where(safely[:, None], safe, path.scores(chosen) - total[:, None])
    return log_q, torch.where(safely, 0.0, divergence).clamp_min_(0.0)


class _Path:
    """Between rows of log-probabilities ``[num_rows, vocab]``, but for its safe end: what one rules out is out."""

    def __init__(self, risky: torch.Tensor, safe: torch.Tensor) -> None:
        inside = (risky > -torch.inf) & (safe > -torch.inf)
        self._ratio = torch.where(inside, risky - safe, 0.0)
        self._square = self._ratio.square()
        self._safe = torch.where(inside, safe, -torch.inf)

    def scores(self, theta: torch.Tensor) -> torch.Tensor:
        """Logarithms, up to the normalizer's, at ``[num_rows]`` points."""
        return torch.addcmul(self._safe, theta[:, None], self._ratio)

    def at(self, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log of the normalizer, divergence from the safe end and its slope, ``[num_rows]``."""
        scores = self.scores(theta)
        total = scores.logsumexp(1)
        q = scores.sub_(total[:, None]).exp_()
        mean = torch.linalg.vecdot(q, self._ratio)
        variance = torch.linalg.vecdot(q, self._square) - mean.square()
        return total, theta * mean - total, theta * variance
