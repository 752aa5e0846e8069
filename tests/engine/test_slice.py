# SPDX-License-Identifier: Apache-2.0
"""On two layers of the model, which compile and sample fast: torch.compile, and sampling without seeds.

Compiled code reuses buffers and has other kernels; trees must be as lossless with it as in eager mode.

Sampling without seeds is compared with plain vLLM's own samples by chi-squared. The bound: under the null hypothesis
the test fails once in 10,000 runs. Its power is shown by a mutation, a walk that takes the first draft wherever
there is one, which must be found at one in a million.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from conftest import ENGINE_OPTIONS
from helpers import assert_same_outputs, own_prompts
from scipy.stats import chi2, chi2_contingency
from vllm import SamplingParams

pytestmark = pytest.mark.engine


def num_threads(worker: Any) -> int:
    import torch

    return torch.get_num_threads()


@pytest.fixture(scope="module")
def llms(slice_dir: str, tested_method: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Plain in eager mode; trees compiled, and by two threads, which both attend."""
    from vllm import LLM

    plain = LLM(slice_dir, **ENGINE_OPTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
        trees = LLM(slice_dir, speculative_config=tested_method, **{**ENGINE_OPTIONS, "enforce_eager": False})
    assert trees.collective_rpc(num_threads) == [2]
    engines = plain, trees
    yield engines
    for llm in engines:
        llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("batch_size", [1, 4])
def test_compiled_engine_is_lossless(llms: tuple[Any, Any], batch_size: int, enough: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    results = []
    for llm in llms:
        answers = []
        for start in range(0, 4, batch_size):
            messages = [
                [{"role": "user", "content": text}] for text in own_prompts()[start : start + batch_size]
            ]
            answers += [list(o.outputs[0].token_ids) for o in llm.chat(messages, params, use_tqdm=False)]
        results.append(answers)
    assert_same_outputs(*results)
    (totals,) = llms[1].collective_rpc("vllm_ext_counters")
    # Two layers answer nothing that a corpus would have.
    assert totals["spec_accepted_tokens" if enough == 1 else "spec_draft_tokens"] > 50


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


def prefer_drafts(worker: Any) -> None:
    """The mutation: what is drawn is replaced by the first child."""
    from vllm_ext import v1_sampler

    module: Any = v1_sampler
    worker.honest_walk = honest = module.walk

    def walk(row_start: Any, tokens: Any, parents: Any, draw: Any) -> Any:
        def biased(
            requests: Sequence[int], rows: Sequence[int], emitted: Sequence[Sequence[int]]
        ) -> list[int]:
            drawn = list(draw(requests, rows, emitted))
            for i, (request, row) in enumerate(zip(requests, rows, strict=True)):
                start, end = row_start[request], row_start[request + 1]
                children = tokens[start:end][parents[start:end] == row]
                if len(children):
                    drawn[i] = int(children[0])
            return drawn

        return honest(row_start, tokens, parents, biased)

    module.walk = walk


def be_honest(worker: Any) -> None:
    from vllm_ext import v1_sampler

    module: Any = v1_sampler
    module.walk = worker.honest_walk


def test_sampled_tokens_have_plains_distribution(llms: tuple[Any, Any]) -> None:
    plain, trees = llms
    expected = sample(plain, SAMPLES)
    actual = sample(trees, SAMPLES)
    assert min(p_value(a, b) for a, b in zip(expected, actual, strict=True)) > 1e-4 / PROMPTS
    trees.collective_rpc(prefer_drafts)
    try:
        biased = sample(trees, SAMPLES)
    finally:
        trees.collective_rpc(be_honest)
    assert min(p_value(a, b) for a, b in zip(expected, biased, strict=True)) < 1e-6
