# SPDX-License-Identifier: Apache-2.0
"""Commands of the script, and what a bench may have measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.testing import CliRunner

from vllm_ext.bench.settings import Method
from vllm_ext.bench.side_by_side import Report
from vllm_ext.bench.stats import Answer, Divergence, Round, summarise
from vllm_ext.cli.main import app


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


def measured(wrong: list[str], divergences: Sequence[Divergence] | None = ()) -> Report:
    """What a run of two methods, one twice as fast, comes to."""
    rounds = {
        name: [Round([Answer(0, "qa", 0.0, [1, 2, 3], [1.0, 1.0 + t, 1.0 + 2 * t])], 4.0, 0, 0.0)] * 2
        for name, t in (("plain", 1.0), ("fast", 0.5))
    }
    runs = [
        summarise(Method(name, {}, name), 1, rounds[name], rounds["plain"], divergences, 0.0)
        for name in rounds
    ]
    return Report(dtype="float32", runs=runs, wrong=wrong, notices=["one prompt skipped"])
