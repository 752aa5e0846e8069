# SPDX-License-Identifier: Apache-2.0
"""A draft model beside the target: its KV is right whatever happens to a request, and output stays the target's.

The target is its own draft here: then the likeliest child of every node is what the target chooses, and one that is not
accepted shows KV that is wrong. On two layers of the model, with few blocks and small steps.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import engine
from distribution import BLOCK_SIZE, SAMPLES, distort, expected, least_p_value, p_value, sample
from helpers import assert_same_outputs, generate, long_and_short_prompts, preemptions, seen
from vllm import SamplingParams

from vllm_ext.data import answers
from vllm_ext.engine.draft_model.answer_export import MAX_LENGTH, TOP_K
from vllm_ext.training.draft_model import Shape, make_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=[None, "token_recycling"], ids=["alone", "cascade"])
def twin(slice_dir: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Sixteen requests share few blocks; a step has at most 192 tokens."""
    yield from engine(
        slice_dir,
        {
            "method": "dyspec",
            "model": slice_dir,
            "num_speculative_tokens": 8,
            "max_depth": 5,
            "budget": "fixed",
            "cascade": request.param,
        },
        num_gpu_blocks_override=17,
        max_num_batched_tokens=192,
    )


def watch(worker: Any) -> None:
    """Count the nodes on the path of first children, and those of them that are accepted."""
    drafter = worker.model_runner.drafter
    worker.seen = {"likeliest": 0, "accepted": 0, "drafting": 0}
    inner = drafter.step

    def step(runner: Any, trees: Any, num_draft_tokens: int, sampled: Any) -> Any:
        for request, path in enumerate(trees.accepted):
            parents = trees.parents[trees.rows(request)].tolist()
            row, chain = 0, []
            while row in parents[row + 1 :]:
                row = parents.index(row, row + 1)
                chain.append(row)
            worker.seen["likeliest"] += len(chain)
            worker.seen["accepted"] += sum(a == b for a, b in zip(chain, path, strict=False))
            worker.seen["drafting"] += bool(chain)
        return inner(runner, trees, num_draft_tokens, sampled)

    drafter.step = step


@pytest.fixture
def watched(twin: Any) -> Any:
    twin.collective_rpc(watch)
    yield twin
    twin.collective_rpc(seen)


def check(llm: Any, at_least: int) -> None:
    (counts,) = llm.collective_rpc(seen)
    assert counts["accepted"] == counts["likeliest"]
    assert counts["likeliest"] > at_least
    assert counts["likeliest"] > 2 * counts["drafting"]  # trees are deep
    (totals,) = llm.collective_rpc("vllm_ext_counters")
    assert totals["fallbacks:proposer_error"] == 0


def test_a_pair_is_always_right(plain_slice_llm: Any, watched: Any) -> None:
    """Through preemption, chunked prefill, joining and leaving; then again over cached prefixes."""
    inputs = long_and_short_prompts(plain_slice_llm, 16)
    params = [SamplingParams(temperature=0, max_tokens=60 + 15 * (i % 7), ignore_eos=True) for i in range(16)]
    expected = generate(plain_slice_llm, inputs, params)
    before = preemptions(watched)
    assert_same_outputs(expected, generate(watched, inputs, params))
    assert preemptions(watched) > before
    check(watched, 500)
    assert_same_outputs(expected[:4], generate(watched, inputs[:4], params[:4]))
    # Prompts that go on where cached answers end.
    longer = [tokens + answer for tokens, answer in zip(inputs[:4], expected[:4], strict=True)]
    assert_same_outputs(generate(plain_slice_llm, longer, params[:4]), generate(watched, longer, params[:4]))
    check(watched, 200)


def test_blocks_filled_without_drafts_are_right(plain_slice_llm: Any, watched: Any) -> None:
    """Requests that draft nothing are read in time for others to share their blocks."""
    start = long_and_short_prompts(plain_slice_llm, 8)[3]
    watched.reset_prefix_cache()
    penalised = SamplingParams(temperature=0, max_tokens=1)
    generate(watched, [start], [penalised])  # prefill only: one token ends it
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    assert_same_outputs(
        generate(plain_slice_llm, [start + start], [params]), generate(watched, [start + start], [params])
    )
    check(watched, 20)


