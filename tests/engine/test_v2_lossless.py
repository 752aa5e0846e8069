# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 runner with trees puts out what it puts out without, token for token: greedy and by seed, in one batch.

V2 keys its noise by seed and position, so a request's draws are the same in any batch. The mutations that these tests
were seen to find are named where they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_same_outputs
from v2_requests import counters, generate, prompts, sampling, tokens, watch_parents
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_ext.engine.v2.speculators.model import ModelSpeculator

pytestmark = pytest.mark.v2
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "v2_either", [pytest.param("v2_trees", marks=pytest.mark.quick), "v2_host"], indirect=True
)
def test_mixed_requests_in_one_batch(
    v2_plain: Any,
    v2_either: Any,
    monkeypatch: pytest.MonkeyPatch,
    accepted_at_least: Callable[[int], int],
) -> None:
    """More requests than there are places, prompts in chunks beside trees, each request another kind of sampling.

    Found: rotary positions of a chain, ancestors of a chain, no KV moved, noise keyed by the flat row.
    """
    assert v2_either.llm_engine.vllm_config.use_v2_model_runner
    runner = v2_either.llm_engine.model_executor.driver_worker.worker.model_runner
    assert runner.speculator.chain_reason is None
    kinds = [
        sampling(),
        sampling(temperature=0.8, seed=5),
        sampling(temperature=0.9, seed=6, top_p=0.9, top_k=50),
        sampling(repetition_penalty=1.3, presence_penalty=0.5),
        sampling(temperature=0.8, seed=8, frequency_penalty=0.7, logprobs=2),
        sampling(structured_outputs=StructuredOutputsParams(json=SCHEMA), ignore_eos=False),
        sampling(temperature=0.7, seed=9, min_p=0.05, logit_bias={300: 2.0}),
    ]
    texts = prompts(len(kinds))
    before = counters(v2_either)
    parents = watch_parents(v2_either, monkeypatch)
    expected = generate(v2_plain, texts, kinds)
    actual = generate(v2_either, texts, kinds)
    assert_same_outputs(tokens(expected), tokens(actual))
    for a, b in zip(expected[4].logprobs, actual[4].logprobs, strict=True):
        assert list(a) == list(b)
        assert all(abs(a[t].logprob - b[t].logprob) < 1e-3 and a[t].rank == b[t].rank for t in a)
    new = {name: total - before[name] for name, total in counters(v2_either).items()}
    assert new["spec_accepted_tokens"] >= accepted_at_least(21)
    if accepted_at_least(2) == 2:  # of the methods whose tests these are
        assert any(rows[1:3] == [0, 0] for rows in parents)  # that branch
    assert new["spec_emitted_tokens"] == new["spec_steps"] + new["spec_accepted_tokens"]
    assert new["spec_accepted_tokens"] <= new["spec_draft_tokens"] <= 6 * new["spec_steps"]
    assert new["fallbacks:structured_output_chain"] == new["fallbacks:no_grammar"] == 0
    assert new["fallbacks:model_chain"] == new["fallbacks:proposer_error"] == 0


def test_texts_of_digits(v2_plain: Any, v2_either: Any, accepted_at_least: Callable[[int], int]) -> None:
    """So little may come that some of it is found, in a prompt or a corpus too; others think other tokens likely."""
    digits = v2_plain.get_tokenizer().encode("123", add_special_tokens=False)
    texts = [random.Random(seed).choices(digits, k=40) for seed in range(4)]
    kinds = [sampling(temperature=t, seed=6, allowed_token_ids=digits) for t in (0, 0.5, 1, 2)]
    before = counters(v2_either)["spec_accepted_tokens"]
    expected = tokens(generate(v2_plain, texts, kinds))
    assert_same_outputs(expected, tokens(generate(v2_either, texts, kinds)))
    speculator = v2_either.llm_engine.model_executor.driver_worker.worker.model_runner.speculator
    # Of the methods whose tests these are, and of those that find what was.
    if accepted_at_least(2) != 1 and not isinstance(speculator, ModelSpeculator):
        assert counters(v2_either)["spec_accepted_tokens"] > before + 5


