# SPDX-License-Identifier: Apache-2.0
"""Entropy-adaptive decoding: while a small model is sure, its text is the answer; elsewhere the large one's is. Lossy.

A chain of the small model's own tokens is drafted. Token j is *sure* where the mean of the small model's entropies, in
nats, over the last ``window`` tokens up to j is below ``threshold``. Sure tokens are taken as they are, the others are
verified exactly, and the large model reads the whole chain in one pass. So each token has the small model's law where
it is sure, and the large one's elsewhere. Whether a token is sure does not depend on which token it is.

Source: "Entropy Adaptive Decoding", arXiv 2502.06833, section 3. Deviations:

- There the entropy is that of whichever model is active. Here it is always the small one's, which is known before the
  large one is asked; places where the small one was not asked are left out.
- No least number of tokens between two changes: there a change costs the other model the tokens it has not read, and
  here the large one reads all of them.
- Behind a token that is not sure the chain goes on; where the large model agrees, sure tokens behind it count.
- Of a distribution only the likeliest tokens are known. What the others add is counted as if each were as likely as
  the last of those, which is the least they can add.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ext.kernels.sparse import Float64

Float32 = npt.NDArray[np.float32]


class EntropyRule(NamedTuple):
    """When a small model is sure."""

    threshold: float  # nats; the mean entropy is below it
    window: int  # tokens that it is the mean of


def entropy(log_q: Float32) -> float:
    """Of a distribution, in nats, as far as it is known.

    Args:
        log_q: float32 ``[support]`` descending, log-probabilities over the whole vocabulary.
    """
    known: Float64 = log_q[np.isfinite(log_q)].astype(np.float64)
    q = np.exp(known)
    rest = max(1.0 - float(q.sum()), 0.0)
    return max(float(-(q * known).sum() - rest * known[-1]), 0.0)


class SureChain:
    """One request's chain while it grows.

    Args:
        rule: the request's.
        before: entropies at the last tokens of its text.
    """

    def __init__(self, rule: EntropyRule, before: Iterable[float] = ()) -> None:
        self.entropies: list[float] = []  # at each node
        self.sure: list[bool] = []  # likewise
        self._rule = rule
        self._window = deque(before, maxlen=rule.window)

    def see(self, log_q: Float32) -> None:
        """The distribution that the next node is of, see `entropy`."""
        self.entropies.append(entropy(log_q))
        self._window.append(self.entropies[-1])
        self.sure.append(sum(self._window) / len(self._window) < self._rule.threshold)

    def chance(self, otherwise: float) -> float:
        """That the last node is accepted: sure ones are."""
        return 1.0 if self.sure[-1] else otherwise


class SureTexts:
    """The requests that have such chains, and the entropies at their last tokens."""

    def __init__(self) -> None:
        self._chains: dict[str, SureChain] = {}  # of the last step that drafted
        self._before: dict[str, deque[float]] = {}

    def clear(self) -> None:
        """No request has a chain, until it is given a new one."""
        self._chains.clear()

    def start(self, request_id: str, rule: EntropyRule) -> SureChain:
        """A new chain behind a request's text."""
        before = self._before.setdefault(request_id, deque(maxlen=rule.window))
        self._chains[request_id] = chain = SureChain(rule, before)
        return chain

    def of(self, request_id: str) -> SureChain | None:
        """A request's chain; None of one that has another kind of draft."""
        return self._chains.get(request_id)

    def observe(self, request_ids: Sequence[str], emitted: Sequence[Sequence[int]]) -> None:
        """A step is verified.

        Args:
            request_ids: the batch.
            emitted: by request its tokens: the first of its chain, and one more.
        """
        for name, tokens in zip(request_ids, emitted, strict=True):
            if (chain := self._chains.pop(name, None)) is not None:
                self._before[name].extend(chain.entropies[: len(tokens)])

    def finish(self, request_id: str) -> None:
        """A request is gone."""
        self._chains.pop(request_id, None)
        self._before.pop(request_id, None)
