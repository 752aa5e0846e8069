# SPDX-License-Identifier: Apache-2.0
"""The learnt threshold of rule adadec: the regression beside a slow one, and known laws that it has to find again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from vllm_ext.samplers import adadec_threshold
from vllm_ext.samplers.adadec_threshold import (
    CUTS,
    LEAST,
    RIDGE,
    NotTold,
    Told,
    best_cut,
    check_told,
    fit,
    learn,
    told,
)


def drawn(count: int, weight: float, bias: float, seed: int = 0) -> tuple[Any, Any]:
    """Entropies, most of them small, and rank 1 with the probability that weight and bias give."""
    draw = np.random.default_rng(seed)
    entropy = draw.exponential(1.0, count)
    return entropy.astype(np.float32), draw.random(count) < 1.0 / (1.0 + np.exp(-(weight * entropy + bias)))


def descended(entropy: Any, first: Any) -> tuple[float, float]:
    """The same regression by gradient descent, token by token."""
    ones = int(first.sum())
    weigh = [len(first) / (2 * (ones if each else len(first) - ones)) for each in first]
    weight = bias = 0.0
    for _ in range(20_000):
        slope_w, slope_b = RIDGE * weight, 0.0
        for x, y, w in zip(entropy.tolist(), first.tolist(), weigh, strict=True):
            error = w * (1.0 / (1.0 + math.exp(-(weight * x + bias))) - y)
            slope_w, slope_b = slope_w + error * x, slope_b + error
        weight, bias = weight - slope_w / len(first), bias - slope_b / len(first)
        if max(abs(slope_w), abs(slope_b)) < 1e-7:
            break
    return weight, bias


@pytest.mark.parametrize(("weight", "bias"), [(-1.5, 2.0), (-0.3, -0.5), (0.4, 0.1)])
def test_regression_is_that_of_a_slow_one(weight: float, bias: float) -> None:
    entropy, first = drawn(60, weight, bias)
    assert fit(entropy, first) == pytest.approx(descended(entropy, first), abs=1e-5)


def test_regression_of_classes_that_lie_apart_has_an_end() -> None:
    entropy = np.concatenate([np.linspace(0.0, 0.5, 300), np.linspace(4.0, 9.0, 100)])
    first = entropy < 1.0
    found = learn(entropy, first)
    assert -60.0 < found.weight < -1.0
    assert 0.5 < found.threshold < 4.0
    assert told(entropy, first, found.threshold) == Told(1.0, 1.0, 0.0, 0.25)


@pytest.mark.parametrize(("weight", "bias"), [(-1.5, 2.0), (-3.0, 2.5), (-1.0, 0.3)])
def test_a_known_law_is_found_again(weight: float, bias: float) -> None:
    entropy, first = drawn(200_000, weight, bias)
    found = learn(entropy, first)
    ones = first.mean()
    assert found.weight == pytest.approx(weight, rel=0.03)
    # Classes of the same weight: the bias without what the larger one had ahead.
    assert found.bias == pytest.approx(bias - math.log(ones / (1.0 - ones)), abs=0.05)
    # Where rank 1 gets less likely than not, to one step of the cut.
    assert found.threshold == pytest.approx(-bias / weight, abs=0.1)
    assert found.threshold == pytest.approx(
        (math.log(found.cut / (1.0 - found.cut)) - found.bias) / found.weight
    )


def test_the_cut_tells_most_tokens_right() -> None:
    entropy, first = drawn(3000, -2.0, 2.0)
    weight, bias = fit(entropy, first)
    accuracy = []
    for cut in CUTS:
        p = 1.0 / (1.0 + np.exp(-(weight * entropy.astype(np.float64) + bias)))
        accuracy.append(((p >= cut) == first).mean())
    cut, threshold = best_cut(entropy, first, weight, bias)
    assert cut == CUTS[int(np.argmax(accuracy))]
    assert told(entropy, first, threshold).accuracy == pytest.approx(max(accuracy))


def test_figures_of_a_threshold() -> None:
    entropy = np.array([0.1, 0.2, 0.9, 2.0, 0.3, 1.5])
    first = np.array([True, True, True, True, False, False])
    found = told(entropy, first, 1.0)
    assert (found.accuracy, found.balanced, found.pauses) == pytest.approx(
        (4 / 6, (3 / 4 + 1 / 2) / 2, 2 / 6)
    )
    assert found.doubt == pytest.approx(math.sqrt(0.75 * 0.25 / 4 + 0.5 * 0.5 / 2) / 2)
    # The rule pauses above its threshold, and not at it.
    assert told(entropy, first, 1.5).pauses == pytest.approx(1 / 6)


def test_what_cannot_be_told_apart_has_no_threshold() -> None:
    entropy, first = drawn(1000, -2.0, 2.0)
    with pytest.raises(NotTold, match=r"to learn from 1,000 have rank 1 and 0 have not; 50 of each"):
        learn(entropy, np.ones(1000, bool))
    with pytest.raises(NotTold, match="0 have rank 1 and 0 have not"):
        learn(entropy[:0], first[:0])
    few = np.arange(1000) < LEAST - 1
    with pytest.raises(NotTold, match="49 have rank 1"):
        learn(entropy, few)
    with pytest.raises(NotTold, match="not those of lower entropy"):
        learn(entropy, ~first)
    draw = np.random.default_rng(3).random(1000) < 0.6  # what entropy says nothing of
    with pytest.raises(NotTold, match=r"entropy does not tell them apart"):
        check_told(told(entropy, draw, 1.0))
    check_told(told(entropy, first, 1.0))


def test_a_threshold_that_never_pauses_is_none() -> None:
    entropy, first = drawn(20_000, -0.2, 3.0)  # nearly all have rank 1, at each entropy
    found = learn(entropy, first)
    with pytest.raises(NotTold):
        check_told(told(entropy, first, found.threshold))


def test_the_rule_and_the_learning_mean_the_same_entropy() -> None:
    torch = pytest.importorskip("torch")
    from vllm_ext.samplers.adadec import entropy_of

    logits = 4 * torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    logits[:, 90:] = -torch.inf  # tokens that do not exist
    p = logits.double().softmax(1)[:, :90]
    expected = -(p * p.log()).sum(1)
    torch.testing.assert_close(entropy_of(logits.log_softmax(1)).double(), expected, rtol=1e-5, atol=1e-5)
    assert adadec_threshold.CUTS.tolist() == pytest.approx([cut / 100 for cut in range(1, 100)])
