# SPDX-License-Identifier: Apache-2.0
"""How commands behave: what fits into 80 columns, what is said first, and nothing ends in a traceback."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from vllm_ext.cli import doctor
from vllm_ext.cli.main import app
from vllm_ext.cli.output.console import _clock, progress_on
from vllm_ext.codecs.registry import CODECS
from vllm_ext.doctor import environment
from vllm_ext.doctor.check import Check
from vllm_ext.proposers.registry import METHODS
from vllm_ext.samplers.registry import RULES

COLUMNS = 80
LISTS: dict[str, Mapping[str, str]] = {"methods": METHODS, "rules": RULES, "kv methods": CODECS}
ROOT = Path(__file__).parents[2]


def invoke(*arguments: object) -> Any:
    return CliRunner(env={"COLUMNS": str(COLUMNS)}).invoke(app, list(map(str, arguments)))


def longest(text: str) -> int:
    return max(map(len, text.splitlines()))


@pytest.mark.parametrize("command", LISTS)
def test_a_list_has_a_line_for_each(command: str) -> None:
    lines = invoke(*command.split()).output.splitlines()
    assert [line.split()[0] for line in lines[: len(LISTS[command])]] == list(LISTS[command])
    assert len(lines) == len(LISTS[command]) + 2
    assert longest("\n".join(lines)) <= COLUMNS


@pytest.mark.parametrize("command", LISTS)
def test_a_name_has_its_options_and_common_ones_once(command: str) -> None:
    everything = {entry["name"]: entry for entry in json.loads(invoke(*command.split(), "--json").output)}
    assert list(everything) == list(LISTS[command])
    for name, entry in everything.items():
        shown = invoke(*command.split(), name)
        assert shown.exit_code == 0
        body, _, serve = shown.output.rpartition("\nserve with: ")
        assert longest(body) <= COLUMNS
        groups = [group for group in entry.values() if isinstance(group, list)]
        assert len(groups) == (3 if command == "methods" else 2)
        names = [option["name"] for group in groups for option in group]
        for option in names:  # some are both a server's and a request's
            assert body.count(f"\n  {option}  ") == names.count(option), option
        given = json.loads(serve.partition("'")[2].rpartition("'")[0])
        required = [option["name"] for option in groups[0] if option["default"] == "required"]
        assert all(f'"{option}"' in json.dumps(given) for option in required)


@pytest.mark.parametrize(
    ("command", "name", "near"),
    [("methods", "hybird", "hybrid"), ("rules", "doola", "dola"), ("kv methods", "kiwi", "kivi")],
)
def test_the_nearest_name_comes_first(command: str, name: str, near: str) -> None:
    shown = invoke(*command.split(), name)
    assert shown.exit_code != 0
    assert f"'{name}'. Did you mean '{near}'? " in shown.output
    listed = shown.output.rpartition(": ")[2].strip().rstrip(".").split(", ")
    assert listed == list(LISTS[command])


def pages(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from pages(below, (*path, name))


PAGES = dict(pages(typer.main.get_command(app)))


@pytest.mark.parametrize("path", PAGES, ids=" ".join)
def test_a_help_page_has_all_of_its_text_in_80_columns(path: tuple[str, ...]) -> None:
    shown = invoke(*path, "--help")
    assert shown.exit_code == 0
    assert invoke(*path, "-h").output == shown.output
    assert longest(shown.output) <= COLUMNS
    text = "".join(shown.output.split())
    for parameter in PAGES[path].params:
        written = getattr(parameter, "help", None) or ""
        assert "".join(written.split()) in text, written
    assert "".join((PAGES[path].help or "").split()) in text
    assert not [line for line in shown.output.partition("Commands:")[2].splitlines() if line.endswith("...")]


def test_there_are_pages_of_all_commands() -> None:
    assert len(PAGES) >= 20
    assert "[answers, longest]" in " ".join(invoke("trie", "build", "-h").output.split())


def test_the_model_has_one_name() -> None:
    of_models = re.compile("^(The|Your)? ?[Mm]odel\\b|^The model that is served")
    for path, command in PAGES.items():
        for parameter in command.params:
            if (
                of_models.match(getattr(parameter, "help", None) or "")
                and "original" not in parameter.opts[0]
            ):
                assert parameter.opts[0] == "--model", path


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["methods", "hybird"], 2),
        (["bench", "--model", "M", "--prompts", "none", "--batch-size", "0"], 2),
        (["report", "none.json", "--html", "a.html"], 2),
        (["datastore", "build", "--model", "M", "--output", "a", "none"], 2),
        (["datastore", "info", "none"], 1),
        (["datastore", "merge", "none"], 2),
        (["trie", "build", "--model", "M", "--output", "a", "none.txt"], 2),
        (["trie", "info", "none"], 1),
        (["kv", "report", "none", "--method", "kiwi"], 2),
        (["kv", "page", "none", "--html", "a.html"], 2),
        (["train", "draft", "--model", "/nowhere", "--output", "a"], 2),
        (["train", "exits", "--model", "/nowhere", "--output", "a", "--exits", "4"], 2),
        (["caad", "build", "none", "--model", "M", "--output", "a"], 2),
        (["svdecode", "build", "none", "--model", "M", "--original", "N", "--output", "a"], 2),
        (["adadec", "learn", "none", "--model", "M"], 2),
        (["schema", "none"], 2),
        (["demo", "--method", "hybird"], 2),
        (["demo", "--method", "{"], 2),
        (["demo", "--prompts", "none"], 2),
        (["doctor", "--vllm-files", "none"], 2),
        (["nothing"], 2),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_exit_codes_are_alike(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = invoke(*arguments)
    assert shown.exit_code == code, shown.output
    assert shown.exception is None or isinstance(shown.exception, SystemExit)
    assert "rror" in shown.output


def test_without_a_terminal_progress_is_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("vllm_ext.cli.output.console.time.monotonic", lambda: now[0])
    seen = io.StringIO()
    with progress_on(Console(file=seen, width=80)) as report:
        for done in range(101):
            now[0] = 3.0 * done
            report("reading", done, 100)
        report("reading", 100, 100)
        report("sorting", 0, 10)
    assert seen.getvalue().splitlines() == [
        "reading: 0%, 0:00",
        *(
            f"reading: {share}%, {_clock(3 * share)}, {_clock(300 - 3 * share)} left"
            for share in range(10, 100, 10)
        ),
        "reading: 100%, 5:00",
        "sorting: 0%, 0:00",
    ]


CHECKS = [
    Check("ok", "Python", "3.11"),
    Check("ok", "vLLM", "0.32"),
    *[Check("ok", "seam V1", f"symbol {number}: why") for number in range(60)],
    Check("ok", "trees", "in float32, at length", short="in float32"),
    Check("warn", "a library", "not there", "install it"),
]


def test_the_doctor_says_the_verdict_first_and_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "checks", lambda: iter(CHECKS))
    short = invoke("doctor")
    assert short.exit_code == 0
    assert short.output.splitlines() == [
        "all methods can run here, 1 warning",
        "  ok  versions: Python 3.11, vLLM 0.32",
        "  ok  trees: in float32",
        "  ok  hooks: 60 of 60 symbols of vLLM are as we know them",
        "warn  a library: not there",
        "      -> install it",
    ]
    verbose = invoke("doctor", "--verbose").output
    assert all(check.found in verbose for check in CHECKS)
    report = json.loads(invoke("doctor", "--json").output)
    assert (report["ok"], report["verdict"]) == (True, "all methods can run here, 1 warning")
    assert [check["found"] for check in report["checks"]] == [check.found for check in CHECKS]


def test_the_doctor_names_a_few_of_many_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [Check("fail", "seam V1", f"symbol {number}: missing") for number in range(30)]
    monkeypatch.setattr(environment, "checks", lambda: iter([*CHECKS, *missing]))
    short = invoke("doctor")
    assert short.exit_code == 1
    assert short.output.startswith("methods cannot run here: 30 failed, first seam V1\n")
    assert short.output.count("missing") == doctor.SHOWN
    assert "27 more: vllm-ext doctor --verbose" in short.output
    assert invoke("doctor", "--verbose").output.count("missing") == 30
    assert json.loads(invoke("doctor", "--json").output)["ok"] is False


def test_a_check_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(environment, "_kernels", broken)
    found = {check.what: check for check in environment.checks()}
    assert found["kernels"].status == "fail"
    assert "libcuda.so.1" in found["kernels"].found
    assert "demo model" in found  # the checks behind it are made


BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise {error}

sys.meta_path.insert(0, Blocker())
sys.argv = ["vllm-ext", *{arguments!r}]
{before}
from vllm_ext.entry import main
main()
"""


