# SPDX-License-Identifier: Apache-2.0
"""Counts of how often nodes were right. That drafters' estimates converge is tested with each of them."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_ext.kernels.grown_tree import GrownTree
from vllm_ext.proposers.calibration import FADE, NUM_DEPTHS, PRIOR_TRIALS, Calibration

PRIOR = np.array([[0.5, 0.25], [0.75, 0.125]])


def tree(*nodes: tuple[int, int, int]) -> GrownTree:
    """Of token, parent and group."""
    grown = GrownTree.of_size(len(nodes))
    for place, (token, parent, group) in enumerate(nodes):
        grown.tokens[place], grown.parents[place], grown.groups[place] = token, parent, group
    return grown


def test_the_prior_is_the_first_estimate() -> None:
    calibration = Calibration(PRIOR)
    assert calibration.estimates.shape == (2, 2, NUM_DEPTHS)
    assert (calibration.estimates == PRIOR[..., None]).all()
    assert calibration.nbytes == 2 * 8 * 4 * NUM_DEPTHS
    with pytest.raises(ValueError, match="257 groups"):
        Calibration(np.full(257, 0.5))


def test_a_group_is_its_place_in_the_prior() -> None:
    calibration = Calibration(PRIOR)
    calibration.drafted("r", tree((5, -1, 2), (6, -1, 1), (7, 0, 3)))
    calibration.judge(["r"], [[5, 8]])
    trials, hits = np.full((2, 2, NUM_DEPTHS), PRIOR_TRIALS), PRIOR_TRIALS * PRIOR[..., None].repeat(4, 2)
    for place, hit in (((1, 0, 0), 1), ((0, 1, 0), 0), ((1, 1, 1), 0)):
        trials[place] = trials[place] * FADE + 1
        hits[place] = hits[place] * FADE + hit
    assert (calibration.trials == trials).all()
    assert (calibration.hits == hits).all()


def test_a_tree_is_judged_once_by_the_next_output() -> None:
    calibration = Calibration(PRIOR)

    def judged(*emitted: int) -> int:
        before = calibration.trials.copy()
        calibration.judge(["other", "r"], [[5], list(emitted)])
        return int((calibration.trials != before).sum())

    calibration.drafted("r", tree((1, -1, 0)))
    calibration.drafted("r", tree((5, -1, 0), (6, -1, 1)))  # instead of the first
    assert judged() == 0  # nothing came yet: it waits
    assert judged(5) == 2
    assert judged(5) == 0
    calibration.drafted("r", tree((5, -1, 0)))
    calibration.forget("r")
    assert judged(5) == 0
