# SPDX-License-Identifier: Apache-2.0
"""What the docs promise: links that lead somewhere, options as the registries have them, metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ext.engine import counters
from vllm_ext.proposers.registry import METHODS
from vllm_ext.samplers.registry import RULES, load_rule
from vllm_ext.samplers.steering import SteeringRule

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for page in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("scripts/**/*.md"),
        *ROOT.glob("*/README.md"),
    ]
    if ".venv" not in page.parts
)
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    found = set()
    for heading in re.findall(r"(?m)^#+ +(.*)$", text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        found.add(re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    for match in LINK.finditer(text):
        target = match.group(1) or match.group(2)
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {target}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "usage.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "usage.md" or f"({page.name})" in index, page.name


def test_options_are_the_registries() -> None:
    script = ROOT / "scripts" / "options_page.py"
    made = subprocess.run(
        [sys.executable, script], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
    assert made == (ROOT / "docs" / "options.md").read_text(), (
        f"python {script.relative_to(ROOT)} > docs/options.md"
    )


def test_what_runs_where_is_what_was_tested() -> None:
    script = ROOT / "scripts" / "runner_page.py"
    made = subprocess.run(
        [sys.executable, script], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
    page = (ROOT / "docs" / "runners.md").read_text()
    assert made == page, f"python {script.relative_to(ROOT)} > docs/runners.md"
    for test in re.findall(r"`(test_\w+\.py)`", page):
        assert (ROOT / "tests" / "engine" / test).exists(), test


def test_which_models_get_trees_is_what_was_run() -> None:
    script = ROOT / "scripts" / "model_zoo.py"
    made = subprocess.run(
        [sys.executable, script, "--table"], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
    page = (ROOT / "docs" / "models.md").read_text()
    assert made == page, f"python {script.relative_to(ROOT)} --table > docs/models.md"


def test_every_method_has_a_row() -> None:
    text = (ROOT / "docs" / "methods.md").read_text()
    cells = " ".join(re.findall(r"(?m)^\| ([^|]*)", text.partition("## What each one does")[2]))
    assert [name for name in METHODS if f"`{name}`" not in cells] == []


def test_every_rule_has_a_section_or_a_row() -> None:
    headings = " ".join(re.findall(r"(?m)^## (.*)$", (ROOT / "docs" / "rules.md").read_text()))
    cells = " ".join(re.findall(r"(?m)^\| ([^|]*)", (ROOT / "docs" / "steering.md").read_text()))
    missing = [
        name
        for name in RULES
        if f"`{name}`" not in (cells if issubclass(load_rule(name), SteeringRule) else headings)
    ]
    assert missing == []


def test_the_first_screen() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert any("pip install" in line for line in lines[:12])
    assert any("vllm-ext doctor" in line for line in lines[:12])


@pytest.mark.parametrize("file", ["grafana.json", "alerts.yml"])
def test_the_dashboard_and_alerts_are_of_metrics_that_exist(file: str) -> None:
    named = set(re.findall(r"vllm_ext:(\w+)", (ROOT / "docs" / file).read_text()))
    known = {
        re.sub(r":.*", "", name) + "_total" if ":" in name or name not in counters.GAUGES else name
        for name in (*counters.COUNTERS, *counters.GAUGES)
    }
    assert named
    assert named <= known, named - known
    assert named <= set(re.findall(r"vllm_ext:(\w+)", (ROOT / "docs" / "metrics.md").read_text()))


def test_the_dashboard_is_json() -> None:
    json.loads((ROOT / "docs" / "grafana.json").read_text())


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus"
)
def test_alerts_fire_when_they_must() -> None:
    subprocess.run(["promtool", "check", "rules", ROOT / "docs" / "alerts.yml"], check=True)
    subprocess.run(["promtool", "test", "rules", ROOT / "tests" / "alerts.yml"], check=True)


def test_each_alert_has_a_test() -> None:
    alerts = re.findall(r"- alert: (\w+)", (ROOT / "docs" / "alerts.yml").read_text())
    tests = (ROOT / "tests" / "alerts.yml").read_text()
    assert alerts
    for alert in alerts:
        expected = re.findall(rf"alertname: {alert}\n? *(exp_alerts:)?", tests)
        assert "exp_alerts:" in expected, f"{alert} must be seen to fire in tests/alerts.yml"
        assert "" in expected, f"{alert} must be seen not to fire in tests/alerts.yml"
