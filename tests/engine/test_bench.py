# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext bench`` on real engines: two methods, four prompts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

COMMAND = "import typer; from vllm_ext.cli.bench import bench_command; typer.run(bench_command)"
QUESTIONS = (
    ("list", "List the planets, one a line, then list them again."),
    ("list", "Count from one to ten in words."),
    ("chat", "What is the capital of France?"),
    ("chat", "Write a sentence about rain."),
)
ENVIRONMENT_KEYS = {
    "python",
    "platform",
    "cpu_model",
    "cores",
    "vllm",
    "torch",
    "vllm_ext",
    "model",
    "dtype",
    "max_tokens",
    "temperature",
    "rounds",
    "limit",
    "workload",
    "prompt_files",
    "command_line",
    "date",
}
RUN_KEYS = {
    "method",
    "label",
    "options",
    "batch_size",
    "decode_tokens_per_s",
    "decode_tokens_per_s_rounds",
    "speedup_vs_plain",
    "speedup_vs_plain_rounds",
    "e2e_tokens_per_s",
    "e2e_tokens_per_s_rounds",
    "e2e_speedup_vs_plain",
    "ttft_ms",
    "tokens_per_step",
    "tokens_per_step_rounds",
    "draft_tokens_per_step",
    "draft_tokens_per_step_rounds",
    "draft_time_share",
    "identical",
    "tie_divergences",
    "wrong_divergences",
    "wrong",
    "prompts",
    "category",
}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the bench's settings for vLLM must come before vLLM's import."""
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        check=False,
    )


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": text, "category": category}) for category, text in QUESTIONS]
    file.write_text("\n".join(lines))
    return file


def test_plain_and_ngram(slice_dir: str, prompt_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    # float32: the output check then allows no ties.
    result = bench(
        f"--model={slice_dir}",
        f"--prompts={prompt_file}",
        "--methods=ngram(num_speculative_tokens=3)",
        "--rounds=2",
        "--max-tokens=16",
        "--dtype=float32",
        f"--json={out}",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ngram(num_speculative_tokens=3)" in result.stdout

    report = json.loads(out.read_text())
    assert set(report) == {"environment", "notices", "runs"}
    assert set(report["environment"]) == ENVIRONMENT_KEYS
    assert report["environment"]["dtype"] == "float32"
    plain, ngram = report["runs"]
    assert (plain["method"], ngram["method"]) == ("plain", "ngram")
    assert ngram["options"] == {
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    for run in (plain, ngram):
        check_figures(run)
    assert plain["speedup_vs_plain_rounds"] == [1.0, 1.0]
    assert (plain["tokens_per_step"], plain["draft_tokens_per_step"]) == (1.0, 0.0)
    assert plain["draft_time_share"] == 0.0
    # The first prompt repeats itself, so something was drafted, and drafting takes time.
    assert 0 < ngram["draft_tokens_per_step"] <= 3
    assert 1.0 < ngram["tokens_per_step"] <= 1 + ngram["draft_tokens_per_step"]
    assert 0 < ngram["draft_time_share"] < 1
    assert ngram["speedup_vs_plain_rounds"] == [
        pytest.approx(ours / theirs)
        for ours, theirs in zip(
            ngram["decode_tokens_per_s_rounds"], plain["decode_tokens_per_s_rounds"], strict=True
        )
    ]


def check_figures(run: dict[str, Any]) -> None:
    assert set(run) == RUN_KEYS
    assert (run["batch_size"], run["prompts"], run["identical"]) == (1, 4, 4)
    assert run["tie_divergences"] == run["wrong_divergences"] == 0
    first, second = run["decode_tokens_per_s_rounds"]
    assert run["decode_tokens_per_s"] == pytest.approx((first + second) / 2)
    # End to end has the prefill on top, and one token more for each request.
    assert 0 < run["e2e_tokens_per_s"] < 2 * run["decode_tokens_per_s"]
    assert run["ttft_ms"] > 0
    assert {name: entry["prompts"] for name, entry in run["category"].items()} == {
        "chat": 2,
        "list": 2,
    }
    # At batch size 1 the rounds' decode time is the sum over requests, as in the categories.
    speeds = [entry["decode_tokens_per_s"] for entry in run["category"].values()]
    assert all(len(entry["speedup_vs_plain_rounds"]) == 2 for entry in run["category"].values())
    assert min(speeds) <= max(first, second)
    assert max(speeds) >= min(first, second)


@pytest.mark.slow
def test_a_refused_method_ends_the_bench_with_the_reason(slice_dir: str, prompt_file: Path) -> None:
    result = bench(
        f"--model={slice_dir}", f"--prompts={prompt_file}", "--methods=no_such_method", "--rounds=1"
    )
    assert result.returncode == 1
    assert "no_such_method" in result.stderr


def test_wrong_input_is_refused_before_an_engine_starts(slice_dir: str, prompt_file: Path) -> None:
    result = bench(f"--model={slice_dir}", f"--prompts={prompt_file}", "--rounds=9")
    assert result.returncode == 2
    assert "--rounds=9" in result.stderr
