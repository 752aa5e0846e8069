# SPDX-License-Identifier: Apache-2.0
"""Trees on vLLM's V2 runner when the scheduler makes it hard: steps scheduled ahead, preemption, other sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from conftest import V2_HOST_METHOD, V2_METHOD, V2_MODEL_METHOD, v2_engine, v2_engine_ahead
from helpers import assert_same_outputs, preemptions
from v2_requests import counters, generate, prompts, sampling, tokens, watch_parents
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.v2


@pytest.fixture(scope="module")
def ahead(v2_dir: str, v2_plain: Any) -> Any:
    """One that verifies whole trees."""
    return v2_engine_ahead(v2_dir, V2_METHOD)


@pytest.mark.quick
def test_steps_scheduled_ahead(v2_plain: Any, ahead: Any) -> None:
    kinds = [
        sampling(max_tokens=24),
        sampling(temperature=0.8, seed=15, max_tokens=9),
        sampling(temperature=0.9, seed=16, max_tokens=17),
        sampling(repetition_penalty=1.2, max_tokens=12),
        sampling(max_tokens=2),
    ]
    texts = prompts(len(kinds), seed=7)
    expected = tokens(generate(v2_plain, texts, kinds))
    assert_same_outputs(expected, tokens(generate(ahead, texts, kinds)))
    assert counters(ahead)["spec_accepted_tokens"] > 10


def test_structured_requests_scheduled_ahead(v2_plain: Any, ahead: Any) -> None:
    """vLLM then asks for the drafts, and would mark those behind the first that its grammar forbids."""
    from vllm.sampling_params import StructuredOutputsParams

    choice = StructuredOutputsParams(choice=["alpha beta", "alpha gamma", "omega"])
    kinds = [
        sampling(structured_outputs=choice, ignore_eos=False, temperature=0.9, seed=4),
        sampling(structured_outputs=choice, ignore_eos=False),
        sampling(temperature=0.8, seed=3),
    ]
    texts = prompts(len(kinds), seed=8)
    expected = tokens(generate(v2_plain, texts, kinds))
    assert_same_outputs(expected, tokens(generate(ahead, texts, kinds)))


def test_drafts_of_the_host_scheduled_ahead(v2_dir: str, v2_plain: Any) -> None:
    """Steps wait for each other there, and what is put out is the same: also behind end tokens and preemptions."""
    llm = v2_engine_ahead(v2_dir, V2_HOST_METHOD, num_gpu_blocks_override=10)
    texts = [text * 2 for text in prompts(6, seed=19)]
    kinds = [
        sampling(max_tokens=80),
        sampling(max_tokens=80, temperature=0.9, seed=16),
        sampling(max_tokens=80),
        sampling(max_tokens=80),
        sampling(max_tokens=9, temperature=0.8, seed=15),
        sampling(max_tokens=2),
    ]
    free = tokens(generate(v2_plain, texts, kinds))
    kinds[3] = sampling(max_tokens=80, stop_token_ids=[free[3][60]])
    expected = tokens(generate(v2_plain, texts, kinds))
    assert len(expected[3]) < 80
    assert_same_outputs(expected, tokens(generate(llm, texts, kinds)))
    assert preemptions(llm) > 0
    totals = counters(llm)
    assert totals["spec_accepted_tokens"] > 20
    assert totals["fallbacks:proposer_error"] == 0
    drafts = llm.llm_engine.model_executor.driver_worker.worker.model_runner.speculator.drafts
    generate(llm, texts[:1], sampling(max_tokens=2))  # in whose first step the others' ends are told
    assert len(drafts._texts) <= 1


@pytest.mark.parametrize(
    ("method", "scheduled_ahead"), [(V2_METHOD, False), (V2_METHOD, True), (V2_HOST_METHOD, False)]
)
def test_preempted_requests_go_on(
    v2_dir: str, v2_plain: Any, method: dict[str, Any], scheduled_ahead: bool
) -> None:
    """Too few blocks for all four requests: some lose theirs, and are computed again from their text."""
    make = v2_engine_ahead if scheduled_ahead else v2_engine
    llm = make(v2_dir, method, num_gpu_blocks_override=10)
    texts = prompts(4, seed=9)
    kinds = [sampling(max_tokens=120), sampling(max_tokens=120, temperature=0.8, seed=2)] * 2
    expected = tokens(generate(v2_plain, texts, kinds))
    assert_same_outputs(expected, tokens(generate(llm, texts, kinds)))
    assert preemptions(llm) > 0


@pytest.mark.parametrize(
    ("method", "scheduled_ahead"), [(V2_METHOD, True), (V2_MODEL_METHOD, True), (V2_HOST_METHOD, False)]
)
def test_drafts_give_way_before_requests(
    v2_dir: str,
    v2_plain: Any,
    method: dict[str, Any],
    scheduled_ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks for all texts, and not for all drafts: nobody is preempted, as vLLM's scheduler alone would have it."""
    make = v2_engine_ahead if scheduled_ahead else v2_engine
    texts = [text[:12] for text in prompts(4, seed=9)]
    kinds = [sampling(max_tokens=52 - len(text)) for text in texts]
    kinds[1] = sampling(max_tokens=kinds[1].max_tokens, temperature=0.8, seed=2)
    llm = make(v2_dir, {**method, "num_speculative_tokens": 15}, num_gpu_blocks_override=9)
    expected = tokens(generate(v2_plain, texts, kinds))
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert_same_outputs(expected, tokens(generate(llm, texts, kinds)))
    assert preemptions(llm) == 0
    assert counters(llm)["spec_accepted_tokens"] > 10
    monkeypatch.setattr(scheduler, "_is_known", False)
    assert_same_outputs(expected, tokens(generate(llm, texts, kinds)))
    assert preemptions(llm) > 0
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free


