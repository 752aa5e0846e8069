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
    yield from engine(slice_dir, method(slice_dir, max_depth=1), block_size=BLOCK_SIZE)


def watch(worker: Any) -> None:
    """Note of each step whether the draft's likeliest token was the first one put out, and how many were."""
    proposer = worker.model_runner.drafter.proposer
    worker.guesses, observe = [], type(proposer).observe

    def watched(rows: Any) -> None:
        for name, emitted in zip(rows.request_ids, rows.emitted, strict=True):
            q = proposer.draft.first.get(name)
            if q is not None and emitted:
                worker.guesses.append((int(q.ids[q.q.argmax()]) == emitted[0], len(emitted)))
        observe(proposer, rows)

    proposer.observe = watched


def guesses(worker: Any) -> list[tuple[bool, int]]:
    found: list[tuple[bool, int]] = worker.guesses
    return found


def skip(worker: Any) -> None:
    """The mutation: of what was accepted the draft reads the last token alone."""
    passes = worker.model_runner.drafter.passes
    advance = passes.advance

    def skipping(num_tokens: Sequence[int], drafting: set[str]) -> None:
        for slot, name in enumerate(passes._runner.input_batch.req_ids):
            if passes._known[name]:
                passes._known[name] = num_tokens[slot] - 1
        advance(num_tokens, drafting)

    passes.advance = skipping


def guessed(llm: Any) -> list[tuple[bool, int]]:
    llm.collective_rpc(watch)
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    generate(llm, long_and_short_prompts(llm, 6), [params] * 6)
    found: list[tuple[bool, int]] = llm.collective_rpc(guesses)[0]
    return found


def test_the_draft_has_read_what_was_accepted(beside_itself: Any) -> None:
    """Its keys and values are the committed text's: else it would not say what the target does."""
    found = guessed(beside_itself)
    assert len(found) > 30
    assert max(length for _, length in found) > 4  # more than the draft's token and the target's own
    assert all(right for right, _ in found)
    beside_itself.collective_rpc(skip)
    assert not all(right for right, _ in guessed(beside_itself))
