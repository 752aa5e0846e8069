# SPDX-License-Identifier: Apache-2.0
"""Which exit and how long a chain: closed forms against sums, known optima, and what may count as evidence."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from vllm_ext.proposers.dynamic_exit import DynamicExit, DynamicExitOptions
from vllm_ext.proposers.exit_budget import ExitBudget
from vllm_ext.proposers.exit_choice import ExitChoice, expected_tokens, loaded_layers
from vllm_ext.proposers.layerskip import LayerSkip, LayerSkipOptions
from vllm_ext.proposers.tree import DraftTree
from vllm_ext.proposers.unified_skip import UnifiedSkipOptions, balanced, kept_layers


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9, 0.999999, 1.0])
def test_expected_tokens_is_the_sum(acceptance: float) -> None:
    for drafted in range(9):
        brute = sum(acceptance**i for i in range(drafted + 1))
        assert expected_tokens(acceptance, drafted) == pytest.approx(brute, rel=1e-6)


def test_a_known_profile_has_a_known_best() -> None:
    """Against all choices tried one by one."""
    exits, layers, longest = [4, 8, 16, 24], 32, 10
    acceptance = np.array([0.1, 0.7, 0.75, 0.97])
    choice = ExitChoice(len(exits), longest)
    rng = np.random.default_rng(0)
    for _ in range(400):
        right = rng.random((4, 50)) < acceptance[:, None]
        choice.observe("a", np.where(right, 7, 8).astype(np.int32), [7] * 50)
    assert choice.acceptance("a") == pytest.approx(acceptance, abs=0.03)
    best = max(
        ((e, d) for e in range(4) for d in range(longest + 1)),
        key=lambda c: sum(acceptance[c[0]] ** i for i in range(c[1] + 1)) / (c[1] * exits[c[0]] + layers),
    )
    *found, rate = choice.best(["a"], loaded_layers(exits, layers, longest))
    assert tuple(found) == best
    assert rate == choice.tokens(["a"])[best] / (best[1] * exits[best[0]] + layers)
    assert best[0] == 1  # not the exit that is right most often


def test_a_constant_rate_is_reproduced_whatever_the_decay() -> None:
    choice = ExitChoice(2, 4)
    for _ in range(2000):
        choice.observe("a", np.array([[1, 2, 9, 9], [1, 2, 3, 4]], np.int32), [1, 2, 3, 4])
    assert choice.acceptance("a") == pytest.approx([0.5, 1.0], abs=1e-3)


def test_drafts_tell_what_shadows_would() -> None:
    """What follows the first rejected token was drafted after another text than the target's: it is no evidence."""
    choice, rng, rate = ExitChoice(3, 4), np.random.default_rng(0), 0.6
    before, seen = choice.acceptance("a"), []
    for _ in range(4000):
        right = rng.random(4) < rate
        choice.observe_drafts("a", 1, 4, int(np.argmin(right)) if not right.all() else 4)
        seen.append(choice.acceptance("a"))
    assert np.mean(seen[200:], axis=0) == pytest.approx([before[0], rate, before[2]], abs=0.02)


def test_one_more_token_pays_from_its_worth_on() -> None:
    """Of a step with several requests, more is for all of them, and so are the tokens."""
    choice = ExitChoice(2, 4)
    for name, rate in (("a", 0.5), ("b", 0.75)):
        for _ in range(2000):
            choice.observe(
                name, np.array([[0] * 4, [1] * round(4 * rate) + [0] * round(4 - 4 * rate)]), [1] * 4
            )
    # 0.04 tokens a layer; 8 layers more cost 0.32 tokens, and bring the path's chance times 0.5, or 1.25 of both.
    assert choice.least_worth(["a"], 1, 0.04, 8.0) == pytest.approx(0.64, rel=0.1)
    assert choice.least_worth(["a", "b"], 1, 0.04, 8.0) == pytest.approx(0.256, rel=0.1)


def test_requests_have_evidence_of_their_own_and_new_ones_that_of_all() -> None:
    choice = ExitChoice(1, 4)
    for _ in range(100):
        choice.observe("good", np.array([[1, 1, 1]], np.int32), [1, 1, 1])
        choice.observe("bad", np.array([[2, 2, 2]], np.int32), [1, 1, 1])
    good, bad, new = (float(choice.acceptance(name)[0]) for name in ("good", "bad", "new"))
    assert good > 0.9 > 0.6 > new > 0.4 > 0.1 > bad
    choice.finish("good")
    assert float(choice.acceptance("good")[0]) == new
    # The step's requests count together.
    tokens = choice.tokens(["bad", "new"])
    assert tokens == pytest.approx(choice.tokens(["bad"]) + choice.tokens(["new"]))


