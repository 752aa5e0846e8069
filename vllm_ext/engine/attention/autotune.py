# SPDX-License-Identifier: Apache-2.0
"""Which of several forms of tree attention a step takes: the one that was fastest at its size when all were timed.

Timed once, at start-up, on the device that will run them, as a captured graph replays them: launched from Python, forms
of several launches look too slow. How long texts are nobody knows when a graph is captured, so a form is judged by
several contexts together. Ranks of tensor parallelism may choose differently: each has heads of its own.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

import torch

WARM_UP_RUNS = 2
TIMED_RUNS = 15


class Fastest:
    """The form to take, by size.

    Args:
        forms: by what they are called.
        seconds: what a call of a form takes for so many requests with so many rows each, behind so much context.
        requests: the sizes that are timed.
        rows: likewise.
        contexts: likewise, in tokens.
    """

    def __init__(
        self,
        forms: Sequence[str],
        seconds: Callable[[str, int, int, int], float],
        requests: Sequence[int],
        rows: Sequence[int],
        contexts: Sequence[int],
    ) -> None:
        self.seconds = {
            (number, width): {
                form: [seconds(form, number, width, context) for context in contexts] for form in forms
            }
            for number in requests
            for width in rows
        }
        self._known: dict[tuple[int, int], str] = {}

    def form(self, requests: int, rows: int) -> str:
        """Of the size that is nearest by ratio, the first of two that are as near; of equally fast forms the first.

        A form is as fast as the product of its times says: each context counts as much as any other.
        """
        size = requests, rows
        if size not in self._known:
            times = self.seconds[min(self.seconds, key=lambda timed: _distance(size, timed))]
            self._known[size] = min(times, key=lambda form: math.prod(times[form]))
        return self._known[size]

    def __str__(self) -> str:
        """For the log: microseconds by form, at each size and context."""
        return ", ".join(
            f"{number}x{width}: "
            + " ".join(
                f"{form} {'/'.join(f'{1e6 * each:.0f}' for each in times)}" for form, times in forms.items()
            )
            for (number, width), forms in self.seconds.items()
        )


def _distance(left: tuple[int, int], right: tuple[int, int]) -> float:
    return sum(abs(math.log2(a / b)) for a, b in zip(left, right, strict=True))


def seconds_in_graph(call: Callable[[], object]) -> float:
    """The median time of a call that a captured graph replays, on the current CUDA device.

    Of calls timed one by one: another process on the device may be in the way of some.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_RUNS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(1 + TIMED_RUNS)]  # type: ignore[no-untyped-call]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    events[-1].synchronize()
    times = [float(start.elapsed_time(end)) for start, end in itertools.pairwise(events)]
    return statistics.median(times) / 1e3
