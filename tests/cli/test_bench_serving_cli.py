# SPDX-License-Identifier: Apache-2.0
"""Options, tables and page of ``vllm-ext bench`` over HTTP, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from html_page import HOSTILE, Page
from typer.testing import CliRunner

pytest.importorskip("vllm")
from vllm_ext.bench.load import Load, Reply, Turn
from vllm_ext.bench.serving_stats import summarise
from vllm_ext.cli.main import app
from vllm_ext.report.bench_page import html

MODEL_AND_PROMPTS = ["--model", "M", "--prompts", "p.jsonl"]


def turn(wall_s: float, steps: float, gap_s: float) -> Turn:
    reply = Reply(0, "text", 5, 7, 0.1, 0.1 + 4 * gap_s, [gap_s] * int(steps))
    counted = {"drafts": 1.0, "draft_tokens": 8.0, "accepted_tokens": 2.0, "engine_steps": steps}
    return Turn([reply], wall_s, counted, [])


def document(label: str = "fast") -> dict[str, Any]:
    plain, ours = [[turn(0.5, 4.0, 0.1)]], [[turn(0.25, 2.0, 0.05)]]
    rows = [
        summarise(name, Load(flying), rounds, plain, {}, compared=True)
        for flying in (1, 8)
        for name, rounds in (("plain", plain), (label, ours))
    ]
    environment = {"model": "folder/model", "dtype": "float32", "command_line": ["vllm-ext", "bench"]}
    return {"environment": environment, "notices": ["said"], "serving": rows}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--goodput ttft:5", "--goodput goes with servers; add --concurrency"),
        ("--ignore-eos", "--ignore-eos goes with servers"),
        ("--concurrency 1 --batch-size 1", "--batch-size is not allowed with --concurrency"),
        ("--request-rate 1 --workload repeat", "--workload is not allowed with --request-rate"),
        ("--url http://h:1 --methods ngram", "--methods is not allowed with --url"),
        ("--url http://h:1 --no-compile", "--compile is not allowed with --url"),
        ("--url h:1", "allowed: LABEL=http://host:port"),
        ("--concurrency 0", "positive integers, each once"),
        ("--concurrency 1 --goodput itl:5", "ttft:MS, tpot:MS, e2el:MS"),
        ("--concurrency 1 --input-tokens 2000", "do not fit into --max-model-len=2048"),
    ],
)
def test_options_are_refused_before_anything_starts(options: str, said: str) -> None:
    result = CliRunner().invoke(app, ["bench", *MODEL_AND_PROMPTS, *options.split()])
    assert result.exit_code == 2
    assert said in result.output.replace("\n", " ")


def test_the_page_shows_each_load() -> None:
    page = Page(html([("out.json", document())]))
    tables = {caption.partition(":")[0]: rows for caption, rows in page.tables.items()}
    assert "2.00x" in str(tables["Concurrency 1"])
    assert set(tables) >= {"Concurrency 1", "Concurrency 8"}
    assert "50 / 50 / 50" in str(tables["Concurrency 8"])
    assert "2 of 2 answers are plain's to the letter" in page.text.replace("\u2019", "'")
    assert page.svgs


def test_benches_of_both_kinds_stand_on_one_page() -> None:
    data = Path(__file__).parents[1] / "data" / "bench-batch-1.json"
    documents = [("a.json", json.loads(data.read_text())), ("b.json", document())]
    assert html(documents).count("<section>") == 2


def test_a_label_cannot_break_the_page() -> None:
    assert "alert" not in "".join(name for name, _ in Page(html([("x", document(HOSTILE))])).elements)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"serving": [{"label": "a"}]}, "0.load"),
        ({"serving": []}, "no row"),
        ({"environment": None}, "does not say its environment"),
        ({"serving": [{"load": "x", "label": "a", "requests": 1}]}, "ttft_p50_ms"),
    ],
)
def test_files_that_are_none_are_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"out\.json: .*{said}"):
        html([("out.json", document() | change)])
