# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism 2: two workers, each with its own proposer, budget, clock and noise, must see the same trees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import assert_same_outputs, own_prompts, what_failed

pytestmark = pytest.mark.engine

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model, method, prompts = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    llm = LLM(model, speculative_config=method, dtype="float32", max_model_len=512, max_num_seqs=4,
              enforce_eager=True, tensor_parallel_size=2)
    result = []
    # Drawn without seeds, and not compared: their KV is read again by the prompts that come next.
    llm.generate(prompts, SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    for params in (
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=1.2),
    ):
        result += [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    counters = llm.collective_rpc("vllm_ext_counters") if method else []
    print("RESULT" + json.dumps([result, counters]))
    llm.llm_engine.engine_core.shutdown(timeout=30)  # a script that just ends gives its engine five seconds
"""


def run(model_dir: str, method: dict[str, object] | None, log: Path) -> tuple[list[list[int]], list[Any]]:
    """Outputs and each rank's counters."""
    script = log.with_suffix(".py")
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), model_dir, json.dumps(method), json.dumps(own_prompts()[:4])],
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, what_failed(done)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    outputs, counters = json.loads(line.removeprefix("RESULT"))
    return outputs, counters


@pytest.fixture(scope="module")
def expected(slice_dir: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    outputs, _ = run(slice_dir, None, tmp_path_factory.mktemp("plain") / "plain")
    return outputs


@pytest.mark.slow
def test_two_workers_are_lossless_cold_and_warm(
    slice_dir: str, expected: list[list[int]], tmp_path: Path
) -> None:
    """Both take over what one has saved: had their trees differed, rank 0's drafts would be none of rank 1's."""
    method: dict[str, object] = {
        "method": "hybrid",
        "num_speculative_tokens": 8,
        "state_dir": str(tmp_path / "state"),
    }
    totals = []
    for name in ("cold", "warm"):
        actual, counters = run(slice_dir, method, tmp_path / name)
        assert_same_outputs(expected, actual)
        # Rank 0 counts for all.
        assert counters[1] == {}
        assert counters[0]["spec_accepted_tokens"] > 50
        assert counters[0]["fallbacks:proposer_error"] == 0
        assert len(list((tmp_path / "state").iterdir())) == 1
        totals.append(counters[0])
    cold, warm = totals
    assert (cold["state_loads"], warm["state_loads"]) == (0, 1)
    assert warm["spec_steps"] < cold["spec_steps"]


@pytest.mark.slow
def test_two_workers_draft_with_a_model(slice_dir: str, expected: list[list[int]], tmp_path: Path) -> None:
    """The target is its own draft, a worker has half of either; drawn trees need the same noise."""
    method = {"method": "dyspec", "model": slice_dir, "num_speculative_tokens": 8, "max_depth": 4}
    actual, counters = run(slice_dir, {**method, "budget": "fixed"}, tmp_path / "drafts")
    assert_same_outputs(expected, actual)
    assert counters[1] == {}
    assert counters[0]["fallbacks:proposer_error"] == 0
    # Most steps put out a path of four and the target's own.
    assert counters[0]["spec_emitted_tokens"] > 3 * counters[0]["spec_steps"]


@pytest.mark.slow
def test_two_workers_begin_behind_an_exit(slice_dir: str, expected: list[list[int]], tmp_path: Path) -> None:
    """Each has half of what an exit handed out, and all exits are asked what they would have said."""
    method = {"method": "del", "exits": [1], "num_speculative_tokens": 4, "watch_every": 2, "budget": "fixed"}
    actual, counters = run(slice_dir, method, tmp_path / "exits")
    assert_same_outputs(expected, actual)
    assert counters[1] == {}
    assert counters[0]["fallbacks:proposer_error"] == 0
    assert counters[0]["spec_accepted_tokens"] > 20
