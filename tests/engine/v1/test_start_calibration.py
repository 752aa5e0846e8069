# SPDX-License-Identifier: Apache-2.0
"""Passes timed at start-up: as they are where it is quiet, again and marked where it is not."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator

import pytest

from vllm_ext.engine.v1 import calibration
from vllm_ext.engine.v1.calibration import ATTEMPTS, POWERS, curve


class Machine:
    """Passes take 1 ms and 10 us a token by a clock that they turn themselves, times what disturbs an attempt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *shares: float, slower: float = 3.0) -> None:
        self.now, self.slower, self.shares = 0.0, slower, shares
        self.attempt = -1
        self.passes: list[int] = []
        monkeypatch.setattr("vllm_ext.engine.v1.calibration.time.perf_counter", lambda: self.now)

    def run(self, size: int) -> None:
        self.passes.append(size)
        factor = self.slower if self.share() > calibration.BUSY else 1.0
        self.now += factor * (1e-3 + 1e-5 * size)

    def begin(self) -> Callable[[], float]:
        self.attempt += 1
        return self.share

    def share(self) -> float:
        return self.shares[min(self.attempt, len(self.shares) - 1)]


def test_in_quiet_each_size_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 0.02)
    found = curve(64, machine.run, None, machine.begin)
    assert not found.disturbed
    assert "beside" not in str(found)
    assert sorted(set(machine.passes)) == sorted(found.seconds)
    assert all(machine.passes.count(size) == calibration.RUNS for size in found.seconds)
    assert max(found.seconds) == 64
    assert found.seconds[8] == pytest.approx(1.08e-3)


def test_background_other_load_it_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 0.5, 0.5, 0.0)
    found = curve(64, machine.run, None, machine.begin)
    assert not found.disturbed
    assert machine.passes.count(8) == 3 * calibration.RUNS
    assert [found.seconds[size] for size in POWERS[:7]] == pytest.approx(
        [1e-3 + 1e-5 * size for size in POWERS[:7]]
    )


def test_load_that_stays_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 0.5, 0.4)
    found = curve(64, machine.run, None, machine.begin)
    assert found.disturbed
    assert "measured beside other load, which took 40% of these cores" in str(found)
    assert machine.passes.count(8) == ATTEMPTS * calibration.RUNS


def test_a_curve_that_falls_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 0.0)
    first: list[int] = []

    def run(size: int) -> None:
        machine.run(size)
        if size == 1 and len(first) < calibration.RUNS:  # a neighbour that has gone before the end
            first.append(size)
            machine.now += 5e-3

    found = curve(64, run, None, machine.begin)
    assert not found.disturbed
    assert found.seconds[1] == pytest.approx(1.01e-3)


def test_a_curve_that_is_odd_by_itself_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 0.0)

    def run(size: int) -> None:
        machine.run(size)
        machine.now += 5e-3 * (size == 1)

    found = curve(64, run, None, machine.begin)
    assert not found.disturbed
    assert found.seconds[1] == pytest.approx(6.01e-3)
    assert machine.passes.count(1) == 2 * calibration.RUNS


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@pytest.fixture
def core() -> Iterator[int]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    yield max(cores)
    os.sched_setaffinity(0, cores)


def test_what_others_use_of_our_cores_is_seen(core: int) -> None:
    share = calibration._others()
    neighbour = multiprocessing.get_context("fork").Process(target=_spin, args=(1.0,))
    neighbour.start()
    _spin(1.0)
    seen = share()
    neighbour.join()
    assert seen > 0.3
