# SPDX-License-Identifier: Apache-2.0
"""DEL's choice: which exit drafts, and how many tokens, by what every exit would have said so far.

Every so often a verified step tells, for each exit, the token it would have put out at each position (its shadow
token). How often that is the target's own, recent steps counting more, estimates the chance ``a`` that a token drafted
there is accepted; for the exit that drafts, what becomes of its drafts tells it at every other step too. A chain of
``d`` such tokens puts out ``(1 - a^(d + 1)) / (1 - a)`` in expectation. The exit and the length with the most tokens
for their cost are taken.

Source: "DEL: Context-Aware Dynamic Exit Layer for Efficient Self-Speculative Decoding", arXiv 2504.05598: shadow
tokens, decayed acceptance, tokens per layer. Deviations, ours: measured seconds instead of loaded layers where
there is a budget; a request starts from what others have shown; requests of a step share exit and length, the sum of
their tokens counts; shadows of some steps only, and of the others what became of the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

DECAY = 0.95  # of a request's own evidence of an exit, each time there is new
COMMON_DECAY = 0.99  # of all requests' together
PRIOR = 6.0  # positions' worth of trust in what others have shown
FIRST = 0.3  # believed of every exit before anything is known, with the weight of FIRST_WEIGHT positions
FIRST_WEIGHT = 2.0


def expected_tokens(acceptance: npt.ArrayLike, num_drafted: npt.ArrayLike) -> Float64:
    """Tokens a verified chain puts out in expectation: ``1 + a + a^2 + ... + a^d``; the arguments broadcast."""
    a, d = np.broadcast_arrays(np.asarray(acceptance, np.float64), np.asarray(num_drafted))
    sure = a > 1.0 - 1e-9
    safe = np.where(sure, 0.5, a)
    tokens: Float64 = np.where(sure, d + 1.0, (1.0 - safe ** (d + 1)) / (1.0 - safe))
    return tokens


class ExitChoice:
    """What is known of each exit, by request.

    Args:
        num_exits: at least 1.
        max_drafted: longest chain.
    """

    def __init__(self, num_exits: int, max_drafted: int) -> None:
        self.num_exits, self.max_drafted = num_exits, max_drafted
        # By request, and of all: tokens that were the target's own, and tokens seen; float64 `[2, num_exits]`.
        self._seen: dict[str, Float64] = {}
        self._common = FIRST_WEIGHT * np.array([[FIRST] * num_exits, [1.0] * num_exits])

    def observe(self, request_id: str, shadows: npt.NDArray[np.int32], target: Sequence[int]) -> None:
        """Learn from one verified step.

        Args:
            request_id: whose.
            shadows: int32 ``[num_exits, num_rows]``, tokens the exits would have put out behind the root and behind
                each accepted token: rows whose input the target has confirmed.
            target: ``[num_rows]``, what the target has put out there.
        """
        hits = (shadows == np.asarray(target)).sum(1)
        self._learn(request_id, slice(None), hits, len(target))

    def observe_drafts(self, request_id: str, exit_index: int, drafted: int, accepted: int) -> None:
        """Learn from a step without shadows: of the exit that drafted alone, up to its first rejected token.

        Args:
            request_id: whose.
            exit_index: of the exit.
            drafted: tokens of the chain that were verified, at least one.
            accepted: of these.
        """
        self._learn(request_id, slice(exit_index, exit_index + 1), accepted, min(accepted + 1, drafted))

    def _learn(self, request_id: str, exits: slice, hits: npt.NDArray[np.int64] | int, trials: int) -> None:
        seen = self._seen.setdefault(request_id, np.zeros((2, self.num_exits)))
        for counts, decay in ((seen, DECAY), (self._common, COMMON_DECAY)):
            counts[:, exits] *= decay
            counts[0, exits] += hits
            counts[1, exits] += trials

    def finish(self, request_id: str) -> None:
        """Forget a request; what it has shown of the exits stays."""
        self._seen.pop(request_id, None)

    def acceptance(self, request_id: str) -> Float64:
        """float64 ``[num_exits]``: the chance that a token drafted there is accepted."""
        hits, trials = self._seen.get(request_id, np.zeros((2, self.num_exits)))
        found: Float64 = (hits + PRIOR * self._common[0] / self._common[1]) / (trials + PRIOR)
        return found

    def tokens(self, request_ids: Sequence[str]) -> Float64:
        """float64 ``[num_exits, max_drafted + 1]``: what a step puts out in expectation, by exit and length."""
        acceptance = np.array([self.acceptance(request_id) for request_id in request_ids])
        lengths = np.arange(self.max_drafted + 1)
        tokens: Float64 = expected_tokens(acceptance[:, :, None], lengths).sum(0)
        return tokens

    def least_worth(self, request_ids: Sequence[str], exit_index: int, rate: float, more: float) -> float:
        """The chance of a path from which on one more token pays.

        Args:
            request_ids: those of the step.
            exit_index: of the exit that drafts.
            rate: tokens for their cost, of the step as it is.
            more: what one more token for each request costs.
        """
        accepted = sum(float(self.acceptance(request_id)[exit_index]) for request_id in request_ids)
        return rate * more / accepted

    def best(self, request_ids: Sequence[str], cost: npt.ArrayLike) -> tuple[int, int, float]:
        """The exit and length with the most tokens for their cost, and how many these are.

        Args:
            request_ids: those of the step.
            cost: ``[num_exits, max_drafted + 1]``, of drafting and verifying: layers, or seconds.
        """
        rate = self.tokens(request_ids) / np.asarray(cost)
        choice, length = np.unravel_index(int(rate.argmax()), rate.shape)
        return int(choice), int(length), float(rate.max())


def loaded_layers(exits: Sequence[int], num_layers: int, max_drafted: int) -> Float64:
    """The paper's cost of a step, in layers loaded: ``d E + L``; float64 ``[num_exits, max_drafted + 1]``.

    Args:
        exits: how many layers are below each.
        num_layers: of the model.
        max_drafted: longest chain.
    """
    return np.outer(exits, np.arange(max_drafted + 1)).astype(np.float64) + num_layers