def test_seeds_and_penalties(plain_slice_llm: Any, twin: Any) -> None:
    """Requests with seeds are token for token what they are without drafts."""
    inputs = long_and_short_prompts(plain_slice_llm, 3)
    params = [
        SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.9, seed=6, max_tokens=40, repetition_penalty=1.1),
        SamplingParams(temperature=0, max_tokens=40, presence_penalty=0.5),
    ]
    for tokens, param in zip(inputs, params, strict=True):
        # One at a time: plain vLLM stops at a seeded request whose prompt comes in chunks.
        assert_same_outputs(generate(plain_slice_llm, [tokens], [param]), generate(twin, [tokens], [param]))


@pytest.mark.slow
def test_a_draft_of_another_shape(plain_slice_llm: Any, slice_dir: str, tmp_path: Path) -> None:
    """Other heads and fewer layers, as `vllm-ext train draft` makes them; its weights are noise, and it is compiled."""
    shape = Shape(hidden_size=64, num_layers=1, num_heads=2, intermediate_size=64)
    make_model(Path(slice_dir), shape, "cpu").save_pretrained(tmp_path)
    for file in Path(slice_dir).glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    method = {"method": "rsd_s", "model": str(tmp_path), "num_speculative_tokens": 8, "max_depth": 3}
    engines = engine(slice_dir, {**method, "budget": "fixed"}, enforce_eager=False)
    llm = next(engines)
    try:
        inputs = long_and_short_prompts(llm, 6)
        params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * 6
        # Drawn ones too, which share blocks with those that are compared.
        generate(llm, inputs, [SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)] * 6)
        assert_same_outputs(generate(plain_slice_llm, inputs, params), generate(llm, inputs, params))
        (totals,) = llm.collective_rpc("vllm_ext_counters")
        assert totals["spec_draft_tokens"] > 1000
        assert totals["fallbacks:proposer_error"] == 0
    finally:
        next(engines, None)


METHODS: dict[str, dict[str, Any]] = {
    "dyspec": {},
    "spectr": {"drafts": 3},
    "specdec_pp": {"stop_threshold": 1.0, "cascade": "token_recycling"},
}  # one of each rule, and a cascade; see scripts/matrix.sh


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_drawn_trees_have_plains_distribution(
    plain_slice_llm: Any, slice_dir: str, method: str, tmp_path: Path
) -> None:
    """With a draft that is another model: one layer of the two. Greedy answers are kept for training."""
    options = {"model": "self", "self_layers": 1, "num_speculative_tokens": 9, "max_depth": 3}
    options["export_dir"] = str(tmp_path)
    given = {"method": method, "budget": "fixed", **options, **METHODS[method]}
    engines = engine(slice_dir, given, block_size=BLOCK_SIZE)
    llm = next(engines)
    try:
        assert least_p_value(plain_slice_llm, llm) > 1e-4 / len(METHODS)
        (totals,) = llm.collective_rpc("vllm_ext_counters")
        assert totals["fallbacks:proposer_error"] == 0
        assert totals["spec_accepted_tokens"] > 100
        # The mutation: children that were drawn are verified as if the draft were another.
        llm.collective_rpc(distort)
        biased = sample(llm, SAMPLES)
        assert min(p_value(a, b) for a, b in zip(expected(plain_slice_llm), biased, strict=True)) < 1e-6
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=TOP_K)
        prompts = long_and_short_prompts(llm, 4)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    finally:
        next(engines, None)
    check_kept(outputs, answers.load(tmp_path))


def check_kept(outputs: list[Any], kept: list[answers.Answer]) -> None:
    """The answers are there, with vLLM's own log-probabilities."""
    assert len(kept) == len(outputs)  # those of the samples are too short
    by_tokens = {tuple(answer.tokens.tolist()): answer for answer in kept}
    for output in outputs:
        completion = output.outputs[0]
        whole = [*output.prompt_token_ids, *completion.token_ids]
        answer = by_tokens[tuple(whole[-MAX_LENGTH:])]
        assert len(answer.tokens) - answer.num_prompt_tokens == len(answer.top_ids) == 24
        for ids, logp, place in zip(answer.top_ids, answer.top_logp, completion.logprobs, strict=True):
            assert set(ids.tolist()) <= set(place)
            assert logp.tolist() == pytest.approx([place[i].logprob for i in ids.tolist()], abs=1e-4)
