# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vllm_ext.proposers.budget import GoodputBudget
from vllm_ext.proposers.step_cost import BUCKET_ENDS, DOUBT, Float64, Int64, StepCost
from vllm_ext.proposers.tree import Float32

Curve = Callable[[Float64, int, int], Float64]  # query tokens, batch size, context tokens -> seconds

# Measured on one CPU core, SmolLM2-135M bfloat16, batch 1, in ms.
QUERY_TOKENS = [1, 2, 4, 8, 16, 32, 64]
SHORT = [15.9, 16.5, 17.0, 20.3, 26.1, 39.7, 61.0]  # 60 tokens of context
LONG = [20.5, 21.5, 23.6, 29.5, 40.1, 62.2, 104.3]  # 1900


def cpu_curve(query_tokens: Float64, batch_size: int, context_tokens: int) -> Float64:
    def at(times: list[float]) -> Float64:
        past = np.maximum(query_tokens - 64, 0.0) * (times[-1] - times[-2]) / 32
        return 1e-3 * (np.interp(query_tokens, QUERY_TOKENS, times) + past)

    short = at(SHORT)
    by_context = (at(LONG) - short) / 1840
    other_caches = 1e-6 * max(context_tokens - context_tokens // batch_size, 0)
    return short + by_context * (context_tokens / batch_size - 60) + other_caches + 1e-4 * batch_size


def gpu_curve(query_tokens: Float64, batch_size: int, context_tokens: int) -> Float64:
    """Flat to 64 rows, a staircase of captured sizes beyond."""
    padded = np.where(query_tokens <= 4, query_tokens, np.ceil(query_tokens / 8) * 8)
    computing = np.maximum(2e-6 * padded, 3e-5 * (padded - 64))
    return np.asarray(8e-3 + computing + 5e-8 * context_tokens, dtype=np.float64)


def linear(slope: float) -> Curve:
    return lambda query_tokens, batch_size, context_tokens: 1.0 + slope * query_tokens


class KnownCost(StepCost):
    """A cost model that knows its curve and has nothing to learn."""

    def __init__(self, curve: Curve) -> None:
        super().__init__()
        self.curve = curve
        self.largest_query_tokens = 1 << 20

    def seconds(self, query_tokens: Int64, batch_size: int, context_tokens: int) -> Float64:
        return self.curve(query_tokens.astype(np.float64), batch_size, context_tokens)

    def doubt(self, query_tokens: Int64) -> Float64:
        return np.zeros(len(query_tokens))


def settled(cost: StepCost, batch_size: int, ceiling: int = 64) -> GoodputBudget:
    """A budget past its warm-up, spent on empty trees; so the next choice is no probe."""
    budget = GoodputBudget(ceiling, cost)
    for _ in range(5):
        assert budget.choose(names(batch_size), [tree()] * batch_size, 0) == [0] * batch_size
    return budget


def names(batch_size: int) -> list[str]:
    return [f"r{i}" for i in range(batch_size)]


def tree(*probabilities: float) -> Float32:
    return np.array(probabilities, dtype=np.float32)


def chain(acceptance: float, length: int) -> Float32:
    return (acceptance ** np.arange(1, length + 1)).astype(np.float32)


# ---------------------------------------------------------------------------------------------- StepCost


def seconds_of(
    cost: StepCost, query_tokens: Sequence[int], batch_size: int = 1, context: int = 60
) -> Float64:
    return cost.seconds(np.array(query_tokens), batch_size, context)


@pytest.mark.parametrize("outliers", [0.0, 0.1])
def test_coefficients_are_recovered(outliers: float) -> None:
    true = {
        "step": 8e-3,
        "query_token": 2e-4,
        "request": 5e-5,
        "context_token": 2e-6,
        "query_context_token": 1e-7,
    }
    rng = np.random.default_rng(0)

    def seconds(query: int, batch: int, context: int) -> float:
        line = true["step"] + true["query_token"] * query + true["request"] * batch
        return line + true["context_token"] * context + true["query_context_token"] * query * context / batch

    cost = StepCost()
    for _ in range(800):
        batch = int(rng.choice([1, 2, 4, 8]))
        query, context = batch * int(rng.integers(1, 17)), batch * int(rng.integers(1, 4000))
        disturbed = 4.0 if rng.random() < outliers else 1.0
        cost.record(
            seconds(query, batch, context) * disturbed * math.exp(rng.normal(0, 0.05)), query, batch, context
        )
    for batch, query, context in itertools.product([1, 4, 8], [8, 32, 64], [100, 2000]):
        got = seconds_of(cost, [query], batch, context * batch)[0]
        assert got == pytest.approx(seconds(query, batch, context * batch), rel=0.12)
    found = cost.coefficients()
    assert found.keys() == true.keys()
    for name in ("step", "query_token", "context_token", "query_context_token"):
        assert found[name] == pytest.approx(true[name], rel=0.35), name


def test_one_operating_point_gives_that_point_and_the_prior_elsewhere() -> None:
    cost = StepCost()
    for step in range(300):
        cost.record(0.016 * (3.0 if step % 10 == 0 else 1.0), 4, 4, 400)
    times = seconds_of(cost, [4, 8, 16, 64], 4, 400)
    assert times[0] == pytest.approx(0.016, rel=0.05)
    assert times[0] < times[1] < times[2] < times[3] < 10 * times[0]


def test_a_slow_first_step_is_forgotten_at_once() -> None:
    cost = StepCost()
    for seconds in (2.0, 0.016, 0.016, 0.016):
        cost.record(seconds, 1, 1, 60)
    assert seconds_of(cost, [1])[0] == pytest.approx(0.016)


def test_knees_and_stairs_are_learnt() -> None:
    cost, rng = StepCost(), np.random.default_rng(0)
    for _ in range(600):
        query = int(rng.integers(1, 41))
        cost.record(math.exp(rng.normal(0, 0.03)) * (0.01 if query <= 16 else 0.02), query, 1, 60)
    times = seconds_of(cost, [8, 16, 17, 18, 24, 40])
    assert times[:2] == pytest.approx([0.01, 0.01], rel=0.18)
    assert times[2:] == pytest.approx([0.02] * 4, rel=0.1)


def test_calibration_gives_the_shape_and_steps_only_the_scale() -> None:
    cost = StepCost()
    cost.calibrate(QUERY_TOKENS, np.array(SHORT) * 1e-3)
    assert cost.largest_query_tokens == 64
    assert seconds_of(cost, QUERY_TOKENS, context=0) == pytest.approx(np.array(SHORT) * 1e-3, rel=0.12)
    before = seconds_of(cost, [32])[0] / seconds_of(cost, [1])[0]
    for _ in range(50):
        cost.record(0.020, 1, 1, 60)
    times = seconds_of(cost, [1, 32])
    assert times[0] == pytest.approx(0.020, rel=0.05)
    assert times[1] / times[0] == pytest.approx(before, rel=0.15)


def test_a_slower_machine_changes_no_ratio() -> None:
    """Only one point is visited while a neighbour slows everything down."""
    cost, rng = StepCost(), np.random.default_rng(0)

    def run(steps: int, points: list[int], slowdown: float) -> None:
        for _ in range(steps):
            query = int(rng.choice(points))
            cost.record(float(cpu_curve(np.array([query]), 1, 60)[0]) * slowdown, query, 1, 60)

    def ratio() -> float:
        times = seconds_of(cost, [1, 8])
        return float(times[1] / times[0])

    run(200, [1, 2, 4, 8], 1.0)
    before = ratio()
    run(100, [8], 1.6)
    assert seconds_of(cost, [8])[0] == pytest.approx(1.6 * 0.0204, rel=0.05)
    assert ratio() == pytest.approx(before, rel=0.08)


def test_a_surprise_that_lasts_is_believed_and_one_that_does_not_is_not() -> None:
    for surprises, expected in ((8, 0.1), (1, 0.03)):
        cost = StepCost()
        for _ in range(50):
            cost.record(0.01, 1, 1, 60)
        for _ in range(surprises):
            cost.record(0.1, 64, 1, 60)
        assert seconds_of(cost, [64])[0] == pytest.approx(expected, rel=0.2)
        assert seconds_of(cost, [1])[0] == pytest.approx(0.01, rel=0.25)


def test_doubt_shrinks_where_steps_were_measured() -> None:
    cost = StepCost()
    for _ in range(40):
        cost.record(0.016, 4, 1, 60)
    doubt = cost.doubt(np.array([4, 5]))
    assert doubt[0] < 0.2 * DOUBT
    assert doubt[1] == DOUBT


def test_bucket_ends_are_captured_batch_sizes() -> None:
    assert {1, 2, 4, *range(8, 129, 8)} <= set(BUCKET_ENDS.tolist())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(1e-5, 10.0), st.integers(1, 64), st.integers(1, 100), st.integers(0, 100_000)),
        max_size=60,
    )
)
def test_any_history_gives_a_sane_curve(steps: list[tuple[float, int, int, int]]) -> None:
    cost = StepCost()
    for seconds, batch, nodes, context in steps:
        cost.record(seconds, batch * nodes, batch, context)
    times = seconds_of(cost, [*range(1, 200), 1000, 8192, 100_000], 1, 500)
    assert np.isfinite(times).all()
    assert (times > 0.0).all()
    assert (np.diff(times[:-1]) >= -1e-9 * times[:-2]).all()
    assert all(value >= 0.0 for value in cost.coefficients().values())


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_ignored(seconds: float) -> None:
    cost = StepCost()
    cost.record(0.016, 1, 1, 60)
    before = seconds_of(cost, [1, 8]).tolist()
    cost.record(seconds, 1, 1, 60)
    assert seconds_of(cost, [1, 8]).tolist() == before


