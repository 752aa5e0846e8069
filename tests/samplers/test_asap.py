# SPDX-License-Identifier: Apache-2.0
"""Grammar-aligned decoding on the paper's kind of example: strings of five bits, of which all zeros or a leading one
obey, and a model that begins with a zero and then hardly ever obeys. Its laws are enumerated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from vllm_ext.kernels.chance import RandomChance
from vllm_ext.kernels.sparse import Float64, Int32
from vllm_ext.samplers.asap import ENTRY_BYTES, PREFIX_BYTES, ExpectedFuture

LENGTH, END = 5, 2
ALLOWED = [(0,) * LENGTH] + [(1, *rest) for rest in itertools.product((0, 1), repeat=LENGTH - 1)]
PREFIXES = {string[:n] for string in ALLOWED for n in range(LENGTH + 1)}


def model(prefix: Sequence[int]) -> Float64:
    """float64 ``[3]``: zero, one, end. Strings of any length have a chance."""
    if not prefix:
        return np.array([0.9, 0.08, 0.02])
    seed = int("1" + "".join(map(str, prefix)), 2)
    rest: Float64 = np.random.default_rng(seed).dirichlet([2.0, 4.0, 0.5 if len(prefix) < LENGTH else 9.0])
    return rest


def allowed(prefix: tuple[int, ...]) -> Int32:
    if len(prefix) == LENGTH:
        return np.array([END], np.int32)
    return np.array([bit for bit in (0, 1) if (*prefix, bit) in PREFIXES], np.int32)


def chance_of(string: tuple[int, ...]) -> float:
    """The model's, to say it and end."""
    steps = [model(string[:n])[bit] for n, bit in enumerate(string)]
    return float(np.prod(steps) * model(string)[END])


P = np.array([chance_of(string) for string in ALLOWED])
TARGET = P / P.sum()


def plain_weights(prefix: Sequence[int], ids: Int32, p: Float64) -> Float64:
    return p


def law(weights: Callable[[Sequence[int], Int32, Float64], Float64]) -> Float64:
    """Of all strings, where nothing is learnt from asking."""
    result = []
    for string in ALLOWED:
        probability = 1.0
        for n in range(LENGTH):
            ids = allowed(string[:n])
            row = weights(string[:n], ids, model(string[:n])[ids])
            probability *= float(row[ids == string[n]][0] / row.sum())
        result.append(probability)
    return np.array(result)


def sample(future: ExpectedFuture, chance: RandomChance) -> tuple[int, ...]:
    prefix: tuple[int, ...] = ()
    while True:
        ids = allowed(prefix)
        p = model(prefix)[ids]
        token = int(ids[chance.draw(p * future.chances(prefix, ids, p))])
        if token == END:
            return prefix
        prefix = (*prefix, token)


def frozen(future: ExpectedFuture) -> Callable[[Sequence[int], Int32, Float64], Float64]:
    """What it would sample by, asked of a copy."""
    import copy

    return lambda prefix, ids, p: p * copy.deepcopy(future).chances(prefix, ids, p)


def divergence(q: Float64) -> float:
    """KL of the target from a law."""
    return float((TARGET * np.log(TARGET / q)).sum())


def test_the_first_sample_is_plain_constrained_decoding() -> None:
    np.testing.assert_allclose(law(frozen(ExpectedFuture(1 << 20))), law(plain_weights), atol=1e-15)


def test_laws_approach_the_models_conditional() -> None:
    future, chance = ExpectedFuture(1 << 20), RandomChance(np.random.default_rng(0))
    found, bounds = [divergence(law(plain_weights))], [1.0]
    for count in (10, 100, 1000):
        for _ in range(count):
            sample(future, chance)
            bounds.append(future.bound)
        found.append(divergence(law(frozen(future))))
    assert found[0] > 1.0  # plain constrained decoding puts out all zeros nine times in ten
    assert found[1] < found[0] / 20
    assert found[2] < found[1] / 5
    assert found[3] <= found[2]
    assert all(after <= before + 1e-15 for before, after in itertools.pairwise(bounds))
    assert min(bounds) >= P.sum() - 1e-12
    # Once every string was looked at nothing is left to learn.
    for string in ALLOWED:
        for n in range(LENGTH + 1):
            ids = allowed(string[:n])
            future.chances(string[:n], ids, model(string[:n])[ids])
    assert future.bound == pytest.approx(P.sum(), abs=1e-12)
    assert divergence(law(frozen(future))) == pytest.approx(0.0, abs=1e-12)


def test_samples_have_the_conditional_law() -> None:
    future, chance = ExpectedFuture(1 << 20), RandomChance(np.random.default_rng(1))
    drawn = [sample(future, chance) for _ in range(3000)][1000:]
    share = np.array([drawn.count(string) for string in ALLOWED]) / len(drawn)
    assert np.abs(share - TARGET).sum() / 2 < 0.06
    assert np.abs(share - law(plain_weights)).sum() / 2 > 0.5


def test_forgetting_keeps_bounds_and_the_limit() -> None:
    most = 6 * (PREFIX_BYTES + 2 * ENTRY_BYTES)
    future, chance = ExpectedFuture(most), RandomChance(np.random.default_rng(2))
    bounds = []
    for _ in range(2000):
        sample(future, chance)
        assert future.num_bytes <= most
        bounds.append(future.bound)
    assert all(after <= before + 1e-15 for before, after in itertools.pairwise(bounds))
    assert bounds[-1] >= P.sum() - 1e-12
    assert divergence(law(frozen(future))) < 0.5 * divergence(law(plain_weights))


def test_a_dead_end_is_never_sampled_again() -> None:
    future = ExpectedFuture(1 << 20)
    none = np.empty(0, np.int32)
    ids, p = np.array([4, 7], np.int32), np.array([0.6, 0.1])
    assert future.chances([], ids, p).tolist() == [1.0, 1.0]
    assert future.chances([4], none, np.empty(0)).tolist() == []
    assert future.chances([], ids, p).tolist() == [0.0, 1.0]
    assert future.chances([7], none, np.empty(0)).tolist() == []
    assert future.bound == 0.0


def test_a_prefix_that_was_not_allowed_is_named() -> None:
    future = ExpectedFuture(1 << 20)
    future.chances([], np.array([4, 7], np.int32), np.array([0.6, 0.1]))
    with pytest.raises(ValueError, match=r"prefix\[0\]=5 was not allowed there"):
        future.chances([5], np.array([4], np.int32), np.array([0.6]))
