# SPDX-License-Identifier: Apache-2.0
"""The budget of methods with a draft model, on synthetic costs and acceptances."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_ext.proposers.draft_budget import DraftBudget
from vllm_ext.proposers.tree import DraftTree

CEILING = 8


def chain(nodes: int) -> DraftTree:
    return DraftTree.chain(np.arange(nodes, dtype=np.int32), np.linspace(0.9, 0.1, nodes).astype(np.float32))


class Machine:
    """Steps that cost what they are said to, of drafts that are accepted as often as they are said to be."""

    def __init__(self, acceptance: float, per_row: float, draft: float, batch_size: int = 1) -> None:
        self.budget = DraftBudget(CEILING)
        self.acceptance, self.per_row, self.draft, self.batch_size = acceptance, per_row, draft, batch_size
        self.rng = np.random.default_rng(0)
        sizes = np.array([1, 2, 4, 8, 16, 32])
        self.budget.cost.calibrate(sizes, 1e-2 * (1.0 + per_row * sizes))
        self.budget.pass_cost.calibrate(sizes, np.full(6, draft))
        self.seconds = self.plain_seconds = self.tokens = 0.0

    def run(self, steps: int) -> list[int]:
        chosen = []
        for _ in range(steps):
            nodes, _ = self.budget.plan([1] * self.batch_size, 100 * self.batch_size)
            chosen.append(nodes)
            rows = self.batch_size * (1 + nodes)
            target = 1e-2 * (1.0 + self.per_row * rows)
            if nodes:
                self.budget.drafted([chain(nodes)] * self.batch_size, 1e-5 * self.batch_size, nodes - 1)
                for _ in range(nodes):
                    self.budget.record_pass(
                        self.draft, self.batch_size, self.batch_size, 100 * self.batch_size
                    )
            accepted = [
                list(range(int(np.cumprod(self.rng.random(nodes) < self.acceptance).sum())))
                for _ in range(self.batch_size)
            ]
            self.budget.observe([nodes] * self.batch_size, accepted)
            self.budget.record_step(target, rows, self.batch_size, 100 * self.batch_size)
            self.seconds += target + nodes * self.draft
            self.tokens += self.batch_size + sum(map(len, accepted))
        return chosen

    @property
    def gain(self) -> float:
        """Tokens per second, beside none drafted."""
        plain = self.batch_size / (1e-2 * (1.0 + self.per_row * self.batch_size))
        return self.tokens / self.seconds / plain


def test_a_good_cheap_draft_is_used_and_a_dear_one_less() -> None:
    cheap, dear = Machine(0.9, 0.01, 2e-4), Machine(0.9, 0.01, 4e-3)
    assert np.mean(cheap.run(300)[100:]) > np.mean(dear.run(300)[100:]) + 1
    assert cheap.gain > 2.0


@pytest.mark.parametrize(
    ("acceptance", "per_row", "draft"), [(0.0, 0.05, 1e-3), (0.5, 0.05, 2e-2), (0.3, 1.0, 1e-3)]
)
def test_what_does_not_pay_costs_little(acceptance: float, per_row: float, draft: float) -> None:
    """Drafts that are wrong, that take longer than the target, and rows that are not free."""
    machine = Machine(acceptance, per_row, draft, batch_size=4)
    chosen = machine.run(600)
    assert chosen[-100:].count(0) > 80
    assert machine.gain > 0.97


def test_it_comes_back_when_drafts_become_right() -> None:
    machine = Machine(0.0, 0.02, 5e-4)
    machine.run(400)
    machine.acceptance = 0.95
    assert np.mean(machine.run(600)[-50:]) > 4


def test_acceptance_is_learnt_by_rank() -> None:
    budget = DraftBudget(4)
    for _ in range(300):
        budget.observe([4, 2], [[0, 2], [0]])
    assert budget.acceptance() == pytest.approx([1.0, 0.0, 1.0, 0.0], abs=0.2)
    assert DraftBudget(3).acceptance()[0] > 0.5
    budget.observe([0], [[]])
    assert np.isfinite(budget.acceptance()).all()


def test_passes_follow_the_trees() -> None:
    """A tree of two levels takes two passes, however many nodes it has; the second of as many rows as have children."""
    budget = DraftBudget(6)
    tree = DraftTree(
        np.arange(6, dtype=np.int32),
        np.array([-1, -1, -1, 0, 0, 1], np.int32),
        np.full(6, 0.5, np.float32),
    )
    for _ in range(50):
        budget.drafted([tree], 1e-4, 1)
    weight = budget._weight
    assert (budget._depth / np.maximum(weight, 1e-9))[1:] == pytest.approx([1, 1, 1, 2, 2, 2])
    assert (budget._inner / np.maximum(weight, 1e-9))[1:] == pytest.approx([0, 0, 0, 1, 1, 2])
    assert budget.state()["correction"] == 1.0


def test_passes_that_find_nothing_are_charged() -> None:
    right, vain = DraftBudget(4), DraftBudget(4)
    for budget, passes in ((right, 3), (vain, 5)):
        budget.pass_cost.calibrate(np.array([1, 2, 4]), np.full(3, 1e-3))
        for _ in range(100):
            budget.drafted([chain(4)], 1e-4, passes)
    difference = vain._draft_seconds(np.arange(5), 1, 10)[0] - right._draft_seconds(np.arange(5), 1, 10)[0]
    assert difference == pytest.approx([0.0, 0.0, 2e-3, 2e-3, 2e-3], rel=0.05)


def test_spared_passes_are_not_charged() -> None:
    """Of a cascade that spares every other pass those after the first cost half, and must be worth half as much."""
    plain, cascade = DraftBudget(5), DraftBudget(5)
    sizes = np.array([1, 2, 4, 8, 16, 32])
    for budget, spared in ((plain, 0), (cascade, 2)):
        budget.cost.calibrate(sizes, 1e-2 * (1.0 + 0.01 * sizes))
        budget.pass_cost.calibrate(sizes, np.full(6, 1e-3))
        for _ in range(100):
            budget.drafted([chain(5)], 1e-4, 4, spared)
            budget.observe([5], [[0, 1, 2, 3, 4]], [[1.0] * 4])
        assert max(budget.plan([1], 10)[0] for _ in range(9)) == 5
    whole, half = (budget._draft_seconds(np.arange(6), 1, 10)[0] for budget in (plain, cascade))
    assert half[5] - half[1] == pytest.approx((whole[5] - whole[1]) / 2, rel=0.01)
    assert cascade.least_reach == pytest.approx(plain.least_reach / 2, rel=0.2)


def test_a_pass_must_reach_what_its_time_is_worth() -> None:
    """A pass of a tenth of what a token takes: its nodes must be right with a tenth of a chance, all together."""
    budget = settled()
    budget.plan([1] * 4, 400)
    each = float(budget._draft_seconds(np.array([CEILING]), 4, 400)[1][0])
    for right in (1.0, 0.5):
        for _ in range(200):
            # One pass after the first, in every other or every tree a token deep in it is accepted.
            ranks = [[0, 1], [0, 1], [0], [0]] if right < 1.0 else [[0, 1]] * 4
            budget.observe([CEILING] * 4, ranks, [[1.0]] * 4)
        nodes, many = budget.plan([1] * 4, 400)
        assert nodes > 1
        assert many == 4
        # Tokens that this step puts out in such a time.
        worth = budget.state()["gain"] * 4 / (1e-2 * 1.04) * each
        assert budget.least_reach == pytest.approx(worth / right, rel=0.1)
    # Of a drawn tree that does not stop nothing is learnt.
    before = budget._reach
    budget.observe([CEILING], [[0]], [[np.inf]])
    assert budget._reach < before


def test_a_draft_that_is_a_part_of_the_target() -> None:
    """A third of the layers drafts, two thirds are left to verify: what the draft has computed is not paid twice."""
    apart, part = DraftBudget(4, 1), DraftBudget(4, 1, reuses=True)
    sizes = np.array([1, 2, 4, 8])
    for budget in (apart, part):
        budget.cost.calibrate(sizes, np.full(4, 30e-3))
        budget.pass_cost.calibrate(sizes, np.full(4, 10e-3))
    assert part.rest_cost is not None
    part.rest_cost.calibrate(sizes, np.full(4, 20e-3))
    nodes = np.arange(5)
    assert apart._target_seconds(nodes, 1, 1, 10) == pytest.approx([30e-3] * 5, rel=0.05)
    assert part._target_seconds(nodes, 1, 1, 10) == pytest.approx([30e-3, *[20e-3] * 4], rel=0.05)
    # Leaves take a pass of their own.
    difference = part._draft_seconds(nodes, 1, 10)[0] - apart._draft_seconds(nodes, 1, 10)[0]
    assert difference == pytest.approx([0.0, *[10e-3] * 4], rel=0.05)
    # A step that begins behind the exit tells how fast the machine is.
    for _ in range(100):
        part.record_step(20e-3, 3, 1, 10, 0)
    for _ in range(100):
        part.record_step(40e-3, 3, 1, 10, 0)
    assert part.cost.seconds(np.array([1]), 1, 10)[0] == pytest.approx(60e-3, rel=0.15)


def settled(acceptance: float = 0.8) -> DraftBudget:
    """Its drafts pay, and a row that is read takes 0.5 ms."""
    machine = Machine(acceptance, 0.01, 2e-4, batch_size=4)
    machine.run(200)
    machine.budget.reading.record(0.5, 1000)
    return machine.budget


def test_what_is_unread_must_pay_too() -> None:
    """Over an answer of 128 tokens a prompt of 300 tokens does, one of 5000 does not; in a longer answer it does."""
    budget = settled()
    for _ in range(20):
        assert budget.plan([300] * 4, 400)[1] == 4
        assert budget.plan([5000] * 4, 400) == (0, 0)
    for _ in range(300):
        budget.reading.ended(20_000)
    nodes, many = budget.plan([5000] * 4, 400)
    assert nodes > 0
    assert many == 4


def test_those_that_are_read_are_drafted_for() -> None:
    budget = settled()
    nodes, many = budget.plan([1, 1, 9000, 9000], 400)
    assert nodes > 0
    assert many == 2
    # A batch of another size than a power of two, all of it.
    assert budget.plan([1, 1, 2, 2, 2], 400)[1] == 5


def test_probes_read_little_and_are_charged_for_it() -> None:
    """A draft that never pays is asked now and then, about the request with the least to read."""
    machine = Machine(0.0, 0.05, 1e-3, batch_size=4)
    machine.run(100)
    machine.budget.reading.record(0.1, 1000)
    step = 1e-2 * (1.0 + 4 * 0.05)
    read, probes, steps = 0, 0, 4000
    for _ in range(steps):
        nodes, many = machine.budget.plan([50, 80, 900, 900], 400)
        if nodes:
            assert many == 1
            read, probes = read + 50, probes + 1
            machine.budget.observe([nodes, 0, 0, 0], [[], [], [], []])
        machine.budget.record_step(step, 4, 4, 400)
    assert probes >= 3
    assert read * 1e-4 < 0.01 * steps * step


def test_passes_that_tell_two_depths_cost_half() -> None:
    one, two = DraftBudget(8), DraftBudget(8, depths_a_pass=2)
    for budget in (one, two):
        budget.pass_cost.calibrate(np.array([1, 2, 4, 8]), np.full(4, 1e-3))
        budget.drafted([chain(7)], 0.0, 6)
    a, b = (budget._draft_seconds(np.arange(9), 1, 100)[0] for budget in (one, two))
    np.testing.assert_allclose(a[2:] - a[1], 2.0 * (b[2:] - b[1]), rtol=1e-2)
    assert a[7] > b[7] > b[1]


def test_another_draft_is_judged_by_itself_alone() -> None:
    """What it costs is still known; how often the one before was right counts no longer."""
    machine = Machine(acceptance=0.02, per_row=0.01, draft=1e-3)
    given_up = machine.run(400)[-100:]
    budget = machine.budget
    before, cost = budget.acceptance(), budget.pass_cost.seconds(np.array([1]), 1, 100)
    budget.restart()
    assert budget.acceptance() == pytest.approx(DraftBudget(CEILING).acceptance())
    assert budget.acceptance()[0] > 3 * before[0]
    assert budget.pass_cost.seconds(np.array([1]), 1, 100) == cost
    machine.acceptance = 0.9
    assert np.mean(machine.run(100)) > np.mean(given_up) + 1
