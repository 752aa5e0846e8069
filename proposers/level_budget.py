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

import numpy as np

from vllm_ext.proposers.tree import Float32

DEFAULT_NODES = 15  # of a tree, where nobody has said how many: see `levels_of`
MARGIN = 0.02  # that speculation must promise
HOPELESS = 0.85  # of the rate without drafts
TRIAL_STEPS = 4  # of one level, at least; the first is not counted: the step before it was another's
ENOUGH = 64  # steps of a request, after which what a level puts out is known
PROBE_STEPS = 256  # between two trials of levels that are not the best
RECENT_STEPS, RECENT_REQUEST_STEPS = 40, 400  # how many of the last ones a mean is of


def levels_of(nodes: int) -> list[int]:
    """The sizes of a tree of so many nodes: none, a quarter, half and all of it.

    With their root 7, 15, 31 ... nodes have a power of two of rows, and so have the other sizes, down to four: a step's
    rows then fill the tiles of attention, and each batch has its captured graph.
    """
    rows = nodes + 1
    if rows >= 4 and rows & (rows - 1) == 0:
        return [0, *sorted((rows >> halves) - 1 for halves in range(rows.bit_length() - 2))]
    return sorted({0, -(-nodes // 4), -(-nodes // 2), nodes})


def by_batch_size(nodes: int, most_requests: int) -> list[tuple[int, int, int]]:
    """A schedule with all levels, smaller ones for larger batches: first and last batch size, level.

    The engine captures graphs of the sizes in it; which one a step has is decided by `LevelBudget`.
    """
    levels = levels_of(nodes)[::-1]
    schedule, start = [], 1
    for place, level in enumerate(levels):
        left = len(levels) - 1 - place  # levels that still need a batch size
        end = most_requests if not left else min(8 << 2 * place, most_requests - left)
        if end >= start:
            schedule.append((start, end, level))
            start = end + 1
    return schedule


def shared_out(chances: Sequence[Float32], nodes: int) -> list[int]:
    """How many nodes of each tree to verify, where so many of all trees are: those with the largest chances.

    The chances of nodes add up to the drafts that are expected to be accepted, and no other choice of as many nodes
    has a larger sum. A node's chance is at most its parent's, so what is chosen of a tree is a prefix of it. Of equal
    chances the earlier node's counts more, then the earlier tree's: tensor-parallel ranks choose alike.

    Args:
        chances: ``[requests]`` of float32 ``[nodes]``, each descending; possibly none. NaN is no chance.
        nodes: of all trees together; there may be fewer.
    """
    sizes = [len(tree) for tree in chances]
    owner = np.repeat(np.arange(len(sizes)), sizes)
    place = np.concatenate([np.arange(size) for size in sizes]) if sizes else owner
    flat = np.concatenate(chances) if sizes else np.empty(0, np.float32)
    best = np.lexsort((owner, place, -np.fmax(flat, 0.0)))[: max(nodes, 0)]
    counts: list[int] = np.bincount(owner[best], minlength=len(sizes)).tolist()
    return counts


class _Mean:
    """A mean that fades, and the weight of what it has seen.

    Args:
        recent: weight of the last values that it is of, about.
    """

    __slots__ = ("recent", "value", "weight")

    def __init__(self, recent: float) -> None:
        self.recent = recent
        self.weight = 0.0
        self.value = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        self.weight += weight
        # A true mean first, then a fading one.
        self.value += weight / min(self.weight, max(self.recent, weight)) * (value - self.value)


class LevelBudget:
    """Chooses a level for each step.

    Args:
        levels: ascending, the first 0.
        most_rows: no step with drafts has more rows than this: a larger one has no captured graph; 0: any may.
    """

    def __init__(self, levels: Sequence[int], most_rows: int = 0) -> None:
        if not levels or levels[0] != 0 or sorted(set(levels)) != list(levels):
            raise ValueError(f"levels={list(levels)} must be ascending and begin with 0")
        self.levels = list(levels)
        self._most_rows = most_rows
        self._seconds: dict[tuple[int, int], _Mean] = {}  # by class of batch size and level
        self._tokens = {level: _Mean(RECENT_REQUEST_STEPS) for level in levels}  # of one request, a step
        self._trial: tuple[int, int, int] | None = None  # the class and level on trial, and its steps so far
        self._since_probe = 0
        self._chosen = 0
        self._last: int | None = None  # level of the step observed last, if nothing came between

    def choose(self, batch_size: int) -> int:
        """The level of a step with so many requests."""
        self._chosen = self._choose(batch_size)
        return self._chosen

    def _choose(self, batch_size: int) -> int:
        group = batch_size.bit_length()
        levels = [level for level in self.levels if self.fits(level, batch_size)]
        if self._trial is not None:
            (trial_group, level, steps), self._trial = self._trial, None
            if trial_group == group and level in levels and self._goes_on(group, level, steps, batch_size):
                return self._try(group, level, steps + 1)
        best, rate = 0, 0.0
        for level in levels:
            mine = self.rate(group, level)
            if mine is None:
                return self._try(group, level)
            if not level:
                plain = rate = mine
            elif mine < HOPELESS * plain:
                break
            elif mine > rate and mine > plain * (1.0 + MARGIN):
                best, rate = level, mine
        self._since_probe += 1
        if self._since_probe >= PROBE_STEPS:
            self._since_probe = 0
            others = [level for level in levels if level != best and (group, level) in self._seconds]
            if others:
                least = min(others, key=lambda level: self._seconds[group, level].weight)
                return self._try(group, least)
        return best

    def fits(self, level: int, batch_size: int) -> bool:
        """Whether a step of so many requests with this level has a captured graph, as far as its rows go."""
        return not level or not self._most_rows or batch_size * (1 + level) <= self._most_rows

    def rate(self, group: int, level: int) -> float | None:
        """Tokens a second of one request; None as long as that is not known."""
        seconds, tokens = self._seconds.get((group, level)), self._tokens[level]
        if seconds is None or not seconds.weight or not tokens.weight:
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
        self._tokens[level].add(num_tokens / batch_size, batch_size)
        if self._last == level:
            key = batch_size.bit_length(), level
            self._seconds.setdefault(key, _Mean(RECENT_STEPS)).add(seconds)
        self._last = level

    def state(self, batch_size: int) -> dict[str, float]:
        """Figures for metrics, of the level chosen last, as `GoodputBudget.state`; those not yet measured are left out.

        Args:
            batch_size: requests of that step.
        """
        group, level = batch_size.bit_length(), self._chosen
        found = {"nodes_per_request": float(level), "correction": 1.0}
        rate, plain_rate = self.rate(group, level), self.rate(group, 0)
        if rate is not None and plain_rate is not None:
            seconds, plain_seconds = self._seconds[group, level].value, self._seconds[group, 0].value
            found |= {
                "step_seconds": seconds,
                "gain": rate / plain_rate,
                "target_efficiency": plain_seconds / max(seconds, 1e-9),
            }
        return found

    def measured(self) -> list[dict[str, float]]:
        """All that is known: for each class of batch sizes (below 1, 2, 4, 8, ... requests) and level a step's seconds,
        of how many steps, and one request's tokens in a step."""
        return [
            {
                "requests_below": 1 << group,
                "level": level,
                "seconds": mean.value,
                "steps": mean.weight,
                "tokens": self._tokens[level].value,
            }
            for (group, level), mean in sorted(self._seconds.items())
        ]

    def interrupt(self) -> None:
        """A step that says nothing of decoding: with prompts in it, or after a pause."""
        self._last = None

    def _goes_on(self, group: int, level: int, steps: int, batch_size: int) -> bool:
        """Whether a trial needs another step: it is short where the level is known, or hopeless."""
        if steps < TRIAL_STEPS:
            return True
        if self._tokens[level].weight >= ENOUGH or steps * batch_size >= ENOUGH:
            return self.rate(group, level) is None and steps < 4 * TRIAL_STEPS
        plain, mine = self.rate(group, 0), self.rate(group, level)
        return plain is None or mine is None or mine >= HOPELESS * plain

    def _try(self, group: int, level: int, steps: int = 1) -> int:
        self._trial = group, level, steps
        return level
