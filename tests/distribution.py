# SPDX-License-Identifier: Apache-2.0
"""Samples of two engines compared by chi-squared: a bound of 1e-4 fails once in 10,000 runs of two that are alike."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from helpers import own_prompts
from scipy.stats import chi2, chi2_contingency
from vllm import SamplingParams

SAMPLES = 300
PROMPTS = 2
POSITIONS = (1, 2, 3, 4)  # the first token comes with the prompt, before any draft


def sample(llm: Any, count: int) -> list[Counter[tuple[int, int]]]:
    """For each prompt how often each token came at each position, as (position, token)."""
    params = SamplingParams(temperature=2.0, top_k=8, n=count, max_tokens=6, ignore_eos=True)
    messages = [[{"role": "user", "content": text}] for text in own_prompts()[:PROMPTS]]
    result = []
    for output in llm.chat(messages, params, use_tqdm=False):
        counts: Counter[tuple[int, int]] = Counter()
        for completion in output.outputs:
            tokens = completion.token_ids
            counts.update((position, tokens[position]) for position in POSITIONS)
        result.append(counts)
    return result


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