# ------------------------------------------------------------------------------------ the choice itself


def test_flat_time_verifies_everything_up_to_the_ceiling() -> None:
    budget = settled(KnownCost(linear(0.0)), 2, ceiling=10)
    assert budget.choose(names(2), [chain(0.9, 12), chain(0.5, 4)], 100) == [10, 4]


def test_zero_probabilities_verify_nothing() -> None:
    budget = settled(KnownCost(linear(0.001)), 2)
    assert budget.choose(names(2), [chain(0.0, 12), tree()], 100) == [0, 0]


@pytest.mark.parametrize("slope", [0.01, 0.05, 0.2])
def test_nodes_per_request_do_not_grow_with_the_batch(slope: float) -> None:
    chosen = []
    for batch_size in (1, 2, 4, 8, 16, 32, 64):
        budget = settled(KnownCost(linear(slope)), batch_size)
        nodes = budget.choose(names(batch_size), [chain(0.7, 32)] * batch_size, 100)
        chosen.append(sum(nodes) / batch_size)
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > chosen[-1]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(0.0, 1.0, width=32), max_size=4).map(lambda p: sorted(p, reverse=True)),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.floats(0.0, 0.5), min_size=20, max_size=20),
)
def test_choice_equals_brute_force(trees: list[list[float]], increments: list[float]) -> None:
    stairs = 1.0 + np.cumsum(increments)
    batch_size = len(trees)

    def goodput(nodes: Sequence[int]) -> float:
        tokens = sum(1.0 + sum(p[:n]) for p, n in zip(trees, nodes, strict=True))
        return float(tokens / stairs[batch_size + sum(nodes) - 1])

    best = max(goodput(nodes) for nodes in itertools.product(*(range(len(p) + 1) for p in trees)))
    assume(best > 1.021 * goodput([0] * batch_size))  # else it does not clear the margin
    budget = settled(KnownCost(lambda q, batch, context: stairs[q.astype(int) - 1]), batch_size)
    nodes = budget.choose(names(batch_size), [tree(*p) for p in trees], 100)
    assert goodput(nodes) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_time_is_worth_what_steps_put_out_on_average(batch_size: int) -> None:
    """Texts that are sure, and that are not: more tokens a second than with each step's own best."""
    kinds = [chain(acceptance, 16) for acceptance in (0.95, 0.2, 0.8, 0.05, 0.5)]
    rows = batch_size * np.arange(1, 18, dtype=np.float64)
    tokens = np.array([np.concatenate([[1.0], 1.0 + np.cumsum(each)]) for each in kinds]) * batch_size
    curve = linear(0.2)
    seconds = curve(rows, batch_size, 100)

    def a_second(nodes: Sequence[int]) -> float:
        return float(sum(tokens[kind, n] for kind, n in enumerate(nodes)) / seconds[list(nodes)].sum())

    each_alone = a_second((tokens / seconds).argmax(axis=1).tolist())
    best, better = 0.0, each_alone
    while better > best:
        best = better
        better = a_second((tokens - best * seconds).argmax(axis=1).tolist())
    budget = settled(KnownCost(curve), batch_size)
    chosen = []
    for step in range(500):
        nodes = budget.choose(names(batch_size), [kinds[step % 5]] * batch_size, 100 * batch_size)
        chosen.append(round(sum(nodes) / batch_size))
    found = a_second(np.array(chosen[-250:]).reshape(-1, 5).mean(axis=0).round().astype(int).tolist())
    assert budget.rate == pytest.approx(best, rel=0.05)
    assert found > each_alone * 1.015
    assert found > best * 0.98


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_choice_is_always_a_prefix_within_the_ceiling(data: st.DataObject) -> None:
    """Whatever the drafter claims, whatever was measured, probes included; trees come and go."""
    ceiling = data.draw(st.integers(0, 6))
    budget = GoodputBudget(ceiling)
    probability = st.one_of(st.floats(0.0, 1.0, width=32), st.just(math.nan), st.just(2.0))
    for _ in range(data.draw(st.integers(1, 40))):
        trees = data.draw(st.lists(st.lists(probability, max_size=8), max_size=4))
        nodes = budget.choose(names(len(trees)), [tree(*p) for p in trees], 100)
        assert len(nodes) == len(trees)
        assert all(0 <= n <= min(len(p), ceiling) for n, p in zip(nodes, trees, strict=True))
        predicted = [float(np.nansum(p[:n])) for n, p in zip(nodes, trees, strict=True)]
        budget.observe(names(len(trees)), predicted, [data.draw(st.integers(0, n)) for n in nodes])
        if trees:
            budget.cost.record(data.draw(st.floats(1e-3, 1.0)), sum(nodes) + len(trees), len(trees), 100)
        assert all(math.isfinite(value) for value in budget.state().values())


