# SPDX-License-Identifier: Apache-2.0
"""A compiler that is missing is named at start-up and by doctor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ext.compat import compilers


@pytest.mark.parametrize(
    ("device", "environment", "there", "system", "problem"),
    [
        ("cpu", {}, ["g++"], "Linux", None),
        (
            "cpu",
            {},
            ["gcc", "clang++"],
            "Linux",
            "no C++ compiler (g++ is not there), which torch.compile needs",
        ),
        ("cpu", {}, ["clang++"], "Darwin", None),
        ("cpu", {"CXX": "/opt/c++"}, ["/opt/c++"], "Linux", None),
        ("cpu", {"CXX": "/opt/c++"}, ["g++"], "Linux", "no C++ compiler (CXX='/opt/c++' is not there)"),
        ("cuda", {}, ["clang"], "Linux", None),
        ("cuda", {}, ["g++"], "Linux", "no C compiler (gcc or clang is not there), which Triton needs"),
        ("cuda", {"CC": "cc"}, ["gcc"], "Linux", "no C compiler (CC='cc' is not there)"),
    ],
)
def test_the_compiler_that_is_called_is_looked_for(
    device: str, environment: dict[str, str], there: list[str], system: str, problem: str | None
) -> None:
    found = compilers.problem(device, environment, lambda name: name if name in there else None, system)
    assert found is None if problem is None else problem in str(found)


@pytest.mark.parametrize(("mode", "warned"), [(0, False), (3, True)])
def test_an_engine_that_compiles_nothing_needs_none(
    mode: int, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(mode=mode))
    warning = compilers.warning(config, "cpu")
    assert (warning is not None) == warned
    if warned:
        assert "CXX='/nowhere/c++'" in str(warning)
        assert str(warning).endswith("name one in CXX, or pass --enforce-eager.")
