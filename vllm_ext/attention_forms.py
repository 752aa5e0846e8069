# SPDX-License-Identifier: Apache-2.0
"""Which of several forms of tree attention a step takes: the one that was fastest at its size when all were timed.

Timed once, at start-up, on the device that will run them. Ranks of tensor parallelism may choose differently: each has
heads of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

WARM_UP_RUNS = 3
TIMED_RUNS = 20


class Fastest:
    """The form to take, by size.

    Args:
        forms: by what they are called.
        seconds: what a call of a form takes for so many requests with so many rows each.
        requests: the sizes that are timed.
        rows: likewise.
    """

    def __init__(
        self,
        forms: Sequence[str],
        seconds: Callable[[str, int, int], float],
        requests: Sequence[int],
        rows: Sequence[int],
    ) -> None:
        self.seconds = {
            (number, width): {form: seconds(form, number, width) for form in forms}
            for number in requests
            for width in rows
        }
        self._known: dict[tuple[int, int], str] = {}

    def form(self, requests: int, rows: int) -> str:
        """Of the size that is nearest by ratio, the first of two that are as near; of equally fast forms the first."""
        size = requests, rows
        if size not in self._known:
            times = self.seconds[min(self.seconds, key=lambda timed: _distance(size, timed))]
            self._known[size] = min(times, key=lambda form: times[form])
        return self._known[size]

    def __str__(self) -> str:
        """For the log: microseconds by form, at each size."""
        return ", ".join(
            f"{number}x{width}: " + " ".join(f"{form} {1e6 * seconds:.0f}" for form, seconds in times.items())
            for (number, width), times in self.seconds.items()
        )


def _distance(left: tuple[int, int], right: tuple[int, int]) -> float:
    return sum(abs(math.log2(a / b)) for a, b in zip(left, right, strict=True))


def seconds_on_device(call: Callable[[], object]) -> float:
    """The mean of some calls after each other, compiled and warm, on the current CUDA device."""
    for _ in range(WARM_UP_RUNS):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(TIMED_RUNS):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / TIMED_RUNS
