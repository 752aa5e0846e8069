# SPDX-License-Identifier: Apache-2.0
"""SpecTr's k-SEQ: verify the next tokens of ``k`` drafts that were drawn independently of each other.

They are tried one after the other, each accepted with probability ``min(1, p / (rho q))``; where none is, the token is
drawn from what the target has left. It has the target's law for every rho that leaves nothing negative; the smallest
one accepts most. Drafts that agree with the output so far are again independent, so the walk goes on with them, also
where what is left gave one of their tokens.

Source: "SpecTr: Fast Speculative Decoding via Optimal Transport", arXiv 2310.15141, algorithm 3. As there, drafts that
agree count each, also where they have become one row of the target's tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_ext.kernels.chance import Chance
from vllm_ext.kernels.sparse import Float64, Sparse

BISECTIONS = 40  # rho to a part in 10^11


def choose(p: Float64, drafts: Sequence[int], q: Sparse, chance: Chance) -> int:
    """The next token after one row.

    Args:
        p: float64 ``[vocab]``, the target's distribution after the row, adding up to 1.
        drafts: the next token of each draft that has come here, in the drafts' order; at least one.
        q: what each was drawn from.
        chance: independent of the draft's.
    """
    ahead = p[q.ids]
    rho = smallest_rho(ahead, q.q, len(drafts))
    for token in drafts:
        place = int(np.flatnonzero(q.ids == token)[0])
        if chance.accepts(ahead[place], rho * q.q[place]):
            return token
    weights = p.copy()
    weights[q.ids] = left_of(ahead, q.q, rho, len(drafts))
    return chance.draw(weights if weights.any() else p)


def smallest_rho(p: Float64, q: Float64, k: int) -> float:
    """The smallest valid rho, 1 to ``k``: where ``1 - (1 - beta)^k = rho beta``, with ``beta = sum(min(q, p / rho))``.

    Args:
        p: float64 ``[support]``, the target's probabilities of q's tokens.
        q: float64 ``[support]``.
        k: drafts, at least 1.
    """
    both = (p > 0) & (q > 0)
    target, draft = p[both], q[both]

    def valid(rho: float) -> bool:
        beta = np.minimum(draft, target / rho).sum()
        return bool(1 - (1 - beta) ** k <= rho * beta)

    low, high = 1.0, float(k)
    if valid(low):
        return low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if valid(middle) else (middle, high)
    return high


def left_of(p: Float64, q: Float64, rho: float, k: int) -> Float64:
    """float64 ``[support]``: what the target has left of q's tokens when all were rejected, as a part of ``p``."""
    taken = np.minimum(q, p / rho)
    beta = taken.sum()
    if beta <= 0.0:
        return p
    left: Float64 = np.maximum(p - taken * (1 - (1 - beta) ** k) / beta, 0.0)
    return left