@pytest.mark.quick
def test_drafts_of_the_host(v2_plain: Any, v2_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by other tokens: depths of the step before, parents one row too low. By fewer drafts that are accepted:
    parents of the step before, another request's trees, its tokens in one's own tree, its text.
    """
    texts = [text * 2 for text in prompts(4, seed=7)]
    kinds = [sampling(max_tokens=14), sampling(temperature=0.8, seed=15, max_tokens=14)] * 2
    parents = watch_parents(v2_host, monkeypatch)
    before = counters(v2_host)
    expected = tokens(generate(v2_plain, texts, kinds))
    assert_same_outputs(expected, tokens(generate(v2_host, texts, kinds)))
    new = {name: total - before[name] for name, total in counters(v2_host).items()}
    assert new["spec_accepted_tokens"] > 22
    assert new["fallbacks:proposer_error"] == 0
    assert any(rows[1:3] == [0, 0] for rows in parents)  # that branch


def test_penalties_of_a_path(v2_plain: Any, v2_either: Any, accepted_at_least: Callable[[int], int]) -> None:
    """Of text that repeats itself, so that trees branch and are accepted. Found: penalties of the flat list."""
    texts = [text * 2 for text in prompts(4, seed=21)]
    kinds = [
        sampling(max_tokens=40, frequency_penalty=0.15),
        sampling(max_tokens=40, presence_penalty=0.6),
        sampling(max_tokens=40, repetition_penalty=1.1),
        sampling(max_tokens=40, temperature=0.6, seed=4, frequency_penalty=0.2),
    ]
    before = counters(v2_either)["spec_accepted_tokens"]
    for shift in range(2):  # each text under two of them
        moved = kinds[shift:] + kinds[:shift]
        expected = tokens(generate(v2_plain, texts, moved))
        assert_same_outputs(expected, tokens(generate(v2_either, texts, moved)))
    assert counters(v2_either)["spec_accepted_tokens"] >= before + accepted_at_least(31)


def test_penalties_and_bad_words_are_sampled_at_once(
    v2_plain: Any, v2_either: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: a request with a penalty sampled depth by depth, seven times a step."""
    verifier = v2_either.llm_engine.model_executor.driver_worker.worker.model_runner.rejection_sampler
    sample, call, sampled, steps = verifier._sample, type(verifier).__call__, [0], [0]

    def sampling_once(*args: Any) -> Any:
        sampled[0] += 1
        return sample(*args)

    def verifying(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps[0] += 1
        return call(self, *args, **kwargs)

    monkeypatch.setattr(verifier, "_sample", sampling_once)
    monkeypatch.setattr(type(verifier), "__call__", verifying)
    kinds = [
        sampling(repetition_penalty=1.2, bad_words=["the", "of the"]),
        sampling(presence_penalty=0.4, logprobs=2),
        sampling(),
    ]
    texts = prompts(3, seed=23)
    expected = generate(v2_plain, texts, kinds)
    actual = generate(v2_either, texts, kinds)
    assert_same_outputs(tokens(expected), tokens(actual))
    for a, b in zip(expected[1].logprobs, actual[1].logprobs, strict=True):
        assert list(a) == list(b)
    assert sampled[0] == steps[0] > 5


def test_bad_words_of_several_tokens(v2_plain: Any, v2_either: Any) -> None:
    """Forbidden are pairs that the answers have: what is before a node decides."""
    texts = prompts(4, seed=2)
    free = tokens(generate(v2_plain, texts, sampling()))
    tokenizer = v2_plain.get_tokenizer()
    words = [tokenizer.decode(answer[2:4]) for answer in free]
    params = sampling(bad_words=[word for word in words if word.strip()])
    expected = tokens(generate(v2_plain, texts, params))
    assert expected != free
    assert_same_outputs(expected, tokens(generate(v2_either, texts, params)))


def test_vllms_kernels_get_the_types_they_are_compiled_for(
    v2_plain: Any, v2_either: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: drafts as 64-bit integers, for which bad words' kernel does not compile; the interpreter takes them."""
    kinds = [sampling(), sampling(temperature=0.7, seed=1), sampling(bad_words=["the"], presence_penalty=0.2)]
    original = Sampler.apply_sampling_params
    seen: dict[Any, set[tuple[torch.dtype, ...]]] = {v2_plain: set(), v2_either: set()}
    for llm, types in seen.items():

        def watching(*args: Any, types: set[tuple[torch.dtype, ...]] = types, **options: Any) -> torch.Tensor:
            types.add(tuple(arg.dtype for arg in args if isinstance(arg, torch.Tensor)))
            result: torch.Tensor = original(*args, **options)
            return result

        monkeypatch.setattr(Sampler, "apply_sampling_params", watching)
        generate(llm, prompts(3, seed=2), kinds)
    assert len(seen[v2_plain]) == 1
    assert seen[v2_either] == seen[v2_plain]


def test_the_last_positions_of_the_context(v2_plain: Any, v2_either: Any) -> None:
    """Room for 1, 2, 4 and 17 tokens, next to a request that has all the room."""
    text = [30 + place % 7 for place in range(255)]
    texts = [text, text[:-1], text[:-3], text[:-16], text[:9]]
    params = sampling(max_tokens=30)
    expected = tokens(generate(v2_plain, texts, params))
    assert [len(answer) for answer in expected] == [1, 2, 4, 17, 30]
    assert_same_outputs(expected, tokens(generate(v2_either, texts, params)))


def test_blocks_written_by_trees_serve_a_second_turn(v2_plain: Any, v2_either: Any) -> None:
    """Prefix caching: the answer of a first turn is the prompt of the second, and is not computed again."""
    text = prompts(1, seed=3)[0] * 4
    first = {}
    for llm in (v2_plain, v2_either):
        (answer,) = tokens(generate(llm, [text], sampling(max_tokens=60)))
        (again,) = tokens(generate(llm, [text + answer + [400]], sampling(max_tokens=30)))
        first[llm] = answer, again
    assert_same_outputs(first[v2_plain], first[v2_either])
    hits = [m for m in v2_either.get_metrics() if m.name == "vllm:prefix_cache_hits"]
    assert hits
    assert hits[0].value >= 64


def test_text_in_a_grammar_stays_in_it(v2_either: Any) -> None:
    """Four structured requests and no other, to their ends."""
    params = sampling(
        temperature=0.9,
        seed=3,
        max_tokens=40,
        structured_outputs=StructuredOutputsParams(choice=["alpha beta", "alpha gamma"]),
        ignore_eos=False,
    )
    outputs = generate(v2_either, prompts(4, seed=4), params)
    assert {output.text for output in outputs} <= {"alpha beta", "alpha gamma"}
    assert [output.finish_reason for output in outputs] == ["stop"] * 4
