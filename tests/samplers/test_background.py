# SPDX-License-Identifier: Apache-2.0
"""Work beside the engine: what is there in time, what is ended, and what is made again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from vllm_ext.samplers.background import Making, Process
from vllm_ext.samplers.kept import Kept, digest


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    made = Process(lambda: ("builtins:print", ["begun"]))
    yield made
    made.close()


def test_a_process_answers(process: Process) -> None:
    assert process.call("math:sqrt", [16.0], 20.0) == 4.0
    number = process.call("os:getpid", [], 20.0)
    assert number != os.getpid()
    assert process.call("builtins:print", ["no answer"], 20.0) is None
    with pytest.raises(RuntimeError, match="ValueError: math domain error"):
        process.call("math:sqrt", [-1.0], 20.0)
    with pytest.raises(RuntimeError, match="not JSON serializable"):
        process.call("builtins:set", [[1]], 20.0)
    assert process.call("os:getpid", [], 20.0) == number


@pytest.mark.parametrize(("where", "seconds"), [("time:sleep", 0.3), ("os:_exit", 20.0)])
def test_one_that_takes_too_long_or_ends_is_started_again(
    process: Process, where: str, seconds: float
) -> None:
    number = process.call("os:getpid", [], None)
    started = time.monotonic()
    with pytest.raises(TimeoutError if where == "time:sleep" else RuntimeError):
        process.call(where, [30], seconds)
    assert time.monotonic() - started < 15.0
    assert process.call("os:getpid", [], None) != number


def test_values_come_when_they_are_made() -> None:
    making: Making[int] = Making(Kept(10_000, lambda value: 8))
    go = threading.Event()
    made = []

    def make() -> int:
        made.append(go.wait(20.0))
        return 7

    key = digest("seven")
    assert making.get(key, make, 0.0) is None
    assert making.get(key, make, 0.01) is None
    go.set()
    assert making.get(key, make, 20.0) == 7
    assert making.get(key, make, 0.0) == 7
    assert made == [True]
    assert making.get(digest("here"), lambda: 8, None) == 8  # here and now


def test_what_fails_is_raised_and_tried_again() -> None:
    making: Making[int] = Making(Kept(10_000, lambda value: 8))
    for error in (TimeoutError, ValueError):

        def fail(error: type[Exception] = error) -> int:
            raise error("no")

        for _ in range(2):
            with pytest.raises(error, match="no"):
                making.get(digest("x"), fail, 20.0)
    assert making.get(digest("x"), lambda: 1, 20.0) == 1
