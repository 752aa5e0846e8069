# SPDX-License-Identifier: Apache-2.0
"""Our hooks against files of a vLLM that is not imported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm")

from vllm_ext.cli.main import app
from vllm_ext.compat import hooks, hooks_v2
from vllm_ext.compat.source_scan import Files, imports
from vllm_ext.doctor import hooks as hooks_of

FILES = {
    "vllm/__init__.py": "",
    "vllm/base.py": """
import typing
if typing.TYPE_CHECKING:
    from elsewhere import Kept
class Root:
    kept: int
    def inherited(self, a, /, b, *rest, c=1, **more): ...
class Base(typing.Generic[int], Root):
    def __init__(self, one, two): ...
""",
    "vllm/package/__init__.py": "from .inner import Thing as Renamed\nfrom vllm import base\nCHOICES = 1",
    "vllm/package/inner.py": """
from dataclasses import dataclass
from typing import ClassVar, NamedTuple
from ..base import Base
try:
    import missing
except ImportError:
    def made(x): ...
class Thing(Base):
    @classmethod
    def of(cls, what): ...
    @staticmethod
    def free(what): ...
    @property
    def seen(self): ...
    async def later(self, when): ...
@dataclass
class Fields:
    first: int
    shared: ClassVar[int] = 3
    second: str = ""
class More(Fields):
    third: int = 0
class Pair(NamedTuple):
    left: int
    right: int
""",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("unpacked")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "vllm-0.33.1.dist-info").mkdir()
    (folder / "vllm-0.33.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.1\n"
    )
    return Files(folder)


@pytest.mark.parametrize(
    ("module", "name", "parameters"),
    [
        ("vllm.package", "Renamed", ("one", "two")),
        ("vllm.package", "Renamed.of", ("what",)),
        ("vllm.package", "CHOICES", None),
        ("vllm.package", "base.Root.inherited", ("self", "a", "b", "rest", "c", "more")),
        ("vllm.package", "inner.Thing.seen", None),
        ("vllm.package.inner", "Thing.inherited", ("self", "a")),
        ("vllm.package.inner", "Thing.kept", None),
        ("vllm.package.inner", "Thing.free", ("what",)),
        ("vllm.package.inner", "Thing.later", ("self", "when")),
        ("vllm.package.inner", "made", ("x",)),
        ("vllm.package.inner", "Fields", ("first", "second")),
        ("vllm.package.inner", "More", ("first", "second", "third")),
        ("vllm.package.inner", "Pair", ("left", "right")),
        ("vllm.package.inner", "Pair.right", None),
    ],
)
def test_what_is_there_is_found(
    files: Files, module: str, name: str, parameters: tuple[str, ...] | None
) -> None:
    assert files.problem(hooks.Hook(module, name, parameters, "")) is None


@pytest.mark.parametrize(
    ("module", "name", "parameters", "says"),
    [
        ("vllm.nowhere", "x", None, r"missing \(no module vllm\.nowhere\)"),
        ("vllm.package.inner", "gone", None, r"missing \(no gone in vllm\.package\.inner\)"),
        ("vllm.package.inner", "Thing.gone", None, "missing"),
        ("vllm.package", "Renamed.gone", None, "missing"),
        ("vllm.base", "Kept", None, "missing"),  # of another package, which is not there
        (
            "vllm.package",
            "Renamed",
            ("one", "three"),
            r"signature \(one, two\), expected \(one, three, \.\.\.\)",
        ),
        ("vllm.package.inner", "Thing.of", ("cls", "what"), "signature"),
        ("vllm.package.inner", "Fields", ("first", "shared"), "signature"),
        ("vllm.package", "CHOICES", ("x",), "signature of CHOICES is not written out"),
    ],
)
def test_what_has_moved_is_named(
    files: Files, module: str, name: str, parameters: tuple[str, ...] | None, says: str
) -> None:
    problem = files.problem(hooks.Hook(module, name, parameters, ""))
    assert problem is not None
    assert re.search(says, problem), problem


def test_the_version_is_the_wheels(files: Files) -> None:
    assert files.version() == "0.33.1"


@pytest.mark.parametrize("table", hooks_v2.TABLES)
def test_of_the_vllm_that_is_installed_files_say_what_importing_says(table: str) -> None:
    files = Files.installed()
    for hook in hooks_v2.TABLES[table]:
        assert hook.problem() is None, hook
        assert files.problem(hook) is None, hook


@pytest.mark.parametrize("table", hooks_v2.TABLES)
def test_a_wrong_first_parameter_is_seen_in_every_hook_that_has_some(table: str) -> None:
    files = Files.installed()
    for hook in hooks_v2.TABLES[table]:
        if hook.parameters:
            moved = hooks.Hook(hook.module, hook.name, ("moved", *hook.parameters[1:]), "")
            for problem in (files.problem(moved), moved.problem()):
                assert problem is not None, hook
                assert "signature" in problem
        gone = hooks.Hook(hook.module, f"{hook.name}_gone", None, "")
        assert "missing" in str(files.problem(gone))
        assert "missing" in str(gone.problem())


def test_no_table_names_a_symbol_twice() -> None:
    for symbols in hooks_v2.TABLES.values():
        names = [(hook.module, hook.name) for hook in symbols]
        assert len(set(names)) == len(names)


def test_the_doctor_reads_files(files: Files, tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["doctor", "--verbose", "--vllm-files", str(files._folder)])
    assert made.exit_code == 1
    assert made.output.startswith("methods cannot run with these files: ")
    assert "0.33.1" in made.output
    assert "seam V1: Scheduler: missing" in made.output
    assert "warn  seam V2" in made.output
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in made.output
    short = CliRunner().invoke(app, ["doctor", "--vllm-files", str(files._folder)])
    assert short.exit_code == 1
    assert "more: vllm-ext doctor --verbose" in short.output
    assert len(short.output.splitlines()) < 60 < len(made.output.splitlines())
    empty = CliRunner().invoke(app, ["doctor", "--vllm-files", str(tmp_path)])
    assert empty.exit_code == 2
    assert "has no vllm/__init__.py" in empty.output
    whole = list(hooks_of.checks_of_files(Files.installed()._folder))
    assert {check.status for check in whole} == {"ok"}
    tables = {f"{kind} {table}" for kind in ("seam", "body") for table in hooks_v2.TABLES}
    assert {check.what for check in whole} == {"vLLM", *tables, "body imitated", "bodies", "import"}


def test_imports_are_looked_up(files: Files, tmp_path: Path) -> None:
    (tmp_path / "ours.py").write_text(
        "import vllm\nfrom vllm.package import Renamed, gone\nfrom vllm import package\nfrom numpy import x\n"
        "def f():\n    from vllm.nowhere import y\n"
    )
    taken = list(imports(tmp_path))
    assert [name for _, _, name in taken] == ["Renamed", "gone", "package", "y"]
    assert [files.has(module, name) for _, module, name in taken] == [True, False, True, False]