def test_no_step_is_more_than_twice_as_large_as_any_measured() -> None:
    budget = GoodputBudget(64)
    largest = 16
    for _ in range(20):
        nodes = budget.choose(names(16), [chain(0.95, 64)] * 16, 100)
        assert sum(nodes) + 16 <= 2 * largest
        largest = max(largest, sum(nodes) + 16)
        budget.cost.record(0.01, sum(nodes) + 16, 16, 100)
    assert largest == 16 * 65  # and it gets there


def test_hint_leaves_room_above_the_last_choice() -> None:
    budget = settled(KnownCost(linear(0.0)), 2, ceiling=30)
    assert budget.hint("unknown") == 30
    budget.choose(names(2), [chain(0.9, 3), chain(0.9, 20)], 100)
    assert (budget.hint("r0"), budget.hint("r1")) == (14, 30)


def test_state_names_the_choice() -> None:
    budget = settled(KnownCost(linear(0.0)), 2)
    budget.choose(names(2), [chain(0.5, 1), chain(0.5, 2)], 100)
    state = budget.state()
    assert state["step_seconds"] == 1.0
    assert state["nodes_per_request"] == 1.5
    assert state["gain"] == pytest.approx((2 + 0.5 + 0.5 + 0.25) / 2)
    assert state["target_efficiency"] == 1.0  # a node costs nothing here
    assert state["correction"] == 1.0


