# SPDX-License-Identifier: Apache-2.0
"""The folders and who may import whom: scripts, tests -> vllm_ext -> proposers, samplers -> kernels -> codecs."""

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
    ("folder", "forbidden"),
    [
        ("kernels", ["vllm", "vllm_ext.proposers", "vllm_ext.samplers"]),
        ("codecs", ["vllm", "vllm_ext.proposers", "vllm_ext.samplers", "vllm_ext.kernels"]),
        ("proposers", ["vllm", "vllm_ext.samplers"]),
        ("samplers", ["vllm", "vllm_ext.proposers"]),
    ],
)
def test_import_direction(folder: str, forbidden: list[str]) -> None:
    for file in sorted((ROOT / folder).glob("**/*.py")):
        for name in imported_modules(file):
            assert not any(under(name, package) for package in forbidden), f"{file} imports {name}"
            inside = [f"vllm_ext.{other}" for other in FOLDERS]
            if under(name, "vllm_ext"):
                assert any(under(name, package) for package in inside), f"{file} imports {name}"
            assert not any(under(name, other) for other in FOLDERS), f"{file}: write vllm_ext.{name}"


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
    best = min(
        float(
            subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
        )
        for _ in range(2)
    )
    assert best < 0.050, f"import and register() take {best * 1000:.1f} ms"
