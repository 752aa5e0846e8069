# SPDX-License-Identifier: Apache-2.0
"""What engines that draft with heads must show, whatever the heads are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tiny_clover
import tiny_eagle
import tiny_heads
import torch
from conftest import engine
from distribution import SAMPLES, distort, expected, least_p_value, p_value, sample
from helpers import assert_same_outputs, generate, long_and_short_prompts, preemptions
from tiny_heads import KINDS, OPTIONS
from v2_requests import counters
from vllm import SamplingParams

from vllm_ext.proposers.registry import load_method


def options_of(method: str, target: str, folder: Path) -> dict[str, Any]:
    """A method with what it needs: random heads of its kind in a folder, or what the registry says.

    ``hybrid+METHOD`` is `beside_tables` of these heads.
    """
    if method.startswith("hybrid+"):
        return beside_tables(options_of(method.removeprefix("hybrid+"), target, folder))
    options: dict[str, Any] = {"method": method, **load_method(method).tested_with}
    match method:
        case "eagle_tree":
            options["model"] = tiny_eagle.random(folder / "head", Path(target))
        case "clover_tree":
            options["model"] = tiny_clover.random(folder / "heads", Path(target))
        case "medusa_tree":
            options["model"] = tiny_heads.random(folder / "heads", Path(target))
    return options


# Of one chunk and of several.
PROMPTS: list[list[int]] = [[3], list(range(5, 60)), [9] * 130, [700, 20]]


def along(after: torch.Tensor) -> list[list[int]]:
    """Prompts in which each token is followed by its successor: where more than the last token says what comes."""
    prompts = []
    for token, length in ((3, 3), (5, 55), (9, 130), (700, 4)):
        prompts.append([token])
        while len(prompts[-1]) < length:
            prompts[-1].append(int(after[prompts[-1][-1]]))
    return prompts


def assert_cycle(prompts: Sequence[list[int]], answers: Sequence[Sequence[int]], after: torch.Tensor) -> None:
    """Each token is followed by its successor: `tiny_heads.successors`."""
    for prompt, answer in zip(prompts, answers, strict=True):
        token = prompt[-1]
        for each in answer:
            token = int(after[token])
            assert each == token


def assert_knows_everything(
    folder: str,
    after: torch.Tensor,
    config: dict[str, Any],
    nodes: int,
    late: int,
    prompts: list[list[int]] = PROMPTS,
    seen: Callable[[Any], None] = lambda llm: None,
    **options: Any,
) -> None:
    """All that heads draft is accepted, where they know the successors; of those that are late nothing is.

    Args:
        folder: of `tiny_heads.successors`.
        after: its successors.
        config: vLLM's ``speculative_config``, with chains of so many nodes.
        nodes: of a draft.
        late: 0 for heads that know them.
        prompts: four of them.
        seen: is called with the engine.
        options: of it.
    """
    params = SamplingParams(temperature=0, max_tokens=51, ignore_eos=True)
    for llm in engine(folder, config, **OPTIONS, max_num_batched_tokens=64, **options):
        seen(llm)
        answers = generate(llm, prompts, [params] * 4)
        totals = counters(llm)
    assert_cycle(prompts, answers, after)
    drafted, accepted, steps = (
        totals[f"spec_{name}"] for name in ("draft_tokens", "accepted_tokens", "steps")
    )
    assert totals["fallbacks:proposer_error"] == totals["fallbacks:hidden_states_missing"] == 0
    if late:
        assert accepted == 0 < drafted
    else:
        # 50 tokens behind the prompt's first, each of so many nodes with one of the target's own.
        assert drafted == accepted == 4 * (50 - 50 // (nodes + 1))
        assert steps == 4 * (1 + 50 // (nodes + 1))


def fused(config: dict[str, Any], *others: str) -> dict[str, Any]:
    """A method of heads as a drafter of a hybrid, before others."""
    head = {"method": config["method"], "model": config["model"]}
    rest = {name: value for name, value in config.items() if name not in head}
    return {**rest, "method": "hybrid", "drafters": [head, *others]}


def beside_tables(config: dict[str, Any]) -> dict[str, Any]:
    """In the hybrid that drafts on the device on V2."""
    return fused(config, "token_recycling", "suffix_tree")


GREEDY = [SamplingParams(temperature=0, max_tokens=60 + 9 * i, ignore_eos=True) for i in range(10)]


@functools.cache
def plains(plain: Any) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Its answers to greedy requests all at once and to those of `KINDS` alone: the same for all heads."""
    inputs = long_and_short_prompts(plain, 10)
    # One at a time: plain vLLM stops at a seeded request whose prompt comes in chunks.
    alone = [generate(plain, [prompt], [kind]) for prompt, kind in zip(inputs, KINDS, strict=False)]
    return generate(plain, inputs, GREEDY), alone


def assert_plains(plain: Any, drafting: Any) -> None:
    """Greedy and seeded output is plain's, through preemption and chunks; some again over cached prefixes."""
    wanted, alone = plains(plain)
    inputs = long_and_short_prompts(plain, 10)
    before = preemptions(drafting)
    assert_same_outputs(wanted, generate(drafting, inputs, GREEDY))
    assert preemptions(drafting) > before
    assert_same_outputs(wanted[:4], generate(drafting, inputs[:4], GREEDY[:4]))
    for prompt, kind, right in zip(inputs, KINDS, alone, strict=False):
        assert_same_outputs(right, generate(drafting, [prompt], [kind]))


def assert_plains_distribution(plain: Any, drafting: Any) -> None:
    """Of drawn trees; and a draft that is verified as if it were another has not."""
    before = counters(drafting)["spec_accepted_tokens"]
    assert least_p_value(plain, drafting) > 1e-4
    totals = counters(drafting)
    assert totals["fallbacks:proposer_error"] == 0
    assert totals["spec_accepted_tokens"] > before + 100
    # The mutation: children that were drawn are verified as if the draft were another.
    drafting.collective_rpc(distort)
    biased = sample(drafting, SAMPLES)
    assert min(p_value(a, b) for a, b in zip(expected(plain), biased, strict=True)) < 1e-6