class Machine:
    """An exit budget and steps that cost what their layers do, in milliseconds."""

    def __init__(self, acceptance: list[float], exits: list[int], layers: int = 30) -> None:
        self.acceptance, self.exits, self.layers = np.array(acceptance), exits, layers
        self.budget = ExitBudget(ExitChoice(len(exits), 6))
        sizes = np.array([1, 2, 4, 8, 16])
        self.budget.cost.calibrate(sizes, 1e-3 * layers * (1 + 0.01 * sizes))
        for costs, of in (
            (self.budget.pass_costs, exits),
            (self.budget.rest_costs, [layers - e for e in exits]),
        ):
            for cost, count in zip(costs, of, strict=True):
                cost.calibrate(sizes, 1e-3 * count * (1 + 0.01 * sizes))
        self.rng = np.random.default_rng(0)
        self.slow = 1.0

    def run(self, steps: int) -> list[tuple[int, int]]:
        chosen = []
        for _ in range(steps):
            nodes = self.budget.plan(["a"], 100)
            chosen.append((self.budget.exit, nodes))
            if nodes:
                exit_layer = self.exits[self.budget.exit]
                for _ in range(nodes + 1):
                    self.budget.record_pass(self.slow * 1e-3 * exit_layer * 1.01, 1, 1, 100)
                self.budget.drafted([DraftTree.empty()], 1e-5)
                rest = self.slow * 1e-3 * (self.layers - exit_layer) * (1 + 0.01 * (1 + nodes))
                self.budget.record_step(rest, 1 + nodes, 1, 100, self.budget.exit)
                right = self.rng.random((len(self.exits), 2)) < self.acceptance[:, None]
                self.budget.choice.observe("a", np.where(right, 7, 8).astype(np.int32), [7, 7])
            else:
                self.budget.record_step(self.slow * 1e-3 * self.layers * 1.01, 1, 1, 100, None)
        return chosen


def test_the_budget_finds_the_exit_that_pays() -> None:
    machine = Machine([0.05, 0.8, 0.85], [3, 6, 20])
    late = machine.run(400)[200:]
    assert sum(exit == 1 and nodes > 2 for exit, nodes in late) > 180
    assert machine.budget.state()["gain"] > 1.3


def test_the_budget_drafts_nothing_where_no_exit_pays() -> None:
    machine = Machine([0.02, 0.05, 0.1], [3, 6, 20])
    late = machine.run(1500)[500:]
    assert sum(nodes == 0 for _, nodes in late) > 950
    assert sum(nodes > 0 for _, nodes in late) > 0  # and goes on asking
    machine.acceptance = np.array([0.02, 0.95, 0.95])
    assert sum(nodes > 1 for _, nodes in machine.run(3000)[-100:]) > 90


def test_a_machine_that_slows_down_changes_nothing() -> None:
    """What is not measured now becomes dearer with what is: without that, drafting would seem to gain nothing."""
    machine = Machine([0.05, 0.8, 0.85], [3, 6, 20])
    machine.run(300)
    before = machine.budget.state()["gain"]
    machine.slow = 2.0
    machine.run(300)
    assert machine.budget.state()["gain"] == pytest.approx(before, rel=0.2)


def test_balanced_layers() -> None:
    for layers in (2, 7, 30, 32):
        assert balanced(layers, 1.0) == list(range(layers))
        for speedup in (1.5, 2.0, 4.0, 16.0):
            kept = balanced(layers, speedup)
            assert len(kept) == max(round(layers / speedup), 2)
            assert (kept[0], kept[-1]) == (0, layers - 1)
            assert kept == sorted(set(kept))
            gaps = np.diff(kept)
            assert gaps.max() - gaps.min() <= 1


def test_layers_that_are_named_stay() -> None:
    assert kept_layers(UnifiedSkipOptions(), 30) == balanced(30, 2.0)
    assert kept_layers(UnifiedSkipOptions(layers=[0, 4, 29]), 30) == [0, 4, 29]
    with pytest.raises(ValueError, match=r"layers=\[0, 4, 29\] is not allowed; allowed: 0 to 28"):
        kept_layers(UnifiedSkipOptions(layers=[0, 4, 29]), 29)
    for wrong in ([4, 0], [1, 1], [-1, 2]):
        with pytest.raises(ValidationError, match="in ascending order, each once"):
            UnifiedSkipOptions(layers=wrong)


def test_exits_by_default() -> None:
    assert LayerSkip(LayerSkipOptions()).exits(30) == [7]
    assert LayerSkip(LayerSkipOptions(exit_layer=3)).exits(30) == [3]
    proposer = DynamicExit(DynamicExitOptions())
    assert proposer.exits(30) == [3, 7, 10, 13, 17, 20]
    assert proposer.exits(2) == [1]
    for wrong in ([], [4, 4], [8, 4], [0, 3]):
        with pytest.raises(ValueError, match="must be numbers of layers from 1, ascending"):
            DynamicExitOptions(exits=wrong)
