# SPDX-License-Identifier: Apache-2.0
"""Proposers of vLLM's own as drafters of a hybrid: what they read beside trees, and that output stays the target's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_eagle
import tiny_heads
import tiny_mtp
from conftest import engine
from distribution import BLOCK_SIZE, least_p_value
from engine_heads import along, assert_knows_everything, assert_plains
from helpers import generate
from v2_requests import counters
from vllm import SamplingParams

from vllm_ext.engine.draft_model.vllm_proposer import VllmProposer

pytestmark = pytest.mark.engine


def beside(nodes: int, others: list[str], **vllms: Any) -> dict[str, Any]:
    return {
        "method": "hybrid",
        "drafters": [{"method": "vllm", "speculative_config": vllms}, *others],
        "num_speculative_tokens": nodes,
        "budget": "fixed",
    }


@pytest.mark.parametrize(
    "kind",
    [
        "eagle3",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("late", "eagle", "mtp", "draft_model", "medusa")
        ),
    ],
)
def test_a_draft_that_knows_everything(kind: str, cycle: tuple[str, Any], tmp_path: Path) -> None:
    """All is accepted; of a row or a token beside it nothing would be: that is the test of a head that is late."""
    folder, after = cycle
    late = int(kind == "late")
    method = "eagle3" if late else kind
    if kind == "draft_model":
        model = folder
    elif kind == "mtp":
        folder = tiny_mtp.knowing(tmp_path / "target", Path(folder))
        model = None  # it is in the target's checkpoint
    elif kind == "eagle":
        model = tiny_eagle.first(tmp_path / "head", Path(folder))
    elif kind == "medusa":
        model = tiny_heads.knowing(tmp_path / "heads", Path(folder), after)
    else:
        model = tiny_eagle.knowing(tmp_path / "head", Path(folder), after, "token", late)
    vllms = {"method": method, "model": model, "num_speculative_tokens": 4}
    config = beside(4, [], **{name: value for name, value in vllms.items() if value is not None})
    assert_knows_everything(folder, after, config, 4, late, along(after))


@pytest.fixture(scope="module")
def drafting(slice_dir: str) -> Iterator[Any]:
    tables = ["token_recycling", "suffix_tree"]
    method = beside(12, tables, method="draft_model", model=slice_dir, num_speculative_tokens=3)
    yield from engine(slice_dir, method, block_size=BLOCK_SIZE, num_gpu_blocks_override=40)


def test_greedy_and_seeded_output_is_plains(plain_slice_llm: Any, drafting: Any) -> None:
    """Beside trees; and the draft, which is the target, has read all of what was accepted: it is right each time."""
    assert_plains(plain_slice_llm, drafting)
    before = counters(drafting)
    prompts = [[token, *range(5, 60)] for token in range(300, 308)]
    generate(drafting, prompts, [SamplingParams(temperature=0, max_tokens=81, ignore_eos=True)] * 8)
    totals = counters(drafting)
    assert totals["fallbacks:proposer_error"] == 0
    assert totals["spec_steps"] - before["spec_steps"] <= 8 * (2 + 80 // 4)


@pytest.mark.slow
def test_sampled_output_has_plains_distribution(plain_slice_llm: Any, drafting: Any) -> None:
    assert least_p_value(plain_slice_llm, drafting) > 1e-4
    assert counters(drafting)["fallbacks:proposer_error"] == 0


def record(worker: Any, crooked: bool = False) -> None:
    """Note what is said after each prefix; the mutation: rows stay where the tree had them."""
    drafter = worker.model_runner.drafter
    drafter.said, asked = {}, VllmProposer._model

    def model(self: Any, runner: Any, trees: Any, sampled: Any, length: int) -> Any:
        if crooked:
            none = trees.query_row[:0]
            trees = SimpleNamespace(row_start=trees.row_start, moves=lambda: (none, none))
        drafts = asked(self, runner, trees, sampled, length)
        batch = runner.input_batch
        for slot, (tokens, draft) in enumerate(zip(sampled, drafts.tolist(), strict=True)):
            if tokens:
                text = batch.token_ids_cpu[slot, : batch.num_tokens_no_spec[slot]].tolist()
                drafter.said[tuple(text)] = draft
        return drafts

    asking = drafter.vllms.asking
    asking._model = model.__get__(asking)


def said(worker: Any) -> dict[tuple[int, ...], list[int]]:
    found: dict[tuple[int, ...], list[int]] = worker.model_runner.drafter.said
    return found


@pytest.mark.slow
def test_a_head_says_the_same_beside_trees(slice_dir: str, tmp_path: Path) -> None:
    """What it is given of an accepted path is what it gets of a chain."""
    model = tiny_eagle.random(tmp_path / "head", Path(slice_dir))
    vllms = {"method": "eagle3", "model": model, "num_speculative_tokens": 3}
    prompts = [[token, *range(5, 40)] for token in range(300, 304)]
    params = [SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)] * 4

    def all_said(llm: Any) -> dict[tuple[int, ...], list[int]]:
        llm.reset_prefix_cache()
        generate(llm, prompts, params)
        assert counters(llm)["fallbacks:proposer_error"] == 0
        found: dict[tuple[int, ...], list[int]] = llm.collective_rpc(said)[0]
        return found

    for llm in engine(slice_dir, beside(3, [], **vllms)):
        llm.collective_rpc(record)
        alone = all_said(llm)
    for llm in engine(slice_dir, beside(12, ["token_recycling"], **vllms)):
        llm.collective_rpc(record)
        both = all_said(llm)
        llm.collective_rpc(record, args=(True,))
        wrong = all_said(llm)
    for found, right in ((both, True), (wrong, False)):
        common = alone.keys() & found.keys()
        assert len(common) > 30
        equal = sum(alone[text] == found[text] for text in common)
        assert (equal >= 0.97 * len(common)) == right


@pytest.mark.slow
def test_vllms_ngram_beside_a_table(plain_slice_llm: Any, slice_dir: str) -> None:
    method = beside(8, ["token_recycling"], method="ngram", num_speculative_tokens=5, prompt_lookup_max=3)
    for llm in engine(slice_dir, method, block_size=BLOCK_SIZE, num_gpu_blocks_override=40):
        assert_plains(plain_slice_llm, llm)
        assert counters(llm)["fallbacks:proposer_error"] == 0
