# SPDX-License-Identifier: Apache-2.0
"""The goodput budget where trees are of a few sizes only: which of them, by what steps have taken and put out.

Where a step's tokens stay on the device nobody on the host knows a tree's probabilities in time, and a captured graph
has one size. So a step has one of a few *levels*, the same for all requests, and the choice is by measurement alone:
what a step took, by level and batch size, and how many tokens a request got, by level. Level 0, no drafts, is one of
them, so speculation that does not pay ends.

Of each level little is known that has not run for long. So levels are tried when a batch size is new, small ones first,
and again now and then; larger ones are not where smaller ones were hopeless.

Source: SmartSpec, arXiv 2406.14066, for goodput. Deviations: no model of the step's time or of acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence

MARGIN = 0.02  # that speculation must promise
HOPELESS = 0.85  # of the rate without drafts
TRIAL_STEPS = 4  # of one level; the first is not counted: the step before it was another's
PROBE_STEPS = 256  # between two trials of levels that are not the best
KEEP = 0.9  # of a mean, each step


def levels_of(nodes: int) -> list[int]:
    """The sizes of a tree of so many nodes: none, a quarter, half and all of it."""
    return sorted({0, -(-nodes // 4), -(-nodes // 2), nodes})


def by_batch_size(nodes: int, most_requests: int) -> list[tuple[int, int, int]]:
    """A schedule with all levels, smaller ones for larger batches: first and last batch size, level.

    The engine captures graphs of the sizes in it; which one a step has is decided by `LevelBudget`.
    """
    levels = levels_of(nodes)[::-1]
    bounds = [8, 32, 128, most_requests]
    schedule, start = [], 1
    for place, level in enumerate(levels):
        left = len(levels) - 1 - place  # levels that still need a batch size
        end = most_requests if not left else min(bounds[place], most_requests - left)
        if end >= start:
            schedule.append((start, end, level))
            start = end + 1
    return schedule


class _Mean:
    """A fading mean, and how many values it has seen."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        # A true mean first, then a fading one.
        weight = max(1.0 / self.count, 1.0 - KEEP)
        self.value += weight * (value - self.value)


class LevelBudget:
    """Chooses a level for each step.

    Args:
        levels: ascending, the first 0.
    """

    def __init__(self, levels: Sequence[int]) -> None:
        if not levels or levels[0] != 0 or sorted(set(levels)) != list(levels):
            raise ValueError(f"levels={list(levels)} must be ascending and begin with 0")
        self.levels = list(levels)
        self._seconds: dict[tuple[int, int], _Mean] = {}  # by class of batch size and level
        self._tokens = {level: _Mean() for level in levels}  # of one request, a step
        self._trial: tuple[int, int] | None = None  # the level on trial, and its steps left
        self._since_probe = 0
        self._last: tuple[int, int] | None = None  # class and level of the step observed last

    def choose(self, batch_size: int) -> int:
        """The level of a step with so many requests."""
        if self._trial is not None:
            level, left = self._trial
            self._trial = (level, left - 1) if left > 1 else None
            return level
        group = batch_size.bit_length()
        best, rate = 0, 0.0
        for level in self.levels:
            mine = self.rate(group, level)
            if mine is None:
                return self._try(level)
            if not level:
                plain = rate = mine
            elif mine < HOPELESS * plain:
                break
            elif mine > rate and mine > plain * (1.0 + MARGIN):
                best, rate = level, mine
        self._since_probe += 1
        if self._since_probe >= PROBE_STEPS:
            self._since_probe = 0
            others = [level for level in self.levels if level != best and (group, level) in self._seconds]
            if others:
                return self._try(min(others, key=lambda level: self._seconds[group, level].count))
        return best

    def rate(self, group: int, level: int) -> float | None:
        """Tokens a second of one request; None as long as that is not known."""
        seconds, tokens = self._seconds.get((group, level)), self._tokens[level]
        if seconds is None or not seconds.count or not tokens.count:
            return None
        return tokens.value / max(seconds.value, 1e-9)

    def observe(self, level: int, batch_size: int, num_tokens: int, seconds: float) -> None:
        """Learn from one step in which all requests decoded with the same number of nodes.

        Args:
            level: nodes of each; one that is no level is ignored.
            batch_size: requests, at least 1.
            num_tokens: what they put out together.
            seconds: what the step took.
        """
        if level not in self._tokens:
            self._last = None
            return
        now = batch_size.bit_length(), level
        self._tokens[level].add(num_tokens / batch_size)
        if now == self._last:
            self._seconds.setdefault(now, _Mean()).add(seconds)
        self._last = now

    def interrupt(self) -> None:
        """A step that says nothing of decoding: with prompts in it, or after a pause."""
        self._last = None

    def _try(self, level: int) -> int:
        self._trial = level, TRIAL_STEPS - 1
        return level
