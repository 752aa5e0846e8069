# SPDX-License-Identifier: Apache-2.0
"""How often verification accepts a token that was drawn from the draft's distribution, learnt as requests go on.

Recursive rejection accepts a token ``x`` with chance ``min(1, p(x) / q(x))``: always where draft and target agree,
however small ``q(x)`` is. So the draft's probability says little by itself. What it is worth is counted: by how many
siblings were rejected before, and by the probability that the token was drawn with. Before a draw the expected chance
is the mean of these over what may be drawn; where the counts are right that is ``sum(min(p, q))``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_ext.kernels.sparse import Float64

BOUNDS: Float64 = np.array(
    [0.01, 0.03, 0.06, 0.12, 0.2, 0.3, 0.4, 0.55, 0.7, 0.85, 0.95]
)  # of a draw's probability
# Before anything was counted: by siblings before, the later ones alike, and by the bins of BOUNDS. Rounded from drafts
# of SmolLM2-135M by a model of eight of its layers at temperature 1.
PRIOR: Float64 = np.array(
    [
        [0.20, 0.20, 0.24, 0.29, 0.35, 0.42, 0.48, 0.55, 0.62, 0.73, 0.82, 0.92],
        [0.06, 0.08, 0.10, 0.13, 0.18, 0.24, 0.29, 0.35, 0.45, 0.60, 0.72, 0.88],
        [0.05, 0.06, 0.07, 0.09, 0.13, 0.18, 0.22, 0.31, 0.42, 0.52, 0.65, 0.80],
        [0.03, 0.03, 0.04, 0.06, 0.10, 0.14, 0.18, 0.25, 0.38, 0.45, 0.60, 0.75],
    ]
)
NUM_RANKS = len(PRIOR)
FADE = 0.998  # what is left of a count when the next one is added: the last 500 or so count
PRIOR_TRIALS = 32.0  # what the prior is worth


class Acceptance:
    """Counts of all requests, of one drafter."""

    def __init__(self) -> None:
        # [NUM_RANKS, len(BOUNDS) + 1]
        self.trials: Float64 = np.full_like(PRIOR, PRIOR_TRIALS)
        self.hits: Float64 = self.trials * PRIOR

    def groups(self, rank: int, chances: Float64) -> npt.NDArray[np.int64]:
        """int64, the shape of ``chances``: which count each token belongs to.

        Args:
            rank: siblings drawn before, from 0 on.
            chances: float64, with which tokens are drawn.
        """
        column = np.searchsorted(BOUNDS, chances, side="right")
        return column + min(rank, NUM_RANKS - 1) * (len(BOUNDS) + 1)

    def estimates(self, groups: npt.NDArray[np.int64]) -> Float64:
        """float64, the shape of ``groups``: how often their tokens are accepted when verification gets there."""
        estimates: Float64 = self.hits.flat[groups] / self.trials.flat[groups]
        return estimates

    def count(self, group: int, accepted: bool) -> None:
        """Verification got to a token of this group."""
        self.trials.flat[group] = FADE * self.trials.flat[group] + 1.0
        self.hits.flat[group] = FADE * self.hits.flat[group] + accepted
