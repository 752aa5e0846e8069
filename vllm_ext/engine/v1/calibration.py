# SPDX-License-Identifier: Apache-2.0
"""What passes of several sizes take, timed at start-up; again, and marked, where something else ran beside them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

RUNS = 3  # of each size; the fastest counts: noise only adds
SECONDS = 4.0  # after which no more sizes are begun, the powers of two aside
ATTEMPTS = 3  # beside other load
BUSY = 0.1  # share of our cores that others used: more disturbs
CHANGED = 0.9  # part of what a pass took before: one that takes less had been disturbed
RISES = (
    0.8  # a smaller pass may take this much of a larger one's time, turned round, before it looks disturbed
)
POWERS = tuple(1 << power for power in range(8))
BETWEEN = tuple(size for size in (*range(3, 16), *range(20, 128, 4)) if size not in POWERS)


@dataclass(frozen=True)
class Curve:
    """Seconds of a pass by its number of query tokens."""

    seconds: dict[int, float] = field(default_factory=dict)
    others: float = 0.0  # share of our cores that others used meanwhile, if that disturbed

    @property
    def disturbed(self) -> bool:
        """Whether it was measured beside other load, each time."""
        return self.others > 0.0

    def __str__(self) -> str:
        times = ", ".join(f"{size}: {1e3 * self.seconds[size]:.1f}" for size in sorted(self.seconds))
        if not self.disturbed:
            return times
        return (
            f"{times} (measured beside other load, which took {self.others:.0%} of these cores; it counts little, and "
            "real steps correct it)"
        )


def curve(
    most: int,
    run: Callable[[int], None],
    patience: float | None,
    others: Callable[[], Callable[[], float]] | None = None,
) -> Curve:
    """Time passes of up to ``most`` query tokens.

    Args:
        most: the largest size.
        run: makes a pass of a size, and waits for its end.
        patience: seconds after which no size is begun but the smallest few; None: all powers of two are timed.
        others: begins to look at what others use of our cores; what it returns tells their share so far.
    """
    begin = _others if others is None else others
    share_of = begin()
    # Powers of two first, then what lies between them, small ones first: knees are where it matters.
    seconds = _timed([size for size in (*POWERS, *BETWEEN) if size <= most], run, patience)
    share = share_of()
    for _ in range(ATTEMPTS - 1):
        if share <= BUSY and _rises(seconds):
            return Curve(seconds)
        share_of = begin()
        again = _timed([size for size in POWERS if size in seconds], run, patience)
        share = share_of()
        changed = any(time_s < CHANGED * seconds[size] for size, time_s in again.items())
        seconds |= {size: min(time_s, seconds[size]) for size, time_s in again.items()}
        if share <= BUSY and not changed:
            return Curve(seconds)  # odd, but so it is
    return Curve(seconds, share if share > BUSY else 0.0)


def _timed(sizes: Iterable[int], run: Callable[[int], None], patience: float | None) -> dict[int, float]:
    seconds: dict[int, float] = {}
    begun = time.perf_counter()
    for size in sizes:
        spent = time.perf_counter() - begun
        if size in BETWEEN and spent > SECONDS:
            break
        if patience is not None and spent > patience and len(seconds) > 3:
            break
        times = []
        for _ in range(RUNS):
            started = time.perf_counter()
            run(size)
            times.append(time.perf_counter() - started)
        seconds[size] = min(times)
    return seconds


def _rises(seconds: dict[int, float]) -> bool:
    """Whether no pass takes much longer than a larger one."""
    least = float("inf")
    for size in sorted(seconds, reverse=True):
        if least < RISES * seconds[size]:
            return False
        least = min(least, seconds[size])
    return True


def _others() -> Callable[[], float]:
    """Begin to look at what other processes use of the cores that this one may use; nothing is known but on Linux."""
    cores = os.sched_getaffinity(0)
    began, busy, own = time.perf_counter(), _busy_s(cores), time.process_time()

    def share() -> float:
        elapsed = (time.perf_counter() - began) * len(cores)
        used = _busy_s(cores) - busy - (time.process_time() - own)
        return min(max(used / max(elapsed, 1e-9), 0.0), 1.0)

    return share


def _busy_s(cores: Iterable[int]) -> float:
    """Seconds that cores have not been idle, what other virtual machines took from them among these."""
    names = {f"cpu{core}" for core in cores}
    try:
        with open("/proc/stat", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("cpu")]
    except OSError:
        return 0.0
    # user nice system idle iowait irq softirq steal
    ticks = sum(sum(map(int, line[1:4])) + sum(map(int, line[6:9])) for line in lines if line[0] in names)
    return ticks / os.sysconf("SC_CLK_TCK")
