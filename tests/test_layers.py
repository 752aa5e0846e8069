# SPDX-License-Identifier: Apache-2.0
"""The folders and who may import whom: scripts, tests -> vllm_ext -> proposers, samplers, codecs -> kernels."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("proposers", "samplers", "kernels", "codecs")


def imported_modules(file: Path) -> set[str]:
    """Every module a file imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: absolute imports only"
            names.add(node.module or "")
    return names


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_are_linked_namespaces(folder: str) -> None:
    link = ROOT / "vllm_ext" / folder
    assert link.is_symlink(), f"{link} is no symlink (git core.symlinks?)"
    assert link.resolve() == ROOT / folder
    # A regular top-level package `kernels` breaks `import vllm` beside the PyPI package `kernels`.
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        ("kernels", []),
        ("codecs", ["vllm_ext.kernels.block_format"]),
        ("proposers", ["vllm_ext.kernels"]),
        ("samplers", ["vllm_ext.kernels"]),
    ],
)
def test_import_direction(folder: str, others: list[str]) -> None:
    """Of ours a folder imports itself and ``others``; of vLLM nothing."""
    allowed = [f"vllm_ext.{folder}", *others]
    for file in sorted((ROOT / folder).glob("**/*.py")):
        for name in imported_modules(file):
            assert not under(name, "vllm"), f"{file} imports {name}"
            if under(name, "vllm_ext"):
                assert any(under(name, package) for package in allowed), f"{file} imports {name}"
            assert not any(under(name, other) for other in FOLDERS), f"{file}: write vllm_ext.{name}"


ROOMS = sorted(
    folder
    for folder in (ROOT / "vllm_ext").glob("**/")
    if not set(folder.relative_to(ROOT).parts) & {*FOLDERS, "__pycache__"}
)
MOST_FILES, MOST_LINES = 15, 400


def room_of(name: str) -> str:
    """The room of a module of ours; the top one is \"\"."""
    path = ROOT / name.replace(".", "/")
    room = path if path.is_dir() else path.parent
    return ".".join(room.relative_to(ROOT / "vllm_ext").parts)


def imports_of_rooms() -> dict[str, set[str]]:
    """Of each room of `vllm_ext/`, those it imports from, at any depth. The top one may import all, and be imported."""
    found: dict[str, set[str]] = {}
    for folder in ROOMS:
        room = ".".join(folder.relative_to(ROOT / "vllm_ext").parts)
        names: set[str] = set()
        for file in folder.glob("*.py"):
            for name in imported_modules(file):
                if under(name, "vllm_ext"):
                    names.add(room_of(name))
        found[room] = {name for name in names if name not in ("", room) and name.split(".")[0] not in FOLDERS}
    return found


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_has_a_few_files_that_do_one_thing(room: Path) -> None:
    files = [file for file in room.glob("*.py") if file.name != "__init__.py"]
    assert len(files) <= MOST_FILES, f"{room} has {len(files)} files"
    for file in files:
        lines = len(file.read_text().splitlines())
        assert lines <= MOST_LINES, f"{file} has {lines} lines"


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("engine", ["cli", "bench", "report", "training", "doctor", "demo", "features"]),
        ("engine.v1", ["engine.v2"]),
        ("engine.v2", ["engine.v1"]),
        ("config", ["engine", "cli", "features"]),
        ("compat", ["config", "engine", "cli"]),
        ("data", ["engine", "config", "cli"]),
        ("bench", ["report", "cli"]),
        ("training", ["report", "cli"]),
        ("report", ["cli"]),
    ],
)
def test_rooms_import_one_way(room: str, forbidden: list[str]) -> None:
    for name, others in imports_of_rooms().items():
        if under(name, room):
            wrong = {other for other in others if any(under(other, of) for of in forbidden)}
            assert not wrong, f"vllm_ext/{name} imports from {wrong}"


def test_no_circle_of_rooms() -> None:
    left = {room: set(others) for room, others in imports_of_rooms().items() if room}
    while ends := [room for room, others in left.items() if not others & left.keys()]:
        for room in ends:
            del left[room]
    assert not left, f"in a circle, or behind one: {left}"


def test_config_imports_no_torch() -> None:
    """Options are read in every process, also in those that only answer HTTP."""
    script = "import sys; import vllm_ext.config.{0}; assert 'torch' not in sys.modules, '{0}'"
    for file in sorted((ROOT / "vllm_ext" / "config").glob("*.py")):
        subprocess.run([sys.executable, "-c", script.format(file.stem)], check=True, cwd=ROOT)


def test_register_imports_no_torch_and_is_fast() -> None:
    """What every vLLM process pays for having us installed: the entry point's module, then register()."""
    script = """
import sys, time, types
started = time.perf_counter()
import vllm_ext.plugin
imported = time.perf_counter() - started
heavy = {"torch", "vllm", "numba", "triton", "transformers"} & set(sys.modules)
assert not heavy, heavy
# register() runs inside a process that has vLLM's arguments imported; only its own work counts.
from vllm.engine import arg_utils
before = set(sys.modules)
started = time.perf_counter()
vllm_ext.plugin.register()
vllm_ext.plugin.register()
registered = time.perf_counter() - started
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not new, new
print(imported + registered)
"""
    best = float("inf")
    for _ in range(4):  # another process may have the core
        output = subprocess.run(
            [sys.executable, "-c", script], check=True, capture_output=True, text=True
        ).stdout
        best = min(best, float(output))
        if best < 0.050:
            break
    assert best < 0.050, f"import and register() take {best * 1000:.1f} ms"
