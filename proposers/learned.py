# SPDX-License-Identifier: Apache-2.0
"""Checks of what was learnt in another process, before it is used.

Saved arrays are indexed, and index others, in compiled loops that check no bounds: whatever a file holds, only arrays
that `Proposer.learned` could have given may come through.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Learned = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]


def check_names(arrays: Mapping[str, Learned], expected: Collection[str]) -> None:
    """Raise ValueError unless exactly the expected arrays are there."""
    if missing := sorted(set(expected) - set(arrays)):
        raise ValueError(f"{missing[0]} is missing")
    if unknown := sorted(set(arrays) - set(expected)):
        raise ValueError(f"{unknown[0]} is unknown")


def check_array(
    name: str, array: Learned, shape: tuple[int | None, ...], dtype: npt.DTypeLike, low: float, high: float
) -> None:
    """Raise ValueError unless type, shape (None: any length) and range, both ends included, are as expected."""
    fits = len(array.shape) == len(shape) and all(
        wanted in (None, found) for wanted, found in zip(shape, array.shape, strict=True)
    )
    if array.dtype != dtype or not fits:
        wanted_shape = ["any" if length is None else length for length in shape]
        raise ValueError(
            f"{name} is {array.dtype}{list(array.shape)}; expected {np.dtype(dtype)}{wanted_shape}"
        )
    # Written so that NaN fails.
    if array.size and not (array.min() >= low and array.max() <= high):
        raise ValueError(f"{name} has values from {array.min()} to {array.max()}; allowed: {low} to {high}")


def restore_counts(
    arrays: Mapping[str, Learned], hits: Float64, trials: Float64, prior_trials: float, fade: float
) -> None:
    """Copy the calibration ``arrays["hits"]`` and ``arrays["trials"]`` into those of a proposer.

    Args:
        arrays: what was saved.
        hits: float64, written to.
        trials: float64, the same shape, written to.
        prior_trials: what each of the trials began with.
        fade: what is left of a count when the next one is added.

    Raises:
        ValueError: naming the array and what is wrong with it.
    """
    most = max(prior_trials, 1 / (1 - fade)) * (1 + 1e-9)  # where a faded sum of ones tends to
    least = min(prior_trials, 1.0)
    check_array("trials", arrays["trials"], trials.shape, np.float64, least, most)
    check_array("hits", arrays["hits"], hits.shape, np.float64, 0.0, most)
    if (arrays["hits"] > arrays["trials"]).any():
        raise ValueError("hits has more than trials at some place")
    hits[...] = arrays["hits"]
    trials[...] = arrays["trials"]
