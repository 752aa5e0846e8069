# SPDX-License-Identifier: Apache-2.0
"""A distribution over few tokens of a vocabulary: what a draft is drawn from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]


class Sparse(NamedTuple):
    """Every token that is not among ``ids`` has no chance."""

    ids: Int32  # [support] token ids, distinct
    q: Float64  # [support] their probabilities, adding up to 1
