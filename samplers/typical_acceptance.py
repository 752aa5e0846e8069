# SPDX-License-Identifier: Apache-2.0
"""Typical acceptance: keep drafts that are typical of the target, without a draw. Lossy: not the target's law.

Behind a row with distribution ``p`` and entropy H(p) a child x passes where ``p(x) > min(threshold, alpha * exp(-H))``:
the surer the target, the likelier a draft has to be. Of all paths whose nodes pass, the longest is taken, among equals
the one with the largest sum of log p. The token behind it is a draw from the target's own ``p``.

Source: Medusa, arXiv 2401.10774, section 2.3.1, with its code's ``posterior_threshold`` 0.09 and ``posterior_alpha``
0.3, the root of it. Deviations:

- There each step begins with the target's token and its children are judged with it; here that token was put out by the
  step before. The rule is the same, and the first token of a step need not be a draft.
- H is exact; the code adds 1e-5 within the logarithm.
- Where the draw behind the path is a draft too, the walk goes on from there: it is the target's own token, as in
  `tree_walk`. With a threshold that nothing passes, the output is that of `tree_walk`, token for token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_ext.kernels.sparse import Float64

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Typical:
    """How likely a draft has to be."""

    threshold: float  # 0 to 1; where the target is unsure
    alpha: float  # above 0; the share of exp(-H), the probability that a typical token has

    def limit(self, entropy: Float64) -> Float64:
        """What a child's probability must exceed.

        Args:
            entropy: float64, any shape: H of the distributions behind the parents, in nats.
        """
        return np.minimum(self.threshold, self.alpha * np.exp(-entropy))


def best_below(parents: Int32, chance: Float64, limit: Float64) -> tuple[Int32, Float64]:
    """The best path of passing nodes below each row of one tree.

    Args:
        parents: int32 ``[num_rows]``, offset of the parent row, parents before children; -1 for the root.
        chance: float64 ``[num_rows]``, each row's token's probability behind its parent; the root's is not read.
        limit: float64 ``[num_rows]``, what the children of each row must exceed.

    Returns:
        How many nodes it has, int32 ``[num_rows]``, and the sum of their log p, float64 ``[num_rows]``; 0 where no
        child passes.
    """
    length, log_p = np.zeros(len(parents), dtype=np.int32), np.zeros(len(parents))
    for row in range(len(parents) - 1, 0, -1):
        parent = parents[row]
        if chance[row] > limit[parent]:
            found = length[row] + 1, log_p[row] + np.log(chance[row])
            if found[0] > length[parent] or (found[0] == length[parent] and found[1] > log_p[parent]):
                length[parent], log_p[parent] = found
    return length, log_p


def choose(chance: Float64, limit: float, length: Sequence[int], log_p: Sequence[float]) -> int | None:
    """The child of one row that the longest path goes by.

    Args:
        chance: float64 ``[num_children]``, probabilities of their tokens behind the row.
        limit: what they must exceed.
        length: of `best_below`, for each child.
        log_p: likewise.

    Returns:
        Its place among the children; None where none passes, and the target draws.
    """
    passing = np.flatnonzero(chance > limit).tolist()
    return max(passing, key=lambda i: (length[i], log_p[i] + np.log(chance[i])), default=None)
