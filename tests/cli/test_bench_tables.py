# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-ext bench`` says: what it refuses before an engine starts, progress, tables, and what is doubtful."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from bench_figures import invoke, measured
from rich.console import Console

from vllm_ext.bench import side_by_side
from vllm_ext.cli import bench
from vllm_ext.cli.output.bench_tables import progress, show
from vllm_ext.report.doubts import doubts
from vllm_ext.report.saved_runs import Run

LONG = "token_recycling(matrix_width=8, context_tokens=4, num_speculative_tokens=16, budget=goodput)"
OTHER = "token_recycling(matrix_width=2, context_tokens=4, num_speculative_tokens=16, budget=goodput)"


def entry(label: str, speed: float, tokens_per_step: float, *rounds: float) -> dict[str, Any]:
    figures = measured([]).runs[1]
    return {
        **figures,
        "label": label,
        "batch_size": 128,
        "decode_tokens_per_s": 12345.6,
        "decode_tokens_per_s_rounds": list(rounds),
        "speedup_vs_plain": speed,
        "speedup_vs_plain_rounds": [speed] * 2,
        "tokens_per_step": tokens_per_step,
        "tokens_per_step_rounds": [tokens_per_step] * 2,
        "identical": 400,
        "tie_divergences": 80,
    }


def shown(*entries: dict[str, Any]) -> list[str]:
    seen = io.StringIO()
    show(Console(file=seen, width=80), entries)
    return seen.getvalue().splitlines()


def test_names_are_never_cut() -> None:
    lines = shown(entry("plain", 1.0, 1.0), entry(LONG, 1.9, 2.0), entry(OTHER, 1.8, 2.0))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "\u2026" not in text
    words = " ".join(text.split())
    assert f"token_recycling 1: {LONG}" in words
    assert f"token_recycling 2: {OTHER}" in words
    for row, speed in (("token_recycling 1", "1.90x"), ("token_recycling 2", "1.80x")):
        assert any(row in line and speed in line and "400/80/0" in line for line in lines)


def test_a_terminal_that_is_too_narrow_cuts_nothing() -> None:
    entries = entry("plain", 1.0, 1.0), entry("token_recycling", 1.9, 2.0)
    seen = io.StringIO()
    show(Console(file=seen, width=40), entries)
    assert "\u2026" not in seen.getvalue()
    wide = [line.rstrip() for line in shown(*entries) if "token_recycling" in line]
    assert wide[0] in [line.rstrip() for line in seen.getvalue().splitlines()]


def test_what_drafts_cannot_have_done_is_doubtful() -> None:
    seen = shown(entry("plain", 1.0, 1.0, 50.0, 55.0), entry("hybrid", 2.78, 1.23))
    assert any("2.78x ?" in line for line in seen)
    (line,) = [line for line in seen if line.startswith("doubtful:")]
    assert "hybrid: 2.78x at 1.23 tokens a step is more than drafts can do" in line
    assert not [line for line in shown(entry("hybrid", 1.47, 1.23)) if "doubtful" in line or "?" in line]
    assert [line for line in shown(entry("hybrid", 1.48, 1.23)) if "doubtful" in line]
    # Each round by its own tokens: of repeated prompts the first round has few, and weighs the most in all of them.
    repeated = {"speedup_vs_plain_rounds": [1.6, 8.0, 11.2], "tokens_per_step_rounds": [1.7, 8.1, 11.0]}
    assert not [line for line in shown(entry("hybrid", 8.0, 4.4) | repeated) if "doubtful" in line]


@pytest.mark.parametrize(("rounds", "doubtful"), [((50.0, 60.0), False), ((50.0, 61.0), True), ((), False)])
def test_a_plain_that_wavers_is_doubtful(rounds: tuple[float, ...], doubtful: bool) -> None:
    figures = {"batch_size": 4, "decode_tokens_per_s_rounds": rounds}
    run = Run.model_validate({"label": "plain", **figures})
    assert bool(doubts([run])) == doubtful
    if doubtful:
        assert "batch size 4, plain: its rounds differ by 22% (50.0 to 61.0 tokens/s)" in doubts([run])[0]
    assert not doubts([Run.model_validate({"label": "hybrid", **figures})])


def test_without_a_terminal_there_is_a_line_for_each_round() -> None:
    seen = io.StringIO()
    begun = ["batch 1: starting plain", "batch 1: starting hybrid(a=1, b=2)"]
    begun += [f"batch 1: round {number} of 2, {method}" for number in (1, 2) for method in ("plain", "x") * 5]
    with progress(Console(file=seen, width=80)) as begin:
        begin("checking all arguments", 0, 0)
        for done, what in enumerate(begun):
            begin(what, done, len(begun))
    lines = seen.getvalue().splitlines()
    assert [line.partition("  ")[2].lstrip() for line in (line.lstrip() for line in lines)] == [
        "checking all arguments",
        "batch 1: starting plain (0 of 22 done)",
        "batch 1: starting hybrid(a=1, b=2) (1 of 22 done)",
        "batch 1: round 1 of 2 (2 of 22 done)",
        "batch 1: round 2 of 2 (12 of 22 done)",
    ]


def test_it_ends_with_what_was_written_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "run", lambda settings, begin: measured([]))
    options = (
        "--model",
        "M",
        "--prompts",
        "p.jsonl",
        "--json",
        tmp_path / "a.json",
        "--html",
        tmp_path / "a.html",
    )
    result = invoke("bench", *options)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-2:] == [f"figures: {tmp_path}/a.json", f"page: {tmp_path}/a.html"]


PROMPTS = Path(__file__).parents[1] / "data" / "prompts.jsonl"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--methods", "hybird"], "Did you mean 'hybrid'?"),
        (["--methods", "hybrid(num_speculative_tokens=0)"], "num_speculative_tokens=0 is not allowed"),
        (["--methods", "rest(datastore=/nowhere)"], "datastore='/nowhere'"),
        (["--methods", "ngram(prompt_lookup_mox=3)"], "prompt_lookup_mox"),
        (["--dtype", "float31"], "dtype"),
        (["--max-model-len", "1000000"], "max_model_len"),
        (["--batch-size", "0"], "--batch-size='0'"),
        (["--workload", "fesh"], "--workload='fesh'"),
        (["--temperature", "inf"], "--temperature=inf"),
        (["--json", "/"], "--json=/ is a folder"),
        (["--json", "/nowhere/a.json"], "its folder does not exist"),
        (["--json", "same", "--html", "./same"], "are one file"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_arguments_are_refused_before_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slice_dir: str, options: list[str], says: str
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr(side_by_side, "Engine", lambda *args: started.append(args))
    usual = ("--model", slice_dir, "--prompts", PROMPTS, "--max-model-len", 256, "--max-tokens", 8)
    result = invoke("bench", *usual, *options)
    assert result.exit_code == 2, result.output
    assert says in result.output
    assert "Traceback" not in result.output
    assert not started
