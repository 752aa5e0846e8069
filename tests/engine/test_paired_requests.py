# SPDX-License-Identifier: Apache-2.0
"""Which rows stand behind the same tokens of two prompts."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams

from vllm_ext.engine import paired_requests
from vllm_ext.engine.steering.paired_rows import PairedRows


def pairs_of(**primaries: str) -> PairedRows:
    found = PairedRows()
    for pair, primary in primaries.items():
        found.admit(pair, SamplingParams(extra_args={paired_requests.PRIMARY: primary}))
    return found


def begin(found: PairedRows, batch: str, sizes: list[int], ready: str) -> list[int]:
    start = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return found.begin({name: i for i, name in enumerate(batch)}, start, [each == "1" for each in ready])


def test_rows_of_primaries_are_their_pairs() -> None:
    found = pairs_of(b="a")
    assert begin(found, "acb", [3, 2, 3], "111") == [5, 6, 7, 3, 4, 5, 6, 7]
    assert found.pairs == [(0, 2)]
    assert found.held == []


def test_the_first_to_come_is_held() -> None:
    primary, pair = PairedRows(), PairedRows()
    primary.admit("a", SamplingParams(extra_args={paired_requests.PAIR: "b"}))
    pair.admit("b", SamplingParams(extra_args={paired_requests.PRIMARY: "a"}))
    for found, name in ((primary, "a"), (pair, "b")):
        assert begin(found, "c" + name, [1, 1], "11") == [0, 1]
        assert (found.pairs, found.held) == ([], [1])
        found.forget(name)
        begin(found, "c" + name, [1, 1], "11")
        assert found.held == []


def test_a_half_alone_is_held() -> None:
    cases: list[tuple[str, list[int], str, list[int]]] = [
        ("acb", [1, 1, 1], "110", [0]),  # the pair still reads its prompt
        ("acb", [1, 1, 1], "011", [2]),
        ("acb", [1, 1, 1], "010", []),
        ("ac", [1, 1], "11", [0]),  # not in the step
        ("cb", [1, 1], "11", [1]),
        ("acb", [3, 1, 1], "111", [0, 2]),  # drafts of one were cut
    ]
    for batch, sizes, ready, held in cases:
        found = pairs_of(b="a")
        assert begin(found, batch, sizes, ready) == list(range(sum(sizes))), batch
        assert (found.pairs, found.held) == ([], held), batch


def test_requests_that_are_gone_are_forgotten() -> None:
    found = pairs_of(b="a", d="c")
    found.admit("e", SamplingParams())
    assert "b" in found
    assert "e" not in found
    found.forget("a")
    found.forget("b")
    assert "b" not in found
    assert begin(found, "abcd", [1, 1, 1, 1], "1111") == [0, 1, 3, 3]
    assert found.pairs == [(2, 3)]


def test_primaries_are_told_by_parameters() -> None:
    assert paired_requests.primary_of(SamplingParams()) is None
    given: dict[str, Any] = {paired_requests.PRIMARY: "x"}
    assert paired_requests.primary_of(SamplingParams(extra_args=given)) == "x"
