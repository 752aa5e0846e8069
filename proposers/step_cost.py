# SPDX-License-Identifier: Apache-2.0
"""What a decode step costs: seconds by query tokens, batch and context, learnt from the steps themselves.

With ``q`` query tokens in all, ``b`` requests and ``c`` context tokens in all, a step takes

    unit * ((k0 + k1 q) (1 + r[q]) + k2 b + k3 c + k4 q c / b)

``k`` is fitted to relative errors by least squares, no coefficient negative; ``k3`` is reading the KV cache
once, ``k4`` attention itself, where every query row meets the mean context. ``r`` corrects the straight line
where the truth has knees (CPU) or is a staircase (CUDA graphs): one entry for each query count up to 16, then
eight an octave, whose ends include the captured sizes up to 128. An entry is drawn to its neighbours, and
they to 0, the less it was measured; no step comes out dearer than a larger one. ``unit``, in seconds, follows
how fast the machine is right now. It cancels in every decision: a neighbour's load goes there instead of
making the one query count that met it look dear.

Measurements are kept as running means by query count and context octave, not by age, so that a thousand steps
at one point do not erase the others. Machines are shared, so what enters a mean is the median of the last
three.

Source: SmartSpec, arXiv 2406.14066: a linear model, refitted to the running steps. Deviations: ``r``,
``unit``, the attention term and the robustness are ours; the paper profiles before serving, here that is
optional.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

COEFFICIENTS = ("step", "query_token", "request", "context_token", "query_context_token")
# Belief before the first measurement, relative to an empty step, and how far off it may be; contexts in
# thousands. Memory-bound decoding has k1 << 1; one CPU core with a model of 135M parameters has 0.05.
PRIOR = np.array([1.0, 0.03, 0.01, 0.02, 0.003])
PRIOR_PRECISION = np.array([0.5, 0.05, 0.02, 0.1, 0.02]) ** -2
MEASUREMENT_PRECISION = 0.15**-2  # of one step, relative

MAX_QUERY_TOKENS = 8192  # beyond it the correction is that of the last bucket
MAX_WEIGHT = 50.0  # a cell is the mean of about this many steps
MEMORY_STEPS = 1000.0  # a cell not visited loses weight on this scale, down to one step's
REFIT_STEPS = 12  # at most; fewer while little is known
DOUBT = 0.2
WARM_UP = 5
MAX_SURPRISE = 1.2  # factor by which one measurement may differ from what is known
MAX_DRIFT = 0.25  # most that the unit believes of a residual
SHRINKAGE = 2.0  # steps' worth of trust in a bucket's neighbours, and in the straight line
UNIT_RATE = 0.2
NUM_CONTEXTS = 16


def _bucket_ends() -> Int64:
    """Largest query count of each bucket."""
    ends = list(range(1, 17))
    while ends[-1] < MAX_QUERY_TOKENS:
        ends.append(ends[-1] + (1 << (ends[-1].bit_length() - 4)))
    return np.array(ends)


BUCKET_ENDS = _bucket_ends()
BUCKET_STARTS = np.array([0, *(BUCKET_ENDS[:-1] + 1)])
BUCKET_OF = np.searchsorted(BUCKET_ENDS, np.arange(MAX_QUERY_TOKENS + 1))
# How much buckets tell about each other: e**-4 an octave apart, nothing about themselves.
_DISTANCE = np.abs(np.subtract.outer(np.log2(BUCKET_ENDS), np.log2(BUCKET_ENDS)))
NEIGHBOURS = np.exp(-4.0 * _DISTANCE) * (_DISTANCE > 0)


class StepCost:
    """The model above. Sane from the first step on: without measurements it is the prior.

    ``record`` takes about 10 us, every fourth call 150.
    """

    def __init__(self) -> None:
        num_cells = len(BUCKET_ENDS) * NUM_CONTEXTS
        self._weight: Float64 = np.zeros(num_cells)  # steps in each cell's mean
        self._mean: Float64 = np.zeros((num_cells, 6))  # the five features and the time, in units
        self._k: Float64 = PRIOR.copy()
        # By bucket: 1 + r; the units at which the next larger one begins or, if that is less, a later one; what is not
        # known.
        self._factor: Float64 = np.ones(len(BUCKET_ENDS))
        self._most: Float64 = np.full(len(BUCKET_ENDS), np.inf)
        self._doubt: Float64 = np.full(len(BUCKET_ENDS), DOUBT)
        self.largest_query_tokens = 0  # of all measured steps
        self._unit = 1e-2
        self._records = self._since_fit = 0
        self._first: list[tuple[float, tuple[float, int, int, int]]] = []  # ratio to the prior, and the step
        self._recent: dict[int, list[float]] = {}  # the last times of each cell, in units
        self._residuals: list[float] = []  # the last of all, logarithms

    def record(self, seconds: float, query_tokens: int, batch_size: int, context_tokens: int) -> None:
        """Learn from one measured step cycle.

        Steps that contain prompt tokens must not be recorded: their cost says nothing about drafts.

        Args:
            seconds: from this step's start to the next one's.
            query_tokens: rows of all requests, at least ``batch_size``.
            batch_size: requests, at least 1.
            context_tokens: tokens in the KV cache, of all requests together.
        """
        if not 0.0 < seconds < math.inf:
            return  # a clock that stood still
        self.largest_query_tokens = max(self.largest_query_tokens, query_tokens)
        ratio = seconds / self._units(query_tokens, self._features(query_tokens, batch_size, context_tokens))
        if len(self._first) < WARM_UP:
            # The first steps compile and fill caches: not even the unit is known before there is a median.
            self._first.append((ratio, (seconds, query_tokens, batch_size, context_tokens)))
            self._unit = sorted(self._first)[(len(self._first) - 1) // 2][0]
            if len(self._first) == WARM_UP:
                for _, step in self._first:
                    self._learn(*step)
                self._refit()
            return
        self._learn(seconds, query_tokens, batch_size, context_tokens)
        self._records += 1
        self._since_fit += 1
        if self._since_fit >= min(REFIT_STEPS, 1 + self._records // 16):
            self._refit()

    def _learn(self, seconds: float, query_tokens: int, batch_size: int, context_tokens: int) -> None:
        octave = min((context_tokens // (64 * batch_size)).bit_length(), NUM_CONTEXTS - 1)
        cell = int(BUCKET_OF[min(query_tokens, MAX_QUERY_TOKENS)]) * NUM_CONTEXTS + octave
        weight = min(float(self._weight[cell]), MAX_WEIGHT - 1.0)
        features = self._features(query_tokens, batch_size, context_tokens)
        predicted = self._units(query_tokens, features)
        recent = self._recent.setdefault(cell, [])
        units = _median_of_last(recent, seconds / self._unit)
        # Two of three is no proof either; three are.
        most = MAX_SURPRISE * max(predicted, float(self._mean[cell, 5]))
        if len(recent) == 3:
            most = max(most, min(recent))
        self._add(cell, weight, 1.0, features, min(max(units, predicted / MAX_SURPRISE), most))
        # Where the model is not yet known, its error says little about the machine's speed.
        residual = _median_of_last(self._residuals, math.log(seconds / (self._unit * predicted)))
        clipped = min(max(residual, -MAX_DRIFT), MAX_DRIFT)
        self._unit *= math.exp(UNIT_RATE * weight / (weight + 4.0) * clipped)

    @property
    def settled(self) -> bool:
        """Whether the unit is known: it has come from several real steps."""
        return len(self._first) >= WARM_UP

    @property
    def unit(self) -> float:
        """Seconds of an empty step, at the machine's speed right now."""
        return self._unit

    def scale(self, factor: float) -> None:
        """The machine has become slower by this factor: learnt elsewhere."""
        self._unit *= factor

    def calibrate(self, query_tokens: npt.ArrayLike, seconds: npt.ArrayLike, steps: float = 4.0) -> None:
        """Learn the curve's shape from forward passes timed at start-up.

        Args:
            query_tokens: int ``[num_points]``.
            seconds: float ``[num_points]``, best a median of several passes without context.
            steps: how many real steps each counts as.
        """
        counts, times = np.asarray(query_tokens, dtype=np.int64), np.asarray(seconds, dtype=np.float64)
        self.largest_query_tokens = max(self.largest_query_tokens, int(counts.max()))
        if not self._first:
            self._unit = float(times[counts.argmin()])
        for count, time in zip(counts.tolist(), (times / self._unit).tolist(), strict=True):
            cell = int(BUCKET_OF[min(count, MAX_QUERY_TOKENS)]) * NUM_CONTEXTS
            self._add(
                cell,
                min(float(self._weight[cell]), MAX_WEIGHT - steps),
                steps,
                (1.0, count, 0, 0, 0),
                time,
            )
        self._refit()

    def seconds(self, query_tokens: Int64, batch_size: int, context_tokens: int) -> Float64:
        """Predicted seconds of a step, positive.

        Args:
            query_tokens: int64 ``[num_points]``, rows of all requests.
            batch_size: requests, at least 1.
            context_tokens: tokens in the KV cache, of all requests together.

        Returns:
            float64 ``[num_points]``.
        """
        k0, k1, k2, k3, k4 = self._k.tolist()
        bucket = BUCKET_OF[np.minimum(query_tokens, MAX_QUERY_TOKENS)]
        # No step takes longer than a larger one: what looks so is a disturbance of the less measured.
        units = np.minimum((k0 + k1 * query_tokens) * self._factor[bucket], self._most[bucket])
        units += k4 * 1e-3 * context_tokens / batch_size * query_tokens
        units += k2 * batch_size + k3 * 1e-3 * context_tokens
        seconds: Float64 = self._unit * units
        return seconds

    def doubt(self, query_tokens: Int64) -> Float64:
        """How much less than predicted a step may cost, as a share of it; the more measured the smaller.

        Args:
            query_tokens: int64 ``[num_points]``, rows of all requests.

        Returns:
            float64 ``[num_points]``, from 0 to ``DOUBT``.
        """
        doubt: Float64 = self._doubt[BUCKET_OF[np.minimum(query_tokens, MAX_QUERY_TOKENS)]]
        return doubt

    def coefficients(self) -> dict[str, float]:
        """Seconds for each step, query token, request, context token, and query token times context token."""
        per = self._unit * self._k * np.array([1.0, 1.0, 1.0, 1e-3, 1e-3])
        return dict(zip(COEFFICIENTS, per.tolist(), strict=True))

    @staticmethod
    def _features(query_tokens: int, batch_size: int, context_tokens: int) -> tuple[float, ...]:
        context = 1e-3 * context_tokens
        return (1.0, query_tokens, batch_size, context, query_tokens * context / batch_size)

    def _units(self, query_tokens: int, features: tuple[float, ...]) -> float:
        k0, k1, k2, k3, k4 = self._k.tolist()
        bucket = int(BUCKET_OF[min(query_tokens, MAX_QUERY_TOKENS)])
        line = min((k0 + k1 * query_tokens) * float(self._factor[bucket]), float(self._most[bucket]))
        return float(line + k2 * features[2] + k3 * features[3] + k4 * features[4])

    def _add(self, cell: int, weight: float, count: float, features: tuple[float, ...], units: float) -> None:
        """Make the cell the mean of ``weight`` old steps and ``count`` new ones."""
        self._mean[cell] += count / (weight + count) * (np.array((*features, units)) - self._mean[cell])
        self._weight[cell] = weight + count

    def _refit(self) -> None:
        faded = 1.0 + (self._weight - 1.0) * math.exp(-self._since_fit / MEMORY_STEPS)
        self._since_fit = 0
        self._weight = np.where(self._weight > 1.0, faded, self._weight)
        seen = np.flatnonzero(self._weight)
        weight, features, units = self._weight[seen], self._mean[seen, :5], self._mean[seen, 5]
        weighted = (weight * MEASUREMENT_PRECISION / units**2)[:, None] * features
        gram = features.T @ weighted + np.diag(PRIOR_PRECISION)
        self._k = _solve_nonnegative(gram, weighted.T @ units + PRIOR_PRECISION * PRIOR)

        k0, k1 = self._k[:2].tolist()
        residual = (units - features @ self._k) / (k0 + k1 * features[:, 1])
        bucket = seen // NUM_CONTEXTS
        num_buckets = len(BUCKET_ENDS)
        count = np.bincount(bucket, weight, num_buckets)
        total = np.bincount(bucket, weight * residual, num_buckets)
        self._doubt = DOUBT / np.sqrt(1.0 + count)
        around = NEIGHBOURS @ total / (NEIGHBOURS @ count + SHRINKAGE)
        self._factor = 1.0 + np.maximum((total + SHRINKAGE * around) / (count + SHRINKAGE), -0.9)
        # A bucket's line rises: where it begins it is lowest.
        begins = (k0 + k1 * BUCKET_STARTS) * self._factor
        self._most[:-1] = np.minimum.accumulate(begins[:0:-1])[::-1]


def _median_of_last(values: list[float], value: float) -> float:
    """Append and return the median of the last three; of two the smaller: disturbances make steps longer."""
    values.append(value)
    del values[:-3]
    return sorted(values)[(len(values) - 1) // 2]


def _solve_nonnegative(gram: Float64, right: Float64) -> Float64:
    """Least squares without negative coefficients: the most negative one leaves until none is."""
    solution = np.zeros(len(right))
    kept = np.arange(len(right))
    while len(kept):
        values = np.linalg.solve(gram[np.ix_(kept, kept)], right[kept])
        if values.min() >= 0.0:
            solution[kept] = values
            break
        kept = np.delete(kept, int(values.argmin()))
    solution[0] = max(float(solution[0]), 1e-3)  # a step is never free, whatever the measurements say
    return solution