def test_fewer_nodes_than_there_are(
    v2_plain: Any,
    v2_either: Any,
    monkeypatch: pytest.MonkeyPatch,
    accepted_at_least: Callable[[int], int],
) -> None:
    """What vLLM does with a schedule by batch size: the scheduler asks for other numbers, down to none."""
    core = v2_either.llm_engine.engine_core.engine_core
    texts = prompts(4, seed=10)
    kinds = [sampling(), sampling(temperature=0.8, seed=1), sampling(frequency_penalty=0.4), sampling()]
    expected = tokens(generate(v2_plain, texts, kinds))
    monkeypatch.setattr(core.scheduler, "dynamic_sd_lookup", [0, 3, 1, 2, 0])
    before = counters(v2_either)
    assert_same_outputs(expected, tokens(generate(v2_either, texts, kinds)))
    monkeypatch.setattr(core.scheduler, "dynamic_sd_lookup", [0, 6, 4, 3, 2])
    assert_same_outputs(expected, tokens(generate(v2_either, texts, kinds)))
    least = before["spec_accepted_tokens"] + accepted_at_least(1)
    assert counters(v2_either)["spec_accepted_tokens"] >= least


def test_requests_that_ask_for_fewer_nodes_or_none(
    v2_plain: Any, v2_either: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and beside others that do not; whatever they ask for, the tokens are the same."""
    parents = watch_parents(v2_either, monkeypatch)
    off, small = {"speculation": False}, {"speculation_max_nodes": 2}
    texts = prompts(4, seed=15)
    expected = tokens(generate(v2_plain, texts, sampling(max_tokens=16)))

    def drafted(asked: list[dict[str, Any] | None]) -> tuple[int, set[int]]:
        """How many nodes steps verified; and the sizes of trees that there were."""
        parents.clear()
        before = counters(v2_either)["spec_draft_tokens"]
        kinds = [sampling(max_tokens=16, extra_args=each) for each in asked]
        assert_same_outputs(expected, tokens(generate(v2_either, texts, kinds)))
        sizes = {sum(row >= 0 for row in of_request) for of_request in parents}
        return counters(v2_either)["spec_draft_tokens"] - before, sizes

    assert drafted([off] * 4) == (0, {0})
    assert max(drafted([small] * 4)[1]) == 2
    number, sizes = drafted([None, off, small, None])
    assert number > 0
    assert max(sizes) > 2
    # A schema's, too.
    schema = StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}})
    kinds = [sampling(structured_outputs=schema, extra_args=each) for each in (off, small, None, off)]
    expected = tokens(generate(v2_plain, texts, kinds))
    assert_same_outputs(expected, tokens(generate(v2_either, texts, kinds)))


@pytest.mark.parametrize(
    ("method", "scheduled_ahead"), [(V2_METHOD, False), (V2_METHOD, True), (V2_HOST_METHOD, False)]
)
def test_the_goodput_budget(
    v2_dir: str,
    v2_plain: Any,
    method: dict[str, Any],
    scheduled_ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever it chooses, the tokens are the same; it has tried all sizes, and graphs would be captured for them."""
    from vllm_ext.engine.scheduler.budget import Budget

    make = v2_engine_ahead if scheduled_ahead else v2_engine
    llm = make(v2_dir, {**method, "budget": "goodput"})
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert isinstance(scheduler, Budget)
    assert scheduler.budget.levels == [0, 2, 3, 6]
    texts = prompts(4, seed=14)
    kinds = [sampling(max_tokens=40), sampling(max_tokens=40, temperature=0.8, seed=2)] * 2
    expected = tokens(generate(v2_plain, texts, kinds))
    assert_same_outputs(expected, tokens(generate(llm, texts, kinds)))
    shown = {
        each.name: each.value for each in llm.get_metrics() if each.name.startswith("vllm_ext:spec_budget")
    }
    assert shown["vllm_ext:spec_budget_target_efficiency"] > 0
    assert shown["vllm_ext:spec_budget_step_seconds"] > 0
    rates = [scheduler.budget.rate(3, level) for level in scheduler.budget.levels]
    assert rates[0] is not None
    assert rates[1] is not None
    # Where nobody wants drafts, steps have no rows for any; else as many as for the one who wants most.
    monkeypatch.setattr(scheduler.budget, "choose", lambda number: 6)
    schedule, levels = scheduler.schedule, []

    def watching(*args: Any, **kwargs: Any) -> Any:
        running = len(scheduler.running)
        output = schedule(*args, **kwargs)
        if running and output.num_scheduled_tokens:
            levels.append(output.num_spec_tokens_to_schedule)
        return output

    monkeypatch.setattr(scheduler, "schedule", watching)
    for asked, most in (({"speculation": False}, 0), ({"speculation_max_nodes": 1}, 2)):
        levels.clear()
        for kind in kinds:
            kind.extra_args = asked
        assert_same_outputs(expected, tokens(generate(llm, texts, kinds)))
        assert set(levels) == {most}


@pytest.mark.quick
@pytest.mark.parametrize("scheduled_ahead", [False, True])
def test_nodes_that_requests_share(
    v2_dir: str, v2_plain: Any, scheduled_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps have more rows of some requests than of others, by their nodes' chances; the tokens are plain's."""
    make = v2_engine_ahead if scheduled_ahead else v2_engine
    llm = make(v2_dir, {**V2_HOST_METHOD, "budget": "shared"})
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    levels = itertools.cycle([2, 2, 2, 3, 0, 6])
    monkeypatch.setattr(scheduler.budget, "_choose", lambda batch_size: next(levels))
    seen: list[list[int]] = []
    prepare = runner.prepare_attn

    def watching(input_batch: Any) -> Any:
        counts = input_batch.num_draft_tokens_per_req
        if counts is not None:
            seen.append(counts.tolist())
        return prepare(input_batch)

    monkeypatch.setattr(runner, "prepare_attn", watching)
    texts = prompts(4, seed=23)
    kinds = [
        sampling(max_tokens=40),
        sampling(max_tokens=40, temperature=0.8, seed=2),
        sampling(max_tokens=25, repetition_penalty=1.2, logprobs=2),
        sampling(max_tokens=30),
    ]
    expected = tokens(generate(v2_plain, texts, kinds))
    assert_same_outputs(expected, tokens(generate(llm, texts, kinds)))
    shared = [counts for counts in seen if len(set(counts)) > 1]
    assert len(shared) > 5
    assert any(max(counts) > 3 and sum(counts) <= 3 * len(counts) for counts in shared)
    totals = counters(llm)
    assert totals["spec_accepted_tokens"] > 10
    assert totals["spec_draft_tokens"] <= sum(map(sum, seen))
    assert totals["fallbacks:proposer_error"] == 0


def test_masks_of_grammars_and_shared_nodes(v2_dir: str, v2_plain: Any) -> None:
    """A mask has a row for each draft that was scheduled: steps with such requests are not cut."""
    from vllm.sampling_params import StructuredOutputsParams

    llm = v2_engine_ahead(v2_dir, {**V2_HOST_METHOD, "budget": "shared"})
    choice = StructuredOutputsParams(choice=["alpha beta", "alpha gamma", "omega"])
    kinds = [
        sampling(max_tokens=30),
        sampling(structured_outputs=choice, ignore_eos=False, temperature=0.9, seed=4),
        sampling(max_tokens=30, temperature=0.8, seed=3),
        sampling(structured_outputs=choice, ignore_eos=False),
    ]
    texts = prompts(len(kinds), seed=8)
    expected = tokens(generate(v2_plain, texts, kinds))
    assert_same_outputs(expected, tokens(generate(llm, texts, kinds)))
