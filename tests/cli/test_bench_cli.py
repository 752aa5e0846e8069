# SPDX-License-Identifier: Apache-2.0
"""``vllm-ext bench`` and ``vllm-ext report``: which files they write, without an engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_figures import invoke, measured

from vllm_ext.bench.settings import Settings
from vllm_ext.bench.side_by_side import Report
from vllm_ext.cli import bench as bench_cli
from vllm_ext.report.bench_page import html

# Two runs of one comparison, as an older version wrote them.
BATCH_1, BATCH_4 = (Path(__file__).parents[1] / "data" / f"bench-batch-{size}.json" for size in (1, 4))


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: object, wrong: tuple[str, ...] = ()) -> Any:
    monkeypatch.setattr(bench_cli, "run", lambda settings, progress: measured(list(wrong)))
    return invoke("bench", "--model", "M", "--prompts", "p.jsonl", *arguments)


def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("matplotlib", "vllm_ext.report."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delattr("vllm_ext.report.bench_page", raising=False)


@pytest.mark.parametrize(("wrong", "code"), [((), 0), (("prompt 0: another",), 1)])
def test_bench_writes_the_page_of_its_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: tuple[str, ...], code: int
) -> None:
    figures, page = tmp_path / "out.json", tmp_path / "out.html"
    result = bench(monkeypatch, "--json", figures, "--html", page, wrong=wrong)
    assert result.exit_code == code, result.output
    saved = json.loads(figures.read_text())
    assert saved["notices"] == ["one prompt skipped"]
    assert saved["runs"][1]["category"]["qa"]["speedup_vs_plain_rounds"] == [2.0, 2.0]
    assert page.read_text(encoding="utf-8") == html([("out.json", saved)])
    assert "2.00x" in page.read_text(encoding="utf-8")


def test_answers_that_were_drawn_are_not_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def run(settings: Settings, progress: Any) -> Report:
        asked.append(settings.temperature)
        return measured([], None)

    monkeypatch.setattr(bench_cli, "run", run)
    figures, page = tmp_path / "out.json", tmp_path / "out.html"
    options = ("--model", "M", "--prompts", "p.jsonl", "--temperature", 0.7)
    result = invoke("bench", *options, "--json", figures, "--html", page)
    assert result.exit_code == 0, result.output
    assert asked == [0.7]
    saved = json.loads(figures.read_text())
    assert saved["environment"]["temperature"] == 0.7
    assert saved["runs"][1]["identical"] is None
    assert "Answers were not compared" in page.read_text(encoding="utf-8")
    assert "temperature 0.7" in page.read_text(encoding="utf-8")


def test_bench_writes_a_page_without_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert bench(monkeypatch, "--html", tmp_path / "out.html").exit_code == 0
    assert [file.name for file in tmp_path.iterdir()] == ["out.html"]


def test_report_joins_files(tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    result = invoke("report", BATCH_1, BATCH_4, "--html", page)
    assert result.exit_code == 0, result.output
    text = page.read_text(encoding="utf-8")
    assert text == html([(file.name, json.loads(file.read_text())) for file in (BATCH_1, BATCH_4)])
    assert "Throughput and batch size" in text
    assert BATCH_4.name in text


def test_report_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    page, broken = tmp_path / "out.html", tmp_path / "broken.json"
    broken.write_text("{")
    for arguments, message in (
        ((tmp_path / "none.json", "--html", page), "none.json"),
        ((broken, "--html", page), "broken.json: not JSON"),
        ((BATCH_1, "--html", tmp_path / "none" / "out.html"), "its folder does not exist"),
        ((BATCH_1,), "--html"),
    ):
        result = invoke("report", *arguments)
        assert result.exit_code == 2
        assert message in result.output
    assert not page.exists()


def test_without_matplotlib_bench_says_so_before_it_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_matplotlib(monkeypatch)
    started = []
    monkeypatch.setattr(bench_cli, "run", lambda settings, progress: started.append(1))
    for arguments in (["bench", "--model", "M", "--prompts", "p.jsonl"], ["report", BATCH_1]):
        result = invoke(*arguments, "--html", tmp_path / "out.html")
        assert result.exit_code == 2
        assert "needs matplotlib, which is not installed" in result.output
        assert "pip install 'vllm-ext[report]'" in result.output
    assert not started


def test_without_matplotlib_bench_without_a_page_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_matplotlib(monkeypatch)
    assert bench(monkeypatch, "--json", tmp_path / "out.json").exit_code == 0
    assert (tmp_path / "out.json").exists()
