# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-ext demo`` prints at its end."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from vllm_ext.cli.demo import _Column, _summary
from vllm_ext.demo.servers import Answer

COUNTERS = {
    "vllm:generation_tokens_total": 18000.0,
    "vllm:iteration_tokens_total_count": 9000.0,
    "vllm_ext:spec_draft_tokens_total": 123456.0,
    "vllm_ext:spec_accepted_tokens_total": 12345.0,
}


def column(label: str, texts: list[str], seconds: float) -> _Column:
    server: Any = SimpleNamespace(label=label, metric=COUNTERS.__getitem__)
    return _Column(server, answers=[Answer(text, 101, seconds) for text in texts])


def test_the_table_is_whole_at_80_columns() -> None:
    seen = io.StringIO()
    plain, other = column("plain vLLM", ["a", "b"], 2.0), column("token_recycling", ["a", "c"], 1.0)
    assert _summary(Console(file=seen, width=80), [plain, other]) == 1
    lines = [line.rstrip() for line in seen.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    rows = {line[:16].strip(): line[16:].split() for line in lines}
    assert rows["plain vLLM"] == ["50.0", "1.00x", "2.00", "123456", "12345"]
    assert rows["token_recycling"] == ["100.0", "2.00x", "2.00", "123456", "12345", "1", "of", "2"]
