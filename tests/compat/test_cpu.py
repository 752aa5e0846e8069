# SPDX-License-Identifier: Apache-2.0
"""Whether bfloat16 is emulated, and that the doctor says so."""

from __future__ import annotations

import platform

import pytest
import torch

from vllm_ext.compat import cpu
from vllm_ext.doctor import environment


@pytest.mark.parametrize(
    ("machine", "capability", "emulated"),
    [
        ("x86_64", "AVX2", True),
        ("x86_64", "DEFAULT", True),
        ("AMD64", "AVX2", True),
        ("x86_64", "AVX512", False),
        ("aarch64", "DEFAULT", False),
    ],
)
def test_who_emulates(monkeypatch: pytest.MonkeyPatch, machine: str, capability: str, emulated: bool) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert cpu.emulates_bfloat16() == emulated
    warned = [check for check in environment.checks() if check.what == "bfloat16"]
    assert [(check.status, check.way_out) for check in warned] == [("warn", cpu.WAY_OUT)] * emulated
