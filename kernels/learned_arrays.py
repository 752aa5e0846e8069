# SPDX-License-Identifier: Apache-2.0
"""Checks of arrays that were made elsewhere, before they are used.

Saved arrays are indexed, and index others, in compiled loops that check no bounds: whatever a file holds, only arrays
that could have been saved may come through.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Learned = npt.NDArray[Any]


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
