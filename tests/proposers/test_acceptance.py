# SPDX-License-Identifier: Apache-2.0
"""How often draws are accepted, as counted."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_ext.kernels.chance import RandomChance
from vllm_ext.proposers.acceptance import BOUNDS, NUM_RANKS, PRIOR, Acceptance
from vllm_ext.proposers.dyspec import SampledTree
from vllm_ext.proposers.sampled import ROOT


def test_acceptance_is_learnt_from_what_was_verified() -> None:
    """Of the children of a node that was accepted those count that were tried: up to the first that was accepted."""
    builder = SampledTree(6, 2, RandomChance(np.random.default_rng(0)), Acceptance())
    builder.tokens, builder.parents = [5, 6, 7, 8, 9, 4], [ROOT, ROOT, 1, 1, ROOT, 0]
    builder.values, builder.groups = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [1, 13, 2, 14, 30, 3]
    known = Acceptance()
    before = known.trials.copy(), known.hits.copy()
    builder.judge([False, True, False, True], known)
    tried = np.flatnonzero(known.trials.flat != before[0].flat)
    assert tried.tolist() == [1, 2, 13, 14]
    up = known.estimates(tried) > (before[1] / before[0]).flat[tried]
    assert up.tolist() == [False, False, True, True]


def test_counts_fade() -> None:
    known = Acceptance()
    for hit in (True, False):
        for _ in range(3000):
            known.count(5, hit)
        assert known.estimates(np.array([5])) == pytest.approx(float(hit), abs=0.01)
    assert known.trials.max() < 600


def test_groups() -> None:
    known = Acceptance()
    assert PRIOR.shape == (NUM_RANKS, len(BOUNDS) + 1)
    assert known.groups(0, np.array([0.0, 0.01, 1.0])).tolist() == [0, 1, 11]
    assert known.groups(NUM_RANKS, np.array([0.0, 0.5, 1.0])).tolist() == [36, 43, 47]
    assert known.estimates(np.arange(PRIOR.size)).tolist() == pytest.approx(PRIOR.ravel().tolist())
    # The likelier a draw, the more often it is accepted; the more siblings were rejected, the less often.
    assert (np.diff(PRIOR, axis=1) >= 0.0).all()
    assert (np.diff(PRIOR, axis=0) <= 0.0).all()