def test_target_efficiency_is_plains_step_over_the_chosen_one() -> None:
    budget = settled(KnownCost(linear(0.1)), 1)
    nodes = budget.choose(names(1), [chain(0.9, 3)], 100)
    seconds = linear(0.1)(np.array([1, 1 + nodes[0]]), 1, 100)
    assert nodes[0] > 0
    assert budget.state()["target_efficiency"] == pytest.approx(seconds[0] / seconds[1])


# --------------------------------------------------------------------------- corrections and probes


def test_each_request_has_its_own_correction_and_new_ones_that_of_all() -> None:
    budget = settled(KnownCost(linear(0.15)), 2)
    for _ in range(60):
        nodes = budget.choose(names(2), [tree(0.6, 0.5)] * 2, 100)
        budget.observe(names(2), [0.6 * (n > 0) + 0.5 * (n > 1) for n in nodes], [nodes[0], 0])
    choice = budget.choose(["r0", "r1"], [tree(0.6, 0.5)] * 2, 100)
    assert choice[0] == 2
    assert choice[1] < 2
    budget.finish("r1")
    budget.finish("unknown")
    shared = budget.state()["correction"]
    budget.observe(["r1"], [1.0], [0])  # forgotten: no evidence
    assert budget.state()["correction"] == shared


