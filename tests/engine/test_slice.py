# SPDX-License-Identifier: Apache-2.0
"""On two layers of the model, which compile and sample fast: torch.compile, and sampling without seeds.

Compiled code reuses buffers and has other kernels; trees must be as lossless with it as in eager mode.

Sampling without seeds is compared with plain vLLM's own samples (`distribution`). The power of that is shown by a
mutation, a walk that takes the first draft wherever there is one, which must be found at one in a million.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_clover
import tiny_eagle
import tiny_heads
import tiny_prompts
from conftest import engine
from distribution import BLOCK_SIZE, SAMPLES, expected, least_p_value, p_value, sample
from helpers import assert_same_outputs, own_prompts
from vllm import SamplingParams

from vllm_ext.data.datastore_build import build

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.engine


def num_threads(worker: Any) -> int:
    import torch

    return torch.get_num_threads()


@pytest.fixture(scope="module")
def method(
    slice_dir: str, tested_method: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The tested one; corpus and heads are the slice's, whose tokenizer has fewer tokens than the model's."""
    kinds = {
        "clover_tree": tiny_clover,
        "eagle_tree": tiny_eagle,
        "medusa_tree": tiny_heads,
        "ppd": tiny_prompts,
    }
    if kind := kinds.get(tested_method["method"]):
        return {**tested_method, "model": kind.random(tmp_path_factory.mktemp("heads"), Path(slice_dir))}
    if "datastore" not in tested_method:
        return tested_method
    store = tmp_path_factory.mktemp("corpus") / "store"
    build([DOCS], store, slice_dir, "text", False, lambda *_: None, include=["*.md"])
    return {**tested_method, "datastore": str(store)}


@pytest.fixture(scope="module")
def llms(plain_slice_llm: Any, slice_dir: str, method: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Plain in eager mode; trees compiled, and by two threads, which both attend."""
    engines = engine(
        slice_dir,
        method,
        own_core=True,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0-1"},
        enforce_eager=False,
        block_size=BLOCK_SIZE,
    )
    trees = next(engines)
    assert trees.collective_rpc(num_threads) == [2]
    yield plain_slice_llm, trees
    next(engines, None)


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


def prefer_drafts(worker: Any) -> None:
    """The mutation: what is drawn is replaced by the first child."""
    from vllm_ext.engine.v1 import rejection_sampler

    module: Any = rejection_sampler
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
    from vllm_ext.engine.v1 import rejection_sampler

    module: Any = rejection_sampler
    module.walk = worker.honest_walk


def test_sampled_tokens_have_plains_distribution(llms: tuple[Any, Any]) -> None:
    plain, trees = llms
    assert least_p_value(plain, trees) > 1e-4
    trees.collective_rpc(prefer_drafts)
    try:
        biased = sample(trees, SAMPLES)
    finally:
        trees.collective_rpc(be_honest)
    assert min(p_value(a, b) for a, b in zip(expected(plain), biased, strict=True)) < 1e-6
