# SPDX-License-Identifier: Apache-2.0
"""The threshold of rule adadec, learnt for a model: how high an entropy tells that its first choice is wrong.

Of each token of code that is given: the entropy of ``p`` before it, in nats, and whether it has rank 1 in ``p``. A
logistic regression of the second on the first, both classes weighing the same, makes a probability of each entropy;
of 99 cuts through that the one is taken that tells most tokens right, and the threshold is the entropy there.

Source: "AdaDec: Towards Improving LLM Code Generation via Adaptive Decoding", arXiv 2506.08980, and its authors' code
for how accuracy is taken: over all tokens as they are, not by class. So the threshold lies about where rank 1 gets
less likely than not. Deviations: classes are weighed, where the authors leave out tokens of the larger one; the cut
comes from the tokens that the regression has seen, so that figures on those held out are of tokens nobody has seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

CUTS = np.arange(1, 100) / 100.0  # the authors' 0.01 to 0.99
RIDGE = 1.0  # on the weight: that of the authors' library, of no account but where no token is told wrong
LEAST = 50  # tokens of either class to learn from, and to hold out
STEPS, SETTLED = 100, 1e-9  # of Newton's method, and when it has arrived


class NotTold(ValueError):
    """Entropy does not tell the two classes apart; the message says why."""


@dataclass(frozen=True)
class Learnt:
    """The probability of rank 1 is that of ``weight * entropy + bias``; at ``cut`` the entropy is ``threshold``."""

    weight: float
    bias: float
    cut: float
    threshold: float


@dataclass(frozen=True)
class Told:
    """How a threshold does on some tokens, where a higher entropy is to say that rank 1 is not theirs."""

    accuracy: float  # share of tokens that are told right
    balanced: float  # mean of that share over both classes
    doubt: float  # standard error of `balanced`
    pauses: float  # share of tokens with a higher entropy


def learn(entropy: Floats, first: Bools) -> Learnt:
    """The threshold.

    Args:
        entropy: ``[num_tokens]`` nats.
        first: ``[num_tokens]`` whether a token has rank 1.

    Raises:
        NotTold: there are too few of a class, or rank 1 is not likelier at lower entropy.
    """
    check(first, "to learn from")
    weight, bias = fit(entropy, first)
    if weight >= 0.0:
        raise NotTold("tokens of rank 1 are not those of lower entropy: no threshold tells them from others")
    return Learnt(weight, bias, *best_cut(entropy, first, weight, bias))


def check(first: Bools, what: str) -> None:
    """Refuse too few tokens.

    Raises:
        NotTold: naming how many there are.
    """
    ones = int(first.sum())
    if min(ones, len(first) - ones) < LEAST:
        raise NotTold(
            f"of the tokens {what} {ones:,} have rank 1 and {len(first) - ones:,} have not; {LEAST} of each are "
            "needed. Give more code, or other code"
        )


def fit(entropy: Floats, first: Bools) -> tuple[float, float]:
    """Weight and bias of the logistic regression, both classes weighing the same, by Newton's method."""
    x, y = entropy.astype(np.float64), first.astype(np.float64)
    weigh = len(y) / 2.0 * np.where(first, 1.0 / y.sum(), 1.0 / (1.0 - y).sum())
    rows = np.stack([x, np.ones_like(x)])
    ridge = np.diag([RIDGE, 0.0])

    def loss(at: npt.NDArray[np.float64]) -> float:
        z = at @ rows
        return float((weigh * (np.logaddexp(0.0, z) - y * z)).sum() + 0.5 * at @ ridge @ at)

    found = np.zeros(2)
    for _ in range(STEPS):
        p = 0.5 + 0.5 * np.tanh(0.5 * (found @ rows))
        slope = rows @ (weigh * (p - y)) + ridge @ found
        step = np.linalg.solve((rows * (weigh * p * (1.0 - p))) @ rows.T + ridge, slope)
        if np.abs(step).max() < SETTLED:
            break
        size, now = 1.0, loss(found)
        while size > SETTLED and loss(found - size * step) > now:
            size *= 0.5  # a whole step may lead too far where classes lie apart
        found = found - size * step
    return float(found[0]), float(found[1])


def best_cut(entropy: Floats, first: Bools, weight: float, bias: float) -> tuple[float, float]:
    """The cut that tells most tokens right, and its entropy; of equals the lowest, which pauses the least."""
    thresholds = [(math.log(cut / (1.0 - cut)) - bias) / weight for cut in CUTS]
    right = [int(((entropy <= threshold) == first).sum()) for threshold in thresholds]
    best = int(np.argmax(right))
    return float(CUTS[best]), thresholds[best]


def told(entropy: Floats, first: Bools, threshold: float) -> Told:
    """How a threshold does on tokens of both classes."""
    right = (entropy <= threshold) == first
    shares = [(float(right[each].mean()), int(each.sum())) for each in (first, ~first)]
    return Told(
        accuracy=float(right.mean()),
        balanced=sum(share for share, _ in shares) / 2.0,
        doubt=math.sqrt(sum(share * (1.0 - share) / count for share, count in shares)) / 2.0,
        pauses=float((entropy > threshold).mean()),
    )


def check_told(of: Told) -> None:
    """Refuse a threshold that is no better than chance on tokens held out, by two standard errors.

    Raises:
        NotTold: it is not.
    """
    if of.balanced - 2.0 * of.doubt <= 0.5:
        raise NotTold(
            f"the best threshold tells {of.balanced:.1%} of the tokens held out right, the mean of both classes, and "
            "50% is chance: entropy does not tell them apart. Give more code, or other code"
        )
