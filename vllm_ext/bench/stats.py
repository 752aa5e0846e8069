# SPDX-License-Identifier: Apache-2.0
"""The figures of ``vllm-ext bench``, from answers and their times. No vLLM in here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from statistics import median
from typing import Any

from vllm_ext.bench.settings import Method

# How far below the top log-probability a token may lie and still be a tie: about what another order
# of summation changes in a forward pass of 16 bits. float32 gets no such room.
TIE_TOLERANCE = {"bfloat16": 0.25, "float16": 0.25}
# bfloat16 logits of 16 to 32 lie 1/8 apart, so gaps of exactly 0.25 are common, and the softmax rounds them.
GAP_ROUNDING = 1e-4


@dataclass
class Answer:
    """One request, as seen by the client of the engine."""

    prompt: int
    category: str
    submitted_s: float
    token_ids: list[int]
    step_times_s: list[float]  # of each engine step that gave it tokens

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first, which is the prefill's."""
        return len(self.token_ids) - 1

    @property
    def decode_steps(self) -> int:
        """Steps after the first."""
        return len(self.step_times_s) - 1

    @property
    def decode_s(self) -> float:
        """First token to last."""
        return self.step_times_s[-1] - self.step_times_s[0]


@dataclass
class Round:
    """One method's answers to one round's prompts."""

    answers: list[Answer]
    wall_s: float
    num_draft_tokens: int
    draft_s: float | None  # None: this runner cannot be timed

    @property
    def decode_s(self) -> float:
        """Time during which at least one request was between its first and last token."""
        return union_s([(a.step_times_s[0], a.step_times_s[-1]) for a in self.answers])

    @property
    def decode_tokens_per_s(self) -> float | None:
        """None when no answer has a second token."""
        return ratio(sum(answer.decode_tokens for answer in self.answers), self.decode_s)

    @property
    def e2e_tokens_per_s(self) -> float | None:
        """Prefill and queueing included."""
        return ratio(sum(len(answer.token_ids) for answer in self.answers), self.wall_s)


