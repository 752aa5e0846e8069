# SPDX-License-Identifier: Apache-2.0
"""Entropy-adaptive decoding in the engine: what the draft model is sure of is taken, where a request asks for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import engine
from distribution import BLOCK_SIZE, SAMPLES, expected, least_p_value, p_value, sample
from helpers import assert_same_outputs, counted, generate, long_and_short_prompts
from slices import VOCABULARY
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.engine

ENTROPY = {"verify": "entropy"}
NEVER = {**ENTROPY, "verify_entropy": 0.0}
ALWAYS = {**ENTROPY, "verify_entropy": 100.0}
DEPTH = 5
DRAFT = {
    "model": "self",
    "self_layers": 1,
    "num_speculative_tokens": DEPTH,
    "max_depth": DEPTH,
    "budget": "fixed",
}


@pytest.fixture(scope="module", params=["dyspec", "specdec_pp"])
def drafting(slice_dir: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server that says nothing of verification; the target's first layer drafts."""
    yield from engine(slice_dir, {"method": request.param, **DRAFT}, block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def lossy(slice_dir: str) -> Iterator[Any]:
    """A server that takes all that its draft says."""
    yield from engine(slice_dir, {"method": "dyspec", **DRAFT, **ALWAYS}, block_size=BLOCK_SIZE)


def asking(xargs: dict[str, Any] | None, temperature: float = 0.0, **params: Any) -> SamplingParams:
    """A request without a seed, greedy if it says nothing else."""
    return SamplingParams(
        **{"temperature": temperature, "max_tokens": 31, "ignore_eos": True, **params}, extra_args=xargs
    )


def test_where_it_is_never_sure_greedy_answers_are_plains(plain_slice_llm: Any, drafting: Any) -> None:
    """And where it is, they are not: the mutation is the method."""
    inputs = long_and_short_prompts(plain_slice_llm, 6)
    wanted = generate(plain_slice_llm, inputs, [asking(None)] * 6)
    found, counts = counted(drafting, inputs, [asking(NEVER)] * 6)
    assert_same_outputs(wanted, found)
    assert counts["spec_entropy_tokens"] == 0
    taken, counts = counted(drafting, inputs, [asking(ALWAYS)] * 6)
    assert counts["spec_entropy_tokens"] > 60
    assert sum(a != b for a, b in zip(wanted, taken, strict=True)) >= 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_it_is_always_sure_all_of_each_chain_is_taken(drafting: Any, temperature: float) -> None:
    """31 tokens: the prompt's step says one, and each step after it a chain of 5 and the target's own."""
    inputs = long_and_short_prompts(drafting, 4)
    found, counts = counted(drafting, inputs, [asking(ALWAYS, temperature)] * 4)
    assert [len(tokens) for tokens in found] == [31] * 4
    assert counts["spec_steps"] == 4 * (1 + 30 // (DEPTH + 1))
    assert counts["spec_entropy_tokens"] == counts["spec_accepted_tokens"] == 4 * 30 * DEPTH // (DEPTH + 1)
    assert counts["fallbacks:proposer_error"] == 0


def test_the_surer_it_has_to_be_the_less_is_taken(drafting: Any) -> None:
    inputs = long_and_short_prompts(drafting, 8)
    taken, steps = [], []
    for nats in (0.0, 1.0, 100.0):
        _, counts = counted(drafting, inputs, [asking({**ENTROPY, "verify_entropy": nats})] * 8)
        taken.append(counts["spec_entropy_tokens"])
        steps.append(counts["spec_steps"])
    assert 0 == taken[0] < taken[1] < taken[2]
    assert steps[0] > steps[2]


@pytest.mark.slow
def test_where_it_is_never_sure_the_law_is_plains(plain_slice_llm: Any, drafting: Any) -> None:
    assert least_p_value(plain_slice_llm, drafting, NEVER) > 1e-4
    # The mutation is the method: what it takes has the draft's law.
    biased = sample(drafting, SAMPLES, xargs=ALWAYS)
    assert min(p_value(a, b) for a, b in zip(expected(plain_slice_llm), biased, strict=True)) < 1e-6


def test_neighbours_have_plains_tokens(plain_slice_llm: Any, drafting: Any) -> None:
    inputs = long_and_short_prompts(plain_slice_llm, 8)
    params = [
        asking(None) if i % 2 == 0 else SamplingParams(temperature=0.8, seed=i, max_tokens=31)
        for i in range(8)
    ]
    beside = [asking(ALWAYS), asking(ALWAYS, 1.0), asking(ENTROPY), asking(ALWAYS)]
    found, counts = counted(drafting, [*inputs, *inputs[:4]], [*params, *beside])
    assert_same_outputs(generate(plain_slice_llm, inputs, params), found[:8])
    assert counts["spec_entropy_tokens"] > 20


def test_what_is_forbidden_is_not_taken(drafting: Any) -> None:
    """At this temperature the draft says much of it."""
    inputs = long_and_short_prompts(drafting, 8)
    even = list(range(2, VOCABULARY, 2))
    found, counts = counted(drafting, inputs, [asking(ALWAYS, 2.0, allowed_token_ids=even)] * 8)
    assert all(token % 2 == 0 for tokens in found for token in tokens)
    assert 4 < counts["spec_entropy_tokens"] == counts["spec_accepted_tokens"]
    assert counts["spec_draft_tokens"] > counts["spec_accepted_tokens"] + 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_penalty_lowers_is_the_targets(drafting: Any, temperature: float) -> None:
    """Without a penalty the draft says tokens again and again."""
    inputs = long_and_short_prompts(drafting, 8)

    def again(**penalties: float) -> int:
        found = generate(drafting, inputs, [asking(ALWAYS, temperature, **penalties)] * 8)
        return sum(len(tokens) - len(set(tokens)) for tokens in found)

    free = again()
    assert free > 16
    assert again(presence_penalty=2.0, frequency_penalty=2.0) < free / 2


def test_a_grammar_holds(drafting: Any) -> None:
    pattern = "(ab|cd|[0-9]{2}){16}"
    grammar = StructuredOutputsParams(regex=pattern)
    params = asking(ALWAYS, 1.0, n=8, max_tokens=60, ignore_eos=False, structured_outputs=grammar)
    (before,) = drafting.collective_rpc("vllm_ext_counters")
    (output,) = drafting.chat([[{"role": "user", "content": "Letters"}]], params, use_tqdm=False)
    assert all(re.fullmatch(pattern, each.text) for each in output.outputs)
    (after,) = drafting.collective_rpc("vllm_ext_counters")
    assert after["spec_draft_tokens"] > before["spec_draft_tokens"]


def test_it_ends_where_the_request_ends(drafting: Any) -> None:
    """By ``max_tokens`` and by a stop string, in the middle of a chain that is taken whole."""
    inputs = long_and_short_prompts(drafting, 4)
    whole = generate(drafting, inputs, [asking(ALWAYS)] * 4)[0]
    found = generate(drafting, inputs, [asking(ALWAYS, max_tokens=9)] * 4)
    assert [len(tokens) for tokens in found] == [9] * 4
    assert found[0][:8] == whole[:8]  # the last is the target's, behind a chain that is shorter
    stop = drafting.get_tokenizer().decode(whole[2:5])
    (output,) = drafting.generate(
        [{"prompt_token_ids": inputs[0]}], [asking(ALWAYS, stop=[stop])], use_tqdm=False
    )
    assert output.outputs[0].finish_reason == "stop"
    assert stop not in output.outputs[0].text


def test_a_lossy_server(plain_slice_llm: Any, lossy: Any) -> None:
    """Requests are lossy without asking, unless they ask for exact answers or have a seed."""
    inputs = long_and_short_prompts(plain_slice_llm, 4)
    _, counts = counted(lossy, inputs, [asking(None)] * 4)
    assert counts["spec_entropy_tokens"] > 20
    exact = [
        asking({"verify": "exact"}),
        SamplingParams(temperature=0.8, seed=3, max_tokens=31, ignore_eos=True),
        SamplingParams(temperature=1.2, top_k=9, seed=4, max_tokens=31, ignore_eos=True),
        asking({"verify": "exact"}),
    ]
    found, counts = counted(lossy, inputs, exact)
    assert counts["spec_entropy_tokens"] == 0
    assert_same_outputs(generate(plain_slice_llm, inputs, exact), found)


def test_a_seed_and_a_lossy_answer_are_refused_together(drafting: Any) -> None:
    params = SamplingParams(temperature=1.0, seed=1, extra_args=ENTROPY)
    with pytest.raises(VLLMValidationError, match="seed=1 does not go with verify"):
        drafting.generate(["x"], params, use_tqdm=False)