def test_a_run_of_rejections_outweighs_a_good_past() -> None:
    budget = settled(KnownCost(linear(0.0)), 1)
    for step in range(120):
        budget.choose(["r0"], [tree(1.0)], 100)
        budget.observe(["r0"], [1.0], [int(step < 100)])
    assert budget.state()["correction"] == pytest.approx(4 / 20)
    budget.observe(["r0"], [1.0], [1])
    assert 0.4 < budget.state()["correction"] < 0.6  # an accepted token ends the run: what is left is fading


def test_steps_without_nodes_are_no_evidence() -> None:
    budget = settled(KnownCost(linear(0.1)), 1)
    budget.choose(["r0"], [tree(0.6)], 100)
    budget.observe(["r0"], [0.6], [1])
    before = budget.state()["correction"]
    assert before > 1.0
    for _ in range(100):
        budget.observe(["r0"], [0.0], [0])
    assert budget.state()["correction"] == before


def test_probes_cost_no_more_than_half_a_percent() -> None:
    """Nothing is ever accepted, and the model knows the cost: all nodes are probes."""
    for batch_size in (1, 8):
        curve = linear(0.05)
        budget = settled(KnownCost(curve), batch_size)
        lost, probed = 0.0, 0
        for step in range(3000):
            nodes = budget.choose(names(batch_size), [chain(0.6, 16)] * batch_size, 100)
            budget.observe(names(batch_size), [0.6 * (n > 0) for n in nodes], [0] * batch_size)
            if step >= 200:
                lost += 0.05 * sum(nodes)
                probed += any(nodes)
        assert probed >= 20
        assert lost <= 0.005 * 2800 * (1.0 + 0.05 * batch_size)


def test_a_batch_that_speculates_does_a_plain_step_now_and_then() -> None:
    budget = settled(KnownCost(linear(0.05)), 1)
    choices = [budget.choose(["r0"], [chain(0.6, 8)], 100)[0] for _ in range(1000)]
    assert 5 <= choices.count(0) <= 32
    assert min(np.diff(np.flatnonzero(np.array(choices) == 0))) >= 32


def test_an_overestimated_cost_is_found_out() -> None:
    """Calibration says that a second row costs more than its draft is worth; in truth it is free."""
    rng = np.random.default_rng(0)
    budget = GoodputBudget(16)
    budget.cost.calibrate([1, 2, 4, 8, 16], [0.010, 0.014, 0.0145, 0.015, 0.016])
    believed = seconds_of(budget.cost, [1, 2])
    assert believed[1] > 1.2 * believed[0]
    probabilities = chain(0.2, 16)
    chosen = []
    for _ in range(400):
        nodes = budget.choose(["r0"], [probabilities], 60)[0]
        accepted = min(nodes, int(rng.geometric(0.8)) - 1)
        budget.observe(["r0"], [float(probabilities[:nodes].sum())], [accepted])
        budget.cost.record(0.01, nodes + 1, 1, 60)
        chosen.append(nodes)
    assert np.mean(np.array(chosen[-100:]) > 0) > 0.9


