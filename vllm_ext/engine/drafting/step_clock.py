# SPDX-License-Identifier: Apache-2.0
"""How long the steps of an engine take."""

from __future__ import annotations

import time


class StepClock:
    """Asked at the end of each step."""

    def __init__(self) -> None:
        self._ended = 0.0  # the step before

    def seconds(self, started: float) -> float:
        """Of the step that began then and ends now.

        From the end of the step before, where the engine was busy, so that what lies between the worker's calls counts;
        from this step's start after a pause.
        """
        now = time.perf_counter()
        busy, cycle = now - started, now - self._ended
        self._ended = now
        return cycle if cycle < 2 * busy else busy
