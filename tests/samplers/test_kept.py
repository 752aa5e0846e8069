# SPDX-License-Identifier: Apache-2.0
"""Caches by digest and bytes; how long values are quoted."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from vllm_ext.samplers.kept import ENTRY_BYTES, Kept, digest
from vllm_ext.samplers.messages import quoted
from vllm_ext.samplers.monitor import MonitorParams, MonitorRule


def test_values_are_told_apart() -> None:
    values: list[tuple[Any, ...]] = [
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        (b"abc",),
        ("1",),
        (1,),
        (1.0,),
        (None,),
        ("None",),
        (),
        ("",),
        ("\ud800",),
    ]
    assert len({digest(*value) for value in values}) == len(values)
    assert digest("ab", 1) == digest("ab", 1)
    assert {len(digest(*value)) for value in values} == {16}


def test_the_least_recently_used_makes_room_and_the_last_stays() -> None:
    kept: Kept[bytes] = Kept(3 * (ENTRY_BYTES + 100), len)
    made = []

    def of(name: str, size: int = 100) -> bytes:
        def make() -> bytes:
            made.append(name)
            return bytes(size)

        return kept.of(digest(name), make)

    for name in "abcad":
        of(name)
    assert made == ["a", "b", "c", "d"]
    of("a")
    of("b")
    assert made == ["a", "b", "c", "d", "b"]
    assert kept.num_bytes == 3 * (ENTRY_BYTES + 100)
    of("huge", 10_000)
    assert len(kept) == 1
    with pytest.raises(ZeroDivisionError):
        kept.of(digest("no"), lambda: bytes(1 // 0))
    assert len(kept) == 1


def test_a_long_context_is_not_kept_for_each_of_its_dots() -> None:
    class Letters:
        pieces = (b"", b"x", b".", b"name")
        size = 4

        def encode(self, text: str) -> list[int]:
            return []

    from helpers import ASKED

    from vllm_ext.samplers.base import Row

    asked: list[int] = []

    def names(code: str, file: str | None) -> list[str]:
        asked.append(len(code))
        return ["name"]

    rule = MonitorRule({"names": names}, Letters())
    params = MonitorParams(monitor="names", monitor_context="x" * 300_000)
    tracemalloc.start()
    try:
        for dots in range(1, 60):
            rule._allowed(Row([1], [2, 1] * dots + [2], 0, params, ASKED))
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(asked) == 59
    assert used < 2_000_000  # of 18 MB of code


@pytest.mark.parametrize("value", ["x" * 10**6, b"x" * 10**6, list(range(10**5)), ValueError("y" * 10**6)])
def test_long_values_are_cut(value: object) -> None:
    assert 200 <= len(quoted(value)) <= 203
    assert quoted("it's") == '"it\'s"'
    assert quoted(ValueError("why")) == "why"
