# SPDX-License-Identifier: Apache-2.0
"""The figures of ``vllm-ext bench`` over HTTP, from replies and their times. No vLLM in here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from statistics import median
from typing import Any

from vllm_ext.bench.load import Load, Reply, Turn
from vllm_ext.bench.stats import number, ratio

PERCENTILES = (50, 90, 99)
LIMITS = ("ttft", "tpot", "e2el")  # as `vllm bench serve --goodput` has them


def percentile(values: Sequence[float], percent: float) -> float | None:
    """By linear interpolation, as numpy; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low, high = int(place), ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(
    label: str,
    load: Load,
    rounds: Sequence[Sequence[Turn]],
    plain: Sequence[Sequence[Turn]],
    limits_ms: dict[str, float],
    compared: bool,
) -> dict[str, Any]:
    """One row: a method under one load.

    Args:
        label: the method's.
        load: the load.
        rounds: its turns, by round.
        plain: plain's turns of the same rounds.
        limits_ms: the most a good request takes; empty: goodput is not asked for.
        compared: whether answers should be plain's.
    """
    turns = [turn for of_round in rounds for turn in of_round]
    replies = [reply for turn in turns for reply in turn.replies]
    rates = [_tokens_per_s(of_round) for of_round in rounds]
    # At a rate, a server also waits for requests.
    step_s, plain_step_s = (
        _step_s([turn for of_round in of_method for turn in of_round]) if load.rate is None else None
        for of_method in (rounds, plain)
    )
    counted = {name: sum(turn.counted[name] for turn in turns) for name in turns[0].counted}
    gaps = sum(len(reply.gaps_s) for reply in replies)
    texts = {reply.prompt: reply.text for of_round in plain for turn in of_round for reply in turn.replies}
    wall_s = sum(turn.wall_s for turn in turns)
    good = sum(_is_good(reply, limits_ms) for reply in replies)
    return {
        "load": str(load),
        "label": label,
        "concurrency": load.concurrency,
        "request_rate": load.rate,
        "requests": len(replies),
        "errors": [error for turn in turns for error in turn.errors],
        "input_tokens": sum(reply.prompt_tokens for reply in replies),
        "output_tokens": sum(reply.num_tokens for reply in replies),
        "wall_s": wall_s,
        "output_tokens_per_s": median(rates) if rates else None,
        "output_tokens_per_s_rounds": rates,
        "requests_per_s": ratio(len(replies), wall_s),
        "speedup_vs_plain": _speedup(rates, [_tokens_per_s(of_round) for of_round in plain]),
        "speedup_vs_plain_rounds": [
            ratio(rate, _tokens_per_s(of_round)) for rate, of_round in zip(rates, plain, strict=True)
        ],
        **_times("ttft", [reply.ttft_s for reply in replies]),
        **_times("tpot", [reply.tpot_s for reply in replies if reply.tpot_s is not None]),
        **_times("itl", [gap for reply in replies for gap in reply.gaps_s]),
        **_times("e2el", [reply.latency_s for reply in replies]),
        "goodput_limits_ms": limits_ms,
        "goodput_share": ratio(good, len(replies)) if limits_ms else None,
        "goodput_requests_per_s": ratio(good, wall_s) if limits_ms else None,
        "tokens_per_step": ratio(sum(reply.num_tokens - 1 for reply in replies), gaps),
        "acceptance": ratio(counted["accepted_tokens"], counted["draft_tokens"]),
        "draft_tokens_per_request_step": ratio(counted["draft_tokens"], gaps),
        "engine_steps": counted["engine_steps"],
        "step_ms": None if step_s is None else step_s * 1000,
        "target_efficiency": ratio(plain_step_s, step_s),
        "same_as_plain": sum(texts.get(reply.prompt) == reply.text for reply in replies)
        if compared
        else None,
    }


def _times(name: str, values_s: Sequence[float]) -> dict[str, float | None]:
    found = {f"{name}_p{percent}_ms": percentile(values_s, percent) for percent in PERCENTILES}
    mean = ratio(sum(values_s), len(values_s))
    return {
        key: None if value is None else value * 1000
        for key, value in (found | {f"{name}_mean_ms": mean}).items()
    }


def _tokens_per_s(turns: Iterable[Turn]) -> float:
    turns = list(turns)
    tokens = sum(reply.num_tokens for turn in turns for reply in turn.replies)
    return tokens / sum(turn.wall_s for turn in turns)


def _speedup(rates: Sequence[float], plain: Sequence[float]) -> float | None:
    found = [rate / base for rate, base in zip(rates, plain, strict=True) if base]
    return median(found) if found else None


def _step_s(turns: Sequence[Turn]) -> float | None:
    """Seconds of an engine step, prompts' steps among them."""
    return ratio(sum(turn.wall_s for turn in turns), sum(turn.counted["engine_steps"] for turn in turns))


def _is_good(reply: Reply, limits_ms: dict[str, float]) -> bool:
    found = {"ttft": reply.ttft_s, "tpot": reply.tpot_s or 0.0, "e2el": reply.latency_s}
    return all(found[name] * 1000 <= limit for name, limit in limits_ms.items())


def latency(row: dict[str, Any], name: str) -> str:
    """Milliseconds, with more digits for few."""
    values = [row[f"{name}_p{percent}_ms"] for percent in PERCENTILES]
    return " / ".join(number(value, ".1f" if value is not None and value < 10 else ".0f") for value in values)


def same(row: dict[str, Any]) -> str:
    """How many answers are plain's."""
    return "-" if row["same_as_plain"] is None else f"{row['same_as_plain']}/{row['requests']}"