def test_requests_too_short_to_be_idle_for_long_are_probed_too() -> None:
    budget = settled(KnownCost(linear(0.05)), 1)
    probed = 0
    for step in range(400):
        name = [f"short{step // 4}"]  # four steps each
        nodes = budget.choose(name, [tree(0.02, 0.01)], 100)  # never worth its cost
        probed += nodes[0]
    assert probed >= 8


def test_choosing_is_fast() -> None:
    for batch_size, limit in ((1, 100e-6), (32, 500e-6)):
        budget = settled(StepCost(), batch_size)
        budget.cost.record(0.016, 4096, batch_size, 100)
        trees = [chain(0.9, 64)] * batch_size
        best = math.inf
        for _ in range(100):
            started = time.perf_counter()
            budget.choose(names(batch_size), trees, 100)
            best = min(best, time.perf_counter() - started)
        assert best < limit, f"{best * 1e6:.0f} us for a batch of {batch_size}"


# ------------------------------------------------------------------------------------------ simulation

RANKS = np.array(
    [0.62, 0.12, 0.06, 0.04]
)  # chance that the target takes the drafter's first .. fourth choice
CONFIDENCE = [0.35, 0.7, 1.0, 1.15]


class Template:
    """The best 64 nodes of a tree in which every node's children are accepted with RANKS * confidence."""

    def __init__(self, confidence: float) -> None:
        ranks = RANKS * confidence
        self.ranks = np.cumsum(ranks)
        self.children: dict[tuple[int, int], int] = {}
        probabilities: list[float] = []
        heap = [(-p, -1, rank) for rank, p in enumerate(ranks)]
        while len(probabilities) < 64:
            negative, parent, rank = heapq.heappop(heap)
            node = len(probabilities)
            self.children[parent, rank] = node
            probabilities.append(-negative)
            for child, p in enumerate(ranks):
                heapq.heappush(heap, (negative * p, node, child))
        self.probabilities = np.array(probabilities)
        self.expected = np.concatenate([[0.0], np.cumsum(probabilities)])  # [65] tokens by nodes verified

    def accepted(self, rng: np.random.Generator, nodes: int) -> int:
        node, count = -1, 0
        while True:
            rank = int(np.searchsorted(self.ranks, rng.random()))
            node = self.children.get((node, rank), nodes)
            if node >= nodes:
                return count
            count += 1


TEMPLATES = [Template(confidence) for confidence in CONFIDENCE]
REPORTS: dict[str, Callable[[Float64], Float64]] = {
    "calibrated": lambda p: p,
    "optimistic": lambda p: np.minimum(2.0 * p, 1.0),
    "pessimistic": lambda p: 0.5 * p,
}


