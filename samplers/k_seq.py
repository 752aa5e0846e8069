# SPDX-License-Identifier: Apache-2.0
"""SpecTr's k-SEQ: verify ``k`` sequences that were drawn from the draft independently of each other.

At each depth the next tokens of the drafts that agree with the output so far are tried one after the other, each
accepted with probability ``min(1, p / (rho q))``; where none is, the token is drawn from what the target has left. The
output has the target's law for every rho that leaves nothing negative; the smallest one accepts most.

Source: "SpecTr: Fast Speculative Decoding via Optimal Transport", arXiv 2310.15141, algorithm 3. As there, drafts that
agree count each, also where they have become one row of the target's tree.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vllm_ext.kernels.chance import Chance, Float64

Int32 = npt.NDArray[np.int32]
BISECTIONS = 40  # rho to a part in 10^11


def k_seq(
    drafts: Int32,
    rows: Int32,
    p: Callable[[int], Float64],
    q: Callable[[int], Float64],
    chance: Chance,
) -> tuple[list[int], list[int]]:
    """Verify one request's drafts.

    Args:
        drafts: int32 ``[k, length]`` tokens, each row drawn from the draft on its own.
        rows: int32 ``[k, length]`` the row of the target's tree that has that token as its input, after those
            before it in the draft; drafts share rows as far as they agree.
        p: the target's distribution after a row, float64 ``[vocab]``, adding up to 1; the root's row is 0.
        q: the draft's, likewise.
        chance: independent of the draft's.

    Returns:
        The accepted rows, root left out, and the emitted tokens, always one more than the accepted rows.
    """
    path: list[int] = []
    emitted: list[int] = []
    agreeing = list(range(len(drafts)))
    row = 0
    for depth in range(drafts.shape[1]):
        ahead, behind = p(row), q(row)
        rho = smallest_rho(ahead, behind, len(agreeing))
        accepted = None
        for draft in agreeing:
            token = drafts[draft, depth]
            if chance.accepts(ahead[token], rho * behind[token]):
                accepted = draft
                break
        if accepted is None:
            emitted.append(chance.draw(residual(ahead, behind, rho, len(agreeing))))
            return path, emitted
        row = int(rows[accepted, depth])
        path.append(row)
        emitted.append(int(drafts[accepted, depth]))
        agreeing = [draft for draft in agreeing if drafts[draft, depth] == drafts[accepted, depth]]
    emitted.append(chance.draw(p(row)))
    return path, emitted


def smallest_rho(p: Float64, q: Float64, k: int) -> float:
    """The smallest valid rho, 1 to ``k``: where ``1 - (1 - beta)^k = rho beta``, with ``beta = sum(min(q, p / rho))``.

    Args:
        p: float64 ``[vocab]``.
        q: float64 ``[vocab]``.
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


def residual(p: Float64, q: Float64, rho: float, k: int) -> Float64:
    """float64 ``[vocab]``: in proportion to what the target has left when all ``k`` were rejected."""
    taken = np.minimum(q, p / rho)
    beta = taken.sum()
    rejected = 1 - beta
    if beta <= 0.0:
        return p
    above = np.maximum(p - taken * (1 - rejected**k) / beta, 0.0)
    return above if above.sum() > 0.0 else p
