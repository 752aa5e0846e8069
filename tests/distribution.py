# SPDX-License-Identifier: Apache-2.0
"""Samples of two engines compared by chi-squared: a bound of 1e-4 fails once in 10,000 runs of two that are alike."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import numpy as np
from helpers import own_prompts
from scipy.stats import chi2, chi2_contingency
from vllm import SamplingParams

SAMPLES = 300
PROMPTS = 2
POSITIONS = (1, 2, 3, 4)  # the first token comes with the prompt, before any draft
# Of engines that are sampled: prompts are shorter than the blocks that vLLM takes on a CPU, and are to be read once.
BLOCK_SIZE = 32


# The first is that of mutations: the flatter the distributions, the more often a draft is wrong.
TEMPERATURES = (2.0, 1.0, 0.7)


def sample(
    llm: Any, count: int, temperature: float = TEMPERATURES[0], xargs: dict[str, Any] | None = None
) -> list[Counter[tuple[int, int]]]:
    """For each prompt how often each token came at each position, as (position, token)."""
    params = SamplingParams(
        temperature=temperature,
        top_k=8,
        n=count,
        max_tokens=1 + max(POSITIONS),
        ignore_eos=True,
        extra_args=xargs,
    )
    messages = [[{"role": "user", "content": text}] for text in own_prompts()[:PROMPTS]]
    result = []
    for output in llm.chat(messages, params, use_tqdm=False):
        counts: Counter[tuple[int, int]] = Counter()
        for completion in output.outputs:
            tokens = completion.token_ids
            counts.update((position, tokens[position]) for position in POSITIONS)
        result.append(counts)
    return result


@functools.cache
def expected(plain: Any, temperature: float = TEMPERATURES[0]) -> list[Counter[tuple[int, int]]]:
    """Samples of an engine that others are compared with: the same for all of them."""
    return sample(plain, SAMPLES, temperature)


def least_p_value(plain: Any, llm: Any, xargs: dict[str, Any] | None = None) -> float:
    """Of two engines over all prompts and `TEMPERATURES`, times how many they are."""
    found = [
        p_value(a, b)
        for temperature in TEMPERATURES
        for a, b in zip(expected(plain, temperature), sample(llm, SAMPLES, temperature, xargs), strict=True)
    ]
    return len(found) * min(found)


def p_value(left: Counter[tuple[int, int]], right: Counter[tuple[int, int]]) -> float:
    """Two-sample chi-squared over all positions; cells expected to hold fewer than five are taken together."""
    statistic, freedom = 0.0, 0
    for position in POSITIONS:
        cells = sorted({cell for cell in left | right if cell[0] == position})
        table = np.array([[left[cell] for cell in cells], [right[cell] for cell in cells]])
        rare = table.sum(axis=0) < 10
        table = np.column_stack([table[:, ~rare], table[:, rare].sum(axis=1)])
        table = table[:, table.sum(axis=0) > 0]
        if table.shape[1] > 1:
            found = chi2_contingency(table, correction=False)
            statistic, freedom = statistic + found.statistic, freedom + found.dof
    return float(chi2.sf(statistic, freedom))


def distort(worker: Any) -> None:
    """Sent to the worker, a mutation: accept whatever was drawn."""
    from vllm_ext.kernels.chance import RandomChance

    sampler = worker.model_runner.rejection_sampler._multi_draft_sampler

    class Credulous(RandomChance):
        def accepts(self, numerator: float, denominator: float) -> bool:
            return True

    sampler._chance = Credulous(sampler._chance._generator)
