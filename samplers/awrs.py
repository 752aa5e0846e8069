# SPDX-License-Identifier: Apache-2.0
"""Adaptive weighted rejection sampling: a draw under a constraint that is asked about few tokens.

Draw without replacement until a token is allowed: it has the law of ``p`` restricted to what is allowed, and on most
rows the first one or two are, where a mask needs an answer for the whole vocabulary. One more token is asked about for
a weight, whose mean is the chance ``Z`` that ``p`` gives to what is allowed; for samples of a constrained model, which
is not ``p`` restricted step by step, the product of a request's weights is what to weigh it by.

Source: "Fast Controlled Generation from Language Models with Adaptive Weighted Rejection Sampling", COLM 2025 (arXiv
2504.05410), the estimator of its code for two accepted tokens. There a geometric one takes its place where a token has
two thirds of ``p`` or more; this one holds there too (the tests enumerate it), and asks at most once more. Added:
where the constraint can also list all allowed tokens, that list is requested after a number of rejections. Behind any
rejections the mean of the weight is ``Z``, which then is known, and the token's law that of ``p`` restricted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vllm_ext.kernels.chance import Chance
from vllm_ext.kernels.sparse import Float64, Int32


class Draw(NamedTuple):
    """What came of one row."""

    token: int | None  # None: nothing that has a chance is allowed
    # Of mean Z, together with the token: E[weight * (token is v)] is p(v) where v is allowed, and 0 where not.
    weight: float
    checks: int  # tokens that were asked about


PATIENCE = (
    16  # rejections; a mask of a grammar takes as long as some hundred questions, a draw here as a dozen
)


def draw(
    p: Float64,
    allowed: Callable[[int], bool],
    chance: Chance,
    all_allowed: Callable[[], Int32] | None = None,
    patience: int = PATIENCE,
) -> Draw:
    """One token of ``p`` among those that are allowed.

    Args:
        p: float64 ``[vocab]``, the target's distribution; of a truncated one what is left, adding up to less than 1.
        allowed: whether a token may come next. Asked about each token once at most, never about those without a chance.
        chance: where the randomness comes from.
        all_allowed: ids of all tokens that may come next; None where that cannot be told.
        patience: rejections after which it is asked for.
    """
    left = p.copy()
    mass, checks = float(left.sum()), 0
    while mass > 0.0:
        if all_allowed is not None and checks == patience:
            ids = all_allowed()
            total = float(p[ids].sum())
            return Draw(int(ids[chance.draw(p[ids])]) if total > 0.0 else None, total, checks)
        token = chance.draw(left)
        left[token] = 0.0
        checks += 1
        if allowed(token):
            break
        mass = float(left.sum())
    else:
        return Draw(None, 0.0, checks)
    # With q = p(token) / mass the chance that the token comes first, Z is what was not rejected, mass, times an
    # estimate of the allowed part of that: q, and of the rest, 1 - q, what one more draw from it says.
    if not left.any():
        return Draw(token, mass, checks)
    other = chance.draw(left)
    return Draw(token, mass if allowed(other) else float(p[token]), checks + 1)