def union_s(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, -inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def number(value: float | None, form: str, unit: str = "") -> str:
    """A figure, or a dash for none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """None when either is missing or there is nothing to divide by."""
    return numerator / denominator if numerator is not None and denominator else None


def _median(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return median(present) if present else None


@dataclass(frozen=True)
class Divergence:
    """The first place where a method's answer leaves plain's, and what plain thinks of it there."""

    prompt: int
    source: str
    position: int  # in the answer
    plain_token: int | None  # None: the answer had ended
    method_token: int | None
    preferred_token: int | None  # plain's first choice when asked again; None: not asked
    gap: float  # log-probability of the first choice minus that of the method's token
    top_gap: float  # first choice minus second

    def is_tie(self, tolerance: float) -> bool:
        """Whether plain itself hardly tells the tokens apart. Ending early or late never is one."""
        if self.plain_token is None or self.method_token is None:
            return False
        tolerance += GAP_ROUNDING if tolerance else 0.0
        return self.top_gap <= tolerance and self.gap <= tolerance

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt} ({self.source}), position {self.position}: "
            f"plain {self.plain_token}, method {self.method_token}; asked again plain prefers "
            f"{self.preferred_token}, gap {self.gap:.3f}, first to second {self.top_gap:.3f}"
        )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Position of the first differing token; the shorter length for a prefix; None when equal."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def summarise(
    method: Method,
    batch_size: int,
    rounds: Sequence[Round],
    plain_rounds: Sequence[Round],
    divergences: Sequence[Divergence] | None,
    tolerance: float,
) -> dict[str, Any]:
    """One entry of the JSON's ``runs``. Ratios pair rounds of the same prompts. Without divergences: not compared."""
    answers = [answer for round_ in rounds for answer in round_.answers]
    pairs = list(zip(rounds, plain_rounds, strict=True))
    speeds = [round_.decode_tokens_per_s for round_ in rounds]
    speedups = [ratio(ours.decode_tokens_per_s, plain.decode_tokens_per_s) for ours, plain in pairs]
    e2e_speeds = [round_.e2e_tokens_per_s for round_ in rounds]
    num_steps = [sum(answer.decode_steps for answer in round_.answers) for round_ in rounds]
    draft_s = [round_.draft_s for round_ in rounds if round_.draft_s is not None]
    compared = divergences is not None
    found = divergences or ()
    wrong = [divergence for divergence in found if not divergence.is_tie(tolerance)]
    return {
        "method": method.name,
        "label": method.label,
        "options": method.options,
        "batch_size": batch_size,
        "decode_tokens_per_s": _median(speeds),
        "decode_tokens_per_s_rounds": speeds,
        "speedup_vs_plain": _median(speedups),
        "speedup_vs_plain_rounds": speedups,
        "e2e_tokens_per_s": _median(e2e_speeds),
        "e2e_tokens_per_s_rounds": e2e_speeds,
        "e2e_speedup_vs_plain": _median(
            ratio(ours.e2e_tokens_per_s, plain.e2e_tokens_per_s) for ours, plain in pairs
        ),
        "ttft_ms": 1000 * median(answer.step_times_s[0] - answer.submitted_s for answer in answers),
        "tokens_per_step": _tokens_per_step(answers),
        "tokens_per_step_rounds": [_tokens_per_step(round_.answers) for round_ in rounds],
        "draft_tokens_per_step": ratio(sum(r.num_draft_tokens for r in rounds), sum(num_steps)),
        "draft_tokens_per_step_rounds": [
            ratio(round_.num_draft_tokens, steps) for round_, steps in zip(rounds, num_steps, strict=True)
        ],
        "draft_time_share": ratio(sum(draft_s), sum(round_.decode_s for round_ in rounds))
        if len(draft_s) == len(rounds)
        else None,
        "identical": len(answers) - len(found) if compared else None,
        "tie_divergences": len(found) - len(wrong) if compared else None,
        "wrong_divergences": len(wrong) if compared else None,
        "wrong": [str(divergence) for divergence in wrong],
        "prompts": len(answers),
        "category": {
            category: _category(_only(rounds, category), _only(plain_rounds, category))
            for category in sorted({answer.category for answer in answers})
        },
    }


def _only(rounds: Sequence[Round], category: str) -> list[list[Answer]]:
    return [[answer for answer in round_.answers if answer.category == category] for round_ in rounds]


def _category(rounds: Sequence[list[Answer]], plain_rounds: Sequence[list[Answer]]) -> dict[str, Any]:
    """Figures over all rounds' answers together, and of each round: None where it has no such prompt."""
    answers, plain_answers = list(chain(*rounds)), list(chain(*plain_rounds))
    speed, speeds = _request_speed(answers), [_request_speed(round_) for round_ in rounds]
    return {
        "prompts": len(answers),
        "decode_tokens_per_s": speed,
        "decode_tokens_per_s_rounds": speeds,
        "speedup_vs_plain": ratio(speed, _request_speed(plain_answers)),
        "speedup_vs_plain_rounds": [
            ratio(ours, _request_speed(plain)) for ours, plain in zip(speeds, plain_rounds, strict=True)
        ],
        "tokens_per_step": _tokens_per_step(answers),
        "tokens_per_step_rounds": [_tokens_per_step(round_) for round_ in rounds],
    }


def _request_speed(answers: Sequence[Answer]) -> float | None:
    """Per request: requests of other categories in the batch cannot be told apart in the union."""
    return ratio(sum(a.decode_tokens for a in answers), sum(a.decode_s for a in answers))


def _tokens_per_step(answers: Sequence[Answer]) -> float | None:
    return ratio(sum(a.decode_tokens for a in answers), sum(a.decode_steps for a in answers))
