# SPDX-License-Identifier: Apache-2.0
"""Bodies of vLLM's functions: what counts as a change, and that those which are installed have been read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm_ext.compat import bodies
from vllm_ext.compat.hooks import Hook
from vllm_ext.compat.source_scan import Files
from vllm_ext.doctor import hooks as hooks_of

WRITTEN = '''
@jit
def f(a: int, b=1, *, c=None) -> int:
    """What it does."""
    # And why.
    for x in range(a):
        if x > b:
            return (x, None, f"{x}!")
    return a
'''


def digest(text: str) -> str:
    return bodies.digest(ast.parse(text).body[0])


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ('    """What it does."""\n', ""),
        ('"""What it does."""', '"""Else."""'),
        ("    # And why.\n", ""),
        ("a: int", "a"),
        (" -> int", ' -> "list[int]"'),
        ("range(a)", "range(\n        a,\n    )"),
    ],
)
def test_what_is_said_about_a_function_is_no_change(was: str, now: str) -> None:
    assert WRITTEN.count(was) == 1
    assert digest(WRITTEN.replace(was, now)) == digest(WRITTEN)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("@jit\n", ""),
        ("b=1", "b=2"),
        ("b=1", "b=True"),
        ("c=None", "c=0"),
        ("*, c", "c"),
        ("x > b", "x >= b"),
        ("None,", "True,"),
        ("!", "?"),
        ("return a\n", "return None\n"),
        ("return a\n", "return\n"),
        ("def f", "async def f"),
        ("            return (x", "            (x"),
    ],
)
def test_what_a_function_does_is_a_change(was: str, now: str) -> None:
    assert was in WRITTEN
    assert digest(WRITTEN.replace(was, now)) != digest(WRITTEN)


def test_all_bodies_that_are_installed_have_been_read() -> None:
    files = Files.installed()
    version = files.version().partition("+")[0]
    found = list(bodies.bodies(files))
    assert {body.name for body in found} <= set(bodies.read())
    assert [body for body in found if version not in body.read_in] == []
    tables = {body.table for body in found}
    assert tables == {"V1", "V2", "CUDA", "recurrent", "imitated"}
    named = {f"{hook.module}.{hook.name}" for hook in bodies.IMITATED}
    assert named == {body.name for body in found if body.table == "imitated"}


def test_each_body_is_of_both_versions_or_has_come_or_gone() -> None:
    for name, versions in bodies.read().items():
        assert set(versions) <= {"0.32.0", "0.33.0"}, name
    both = [versions for versions in bodies.read().values() if len(versions) == 2]
    changed = [versions for versions in both if len(set(versions.values())) == 2]
    assert len(both) > 100
    assert 0 < len(changed) < len(both) / 3


def test_a_class_that_is_called_has_its_constructors_body(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text(
        "class Root:\n    def __init__(self, a): self.a = a\nclass Leaf(Root):\n    def f(self): pass\n"
    )
    files = Files(tmp_path)
    made = files.function(Hook("vllm.a", "Leaf", ("a",), ""))
    assert made is not None
    assert ast.unparse(made) == "def __init__(self, a):\n    self.a = a"
    assert files.function(Hook("vllm.a", "Leaf", None, "")) is None
    assert files.function(Hook("vllm.a", "Leaf.gone", None, "")) is None


def test_the_doctor_names_a_body_that_nobody_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.v1.worker.gpu_worker.Worker.init_device"
    assert len(set(bodies.read()[name].values())) == 2
    files = Files.installed()
    lines = {check.found for check in hooks_of._bodies(files)}
    assert f"{name}: as in 0.32.0, not as in 0.33.0" in lines
    known = {**bodies.read(), name: {"0.32.0": "0" * 12}}
    monkeypatch.setattr(bodies, "read", lambda: known)
    found = list(hooks_of._bodies(files))
    (check,) = [check for check in found if check.status == "warn"]
    assert (check.what, check.found) == ("body V1", f"{name}: not as we have read it in 0.32.0")
    assert "vllm-ext bench --dtype float32" in check.way_out
    count = len(list(bodies.bodies(files)))
    assert found[-1].found.startswith(f"{count - 1} of {count} functions")