def run_without(package: str, error: str, *arguments: str, before: str = "") -> Any:
    script = BLOCKER.format(package=package, error=error, arguments=arguments, before=before)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(COLUMNS)}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.parametrize(
    ("package", "error", "says"),
    [
        ("torch", "ModuleNotFoundError(name, name=name)", "fail  torch: not installed"),
        ("torch", "ImportError('libgomp.so.1: no such file')", "fail  torch: cannot be imported: libgomp"),
        ("torch", "OSError('libcudart.so: truncated')", "fail  torch: OSError: libcudart.so: truncated"),
        ("vllm", "ModuleNotFoundError(name, name=name)", "fail  vLLM: "),
    ],
)
def test_the_doctor_says_what_is_missing(package: str, error: str, says: str) -> None:
    done = run_without(package, error, "doctor")
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    what = "torch" if package == "torch" else "vLLM"
    assert done.stdout.startswith(f"methods cannot run here: 1 failed, first {what}\n")
    assert says in done.stdout
    assert "pip install 'vllm-ext[cuda]'" in done.stdout
    assert longest(done.stdout) <= COLUMNS
    as_json = run_without(package, error, "doctor", "--json")
    assert json.loads(as_json.stdout)["ok"] is False
    assert as_json.returncode == 1


def test_an_old_python_is_told_in_a_line() -> None:
    done = run_without("vllm", "ImportError", "doctor", before="sys.version_info = (3, 9, 18, 'final', 0)")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "vllm-ext cannot run here: Python" in done.stderr
    assert "Python 3.10 or newer" in done.stderr


def test_a_missing_dependency_is_named() -> None:
    done = run_without("rich", "ModuleNotFoundError(name, name='rich')", "methods")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "rich is not installed" in done.stderr


def test_what_is_terminated_shuts_its_engines_down() -> None:
    """They are not daemons of its process: whoever ends without a word leaves them running."""
    program = """
import sys, time
from vllm_ext import entry
from vllm_ext.cli.main import app

@app.command()
def wait():
    try:
        print("engines", flush=True)
        time.sleep(60)
    finally:
        print("shut down")

sys.argv = ["vllm-ext", "wait"]
entry.main()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "engines\n"
        process.terminate()
        assert process.stdout.read() == "shut down\n"
    assert process.returncode == 143
