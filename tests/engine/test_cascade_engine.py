# SPDX-License-Identifier: Apache-2.0
"""A draft model with a drafter of its own: the chains are those without, for fewer passes, and output is the target's.

That its KV is right through preemption, chunked prompts and shared prefixes is tested in `test_companion`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import engine
from helpers import assert_same_outputs, generate, long_and_short_prompts
from vllm import SamplingParams

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def cascade(slice_dir: str) -> Iterator[Any]:
    """The first of the target's two layers drafts."""
    yield from engine(
        slice_dir,
        {
            "method": "specdec_pp",
            "model": "self",
            "self_layers": 1,
            "num_speculative_tokens": 8,
            "max_depth": 8,
            "stop_threshold": 1.0,
            "budget": "fixed",
            "cascade": "token_recycling",
        },
        max_num_batched_tokens=192,
    )


def watch(worker: Any, guesses: int) -> None:
    """Keep all trees from now on; what is read ahead, of nothing that was read before."""
    from vllm_ext.proposers.cascade import Cascade

    drafts = worker.model_runner.drafter.model_drafts
    passes = drafts.passes
    passes.cascade = Cascade(
        worker.model_runner.model_config.get_vocab_size(), guesses, 16, passes._places_left
    )
    if not hasattr(worker, "inner"):
        worker.inner = drafts.propose

    def propose(runner: Any, requests: Any, *args: Any) -> Any:
        trees = worker.inner(runner, requests, *args)
        worker.trees += [tree.tokens.tolist() for tree in trees]
        for request in requests:
            if request.has_room:  # target, draft, the draft's drafter: all are back at what was committed
                name = request.request_id
                assert len(request.tokens) == passes._known[name] == passes.cascade._recorded[name]
        return trees

    drafts.propose = propose
    worker.trees = []


def kept(worker: Any) -> Any:
    """The trees, and the counters."""
    return worker.trees, worker.model_runner.drafter.counters.totals()


def play(llm: Any, guesses: int, inputs: Any, params: Any) -> tuple[Any, Any, int, int]:
    """Answers, trees, passes, accepted tokens."""
    llm.reset_prefix_cache()
    llm.collective_rpc(watch, args=(guesses,))
    ((_, before),) = llm.collective_rpc(kept)
    answers = generate(llm, inputs, params)
    ((trees, after),) = llm.collective_rpc(kept)
    assert after["fallbacks:proposer_error"] == 0
    passes, accepted = (after[name] - before[name] for name in ("spec_draft_passes", "spec_accepted_tokens"))
    return answers, trees, passes, accepted


def test_chains_are_the_same_for_fewer_passes(plain_slice_llm: Any, cascade: Any) -> None:
    """One request after the other, greedy and with a seed; all trees of all steps."""
    inputs = long_and_short_prompts(plain_slice_llm, 4)
    params = [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=5, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, presence_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    ]
    plain = [
        generate(plain_slice_llm, [text], [param])[0] for text, param in zip(inputs, params, strict=True)
    ]
    trees, passes, accepted = [], [], []
    for guesses in (0, 6):
        parts = [play(cascade, guesses, [text], [param]) for text, param in zip(inputs, params, strict=True)]
        assert_same_outputs(plain, [part[0][0] for part in parts])
        trees.append([part[1] for part in parts])
        passes.append(sum(part[2] for part in parts))
        accepted.append(sum(part[3] for part in parts))
    assert trees[0] == trees[1]
    assert accepted[0] == accepted[1] > 0
    assert passes[0] > 1.2 * passes[1]


def test_a_mixed_batch(plain_slice_llm: Any, cascade: Any) -> None:
    """Some are read as prompts while others are read ahead of; drawn ones beside them."""
    inputs = long_and_short_prompts(plain_slice_llm, 12)
    params = [SamplingParams(temperature=0, max_tokens=20 + 9 * (i % 4), ignore_eos=True) for i in range(12)]
    expected = generate(plain_slice_llm, inputs, params)
    drawn = [SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)] * 6
    found = generate(cascade, inputs + inputs[:6], params + drawn)
    assert_same_outputs(expected, found[:12])
    (totals,) = cascade.collective_rpc("vllm_ext_counters")
    assert totals["fallbacks:proposer_error"] == 0
