# SPDX-License-Identifier: Apache-2.0
"""Who answers when: methods take turns of a few prompts, and each round's turns are one round of the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_ext.bench import side_by_side
from vllm_ext.bench.engine import EncodedPrompt
from vllm_ext.bench.settings import Method, Settings


class FakeEngine:
    """Writes down what it is asked."""

    log: list[tuple[str, str, list[int]]]

    def __init__(self, settings: Settings, method: Method, batch_size: int) -> None:
        self.method = method

    def warm_up(self) -> None:
        pass

    def shutdown(self) -> None:
        self.log.append(("end", self.method.name, []))

    def begin_round(self) -> None:
        self.log.append(("round", self.method.name, []))

    def answer(self, prompts: list[tuple[int, EncodedPrompt]]) -> None:
        self.log.append(("answer", self.method.name, [index for index, _ in prompts]))


def test_methods_take_turns_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, str, list[int]]] = []
    monkeypatch.setattr(FakeEngine, "log", log, raising=False)
    monkeypatch.setattr(side_by_side, "Engine", FakeEngine)
    monkeypatch.setattr(side_by_side, "check_engines", lambda settings: None)
    monkeypatch.setattr(side_by_side, "settle", lambda: True)
    monkeypatch.setattr(side_by_side, "_compare", lambda *_, **__: None)
    monkeypatch.setattr(side_by_side, "set_environment", lambda verbose: None)
    prompts = [EncodedPrompt("", "", [1])] * 16
    monkeypatch.setattr(side_by_side, "encode_prompts", lambda settings, notices: prompts)
    methods = tuple(Method(name, {}, name) for name in ("plain", "a", "b"))
    settings = Settings("model", (Path("prompts"),), methods, batch_sizes=(1,), rounds=2)
    units: list[tuple[int, int]] = []
    report: Any = side_by_side.run(settings, lambda what, done, total: units.append((done, total)))
    answers = [(name, members) for kind, name, members in log if kind == "answer"]
    even, odd = list(range(0, 16, 2)), list(range(1, 16, 2))
    parts = [even[:4], even[4:], odd[:4], odd[4:]]
    # Each part is answered by all before the next one is, and another begins each time.
    assert [members for _, members in answers] == [part for part in parts for _ in methods]
    assert [name for name, _ in answers[::3]] == ["plain", "a", "a", "b"]
    assert all({name for name, _ in answers[i : i + 3]} == {"plain", "a", "b"} for i in range(0, 12, 3))
    assert [kind for kind, _, _ in log].count("round") == 2 * len(methods)
    assert units == [(0, 0), *((done, 15) for done in range(15))]  # arguments are checked first
    assert report.notices == []
