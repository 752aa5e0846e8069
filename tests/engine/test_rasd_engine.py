# SPDX-License-Identifier: Apache-2.0
"""Method `rasd` in an engine: output stays the target's, and the draft has read what was accepted of retrieval."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_eagle
from conftest import engine
from distribution import BLOCK_SIZE, least_p_value
from engine_heads import assert_plains
from helpers import generate, long_and_short_prompts
from v2_requests import counters
from vllm import SamplingParams

pytestmark = pytest.mark.engine


def method(model: str, **options: Any) -> dict[str, Any]:
    return {"method": "rasd", "model": model, "num_speculative_tokens": 12, "budget": "fixed", **options}


@pytest.fixture(scope="module")
def drafting(slice_dir: str) -> Iterator[Any]:
    config = method("self", retrieval=["suffix_tree", "input_copy"])
    yield from engine(slice_dir, config, block_size=BLOCK_SIZE, num_gpu_blocks_override=40)


def test_greedy_and_seeded_output_is_plains(plain_slice_llm: Any, drafting: Any) -> None:
    assert_plains(plain_slice_llm, drafting)
    totals = counters(drafting)
    assert totals["spec_draft_tokens"] > 500
    assert totals["spec_accepted_tokens"] > 100
    assert totals["fallbacks:proposer_error"] == 0


@pytest.mark.slow
def test_sampled_output_has_plains_distribution(plain_slice_llm: Any, drafting: Any) -> None:
    assert least_p_value(plain_slice_llm, drafting) > 1e-4
    assert counters(drafting)["fallbacks:proposer_error"] == 0


@pytest.mark.slow
def test_output_beside_a_head_is_plains(plain_slice_llm: Any, slice_dir: str, tmp_path: Path) -> None:
    config = method(tiny_eagle.random(tmp_path / "head", Path(slice_dir)), draft="eagle_tree")
    for llm in engine(slice_dir, config, block_size=BLOCK_SIZE, num_gpu_blocks_override=40):
        assert_plains(plain_slice_llm, llm)
        totals = counters(llm)
        assert totals["spec_accepted_tokens"] > 100
        assert totals["fallbacks:proposer_error"] == totals["fallbacks:hidden_states_missing"] == 0


@pytest.fixture(scope="module")
def beside_itself(slice_dir: str) -> Iterator[Any]:
    """The draft is the target, and says one token: what is accepted behind that was retrieved."""
    config = method(slice_dir, max_depth=1)
    yield from engine(slice_dir, config, distributed_executor_backend="uni", block_size=BLOCK_SIZE)


def guesses(llm: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[bool], list[int]]:
    """Of each step, whether the draft's likeliest token was the first one put out, and how many were."""
    drafter = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter
    proposer = drafter.proposer
    observe, right, lengths = proposer.observe, [], []

    def watch(rows: Any) -> None:
        for name, emitted in zip(rows.request_ids, rows.emitted, strict=True):
            q = proposer.draft.first.get(name)
            if q is not None and emitted:
                right.append(int(q.ids[q.q.argmax()]) == emitted[0])
                lengths.append(len(emitted))
        observe(rows)

    monkeypatch.setattr(proposer, "observe", watch)
    return right, lengths


def answer(llm: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    generate(llm, long_and_short_prompts(llm, 6), [params] * 6)


def test_the_draft_has_read_what_was_accepted(beside_itself: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys and values are the committed text's: else it would not say what the target does."""
    right, lengths = guesses(beside_itself, monkeypatch)
    answer(beside_itself)
    assert len(right) > 30
    assert max(lengths) > 4  # more than the draft's token and the target's own
    assert all(right)


def test_a_draft_that_has_not_would_be_wrong(beside_itself: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: of what was accepted it reads the last token alone."""
    passes = beside_itself.llm_engine.model_executor.driver_worker.worker.model_runner.drafter.passes
    advance = passes.advance

    def skip(num_tokens: Sequence[int], drafting: set[str]) -> None:
        for slot, name in enumerate(passes._runner.input_batch.req_ids):
            if passes._known[name]:
                passes._known[name] = num_tokens[slot] - 1
        advance(num_tokens, drafting)

    monkeypatch.setattr(passes, "advance", skip)
    right, _ = guesses(beside_itself, monkeypatch)
    beside_itself.reset_prefix_cache()
    answer(beside_itself)
    assert not all(right)