class Simulation:
    """Steps of a budget in a world of known times and acceptance; goodput is the world's own expectation."""

    def __init__(
        self, curve: Curve, report: str = "calibrated", acceptance: float = 1.0, seed: int = 0
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.curve, self.report, self.acceptance = curve, REPORTS[report], acceptance
        self.budget = GoodputBudget(64)

    def run(self, steps: int, batch_size: int, context: int = 60) -> tuple[float, float, float, float]:
        """Realised goodput relative to the best fixed budget and to plain, best fixed budget, mean nodes."""
        requests, total_context = names(batch_size), context * batch_size
        tokens = seconds = nodes_sum = 0.0
        fixed_tokens = np.zeros(65)
        for _ in range(steps):
            drawn = [TEMPLATES[i] for i in self.rng.integers(len(TEMPLATES), size=batch_size)]
            trees = [
                self.report(t.probabilities[: self.budget.hint(name)]).astype(np.float32)
                for t, name in zip(drawn, requests, strict=True)
            ]
            nodes = self.budget.choose(requests, trees, total_context)
            query_tokens = batch_size + sum(nodes)
            true_seconds = float(self.curve(np.array([query_tokens]), batch_size, total_context)[0])
            accepted = [
                t.accepted(self.rng, n) if self.rng.random() < self.acceptance else 0
                for t, n in zip(drawn, nodes, strict=True)
            ]
            predicted = [float(p[:n].sum()) for p, n in zip(trees, nodes, strict=True)]
            self.budget.observe(requests, predicted, accepted)
            noise = math.exp(self.rng.normal(0.0, 0.06)) * (3.0 if self.rng.random() < 0.05 else 1.0)
            self.budget.cost.record(true_seconds * noise, query_tokens, batch_size, total_context)
            pairs = zip(drawn, nodes, strict=True)
            tokens += batch_size + self.acceptance * sum(float(t.expected[n]) for t, n in pairs)
            fixed_tokens += batch_size + self.acceptance * sum(t.expected for t in drawn)
            seconds += true_seconds
            nodes_sum += sum(nodes)
        query_tokens_of_fixed = batch_size * np.arange(1, 66, dtype=np.float64)
        fixed = fixed_tokens / (steps * self.curve(query_tokens_of_fixed, batch_size, total_context))
        goodput = tokens / seconds
        return (
            float(goodput / fixed.max()),
            float(goodput / fixed[0]),
            float(fixed.argmax()),
            nodes_sum / (steps * batch_size),
        )


@pytest.mark.parametrize("curve", [cpu_curve, gpu_curve])
@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("batch_size", [1, 4, 16, 32])
@pytest.mark.parametrize("acceptance", [1.0, 0.3, 0.0])
def test_goodput_is_that_of_the_best_fixed_budget_and_never_a_loss(
    curve: Curve, report: str, batch_size: int, acceptance: float
) -> None:
    simulation = Simulation(curve, report, acceptance)
    simulation.run(60, batch_size)
    against_best, against_plain, best, nodes = simulation.run(200, batch_size)
    told = f"{against_best:.3f} of best ({best:.0f} nodes; {nodes:.1f} here), {against_plain:.3f} of plain"
    assert against_best >= 0.95, told
    assert against_plain >= 0.97, told


@pytest.mark.parametrize("batch_size", [1, 16])
def test_goodput_holds_at_long_context(batch_size: int) -> None:
    simulation = Simulation(cpu_curve)
    simulation.run(60, batch_size, context=1900)
    against_best, against_plain, _, _ = simulation.run(200, batch_size, context=1900)
    assert against_best >= 0.95
    assert against_plain >= 1.1


@pytest.mark.parametrize("curve", [cpu_curve, gpu_curve])
def test_a_change_of_load_is_followed_within_twenty_steps(curve: Curve) -> None:
    simulation = Simulation(curve)
    alone = simulation.run(150, 1)[3]
    simulation.run(20, 16)
    against_best, against_plain, _, crowded = simulation.run(60, 16)
    assert against_best >= 0.93
    assert against_plain >= 0.97
    assert crowded < 0.5 * alone
    simulation.run(20, 1)
    assert simulation.run(60, 1)[0] >= 0.93


@pytest.mark.parametrize("batch_size", [1, 16])
def test_a_collapse_of_acceptance_is_noticed_and_so_is_its_end(batch_size: int) -> None:
    simulation = Simulation(cpu_curve)
    before = simulation.run(150, batch_size)[3]
    simulation.acceptance = 0.0
    simulation.run(20, batch_size)
    assert simulation.run(10, batch_size)[3] < 0.6 * before
    simulation.run(50, batch_size)
    _, against_plain, _, nodes = simulation.run(100, batch_size)
    assert nodes < 0.1 * before
    assert against_plain >= 0.98
    simulation.acceptance = 1.0
    simulation.run(150, batch_size)
    assert simulation.run(100, batch_size)[3] > 0.5 * before
