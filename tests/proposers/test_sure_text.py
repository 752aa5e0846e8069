# SPDX-License-Identifier: Apache-2.0
"""What of a draft model's chain is its own to say: entropies, the window over steps, and the law of what is put out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from enumeration import Model, Script, law_of, sparse
from enumeration import verify as walked
from toy_draft import Draft, request

from vllm_ext.proposers.base import VerifiedRows, no_top
from vllm_ext.proposers.draft_model import DraftModelOptions, DraftModelProposer
from vllm_ext.proposers.dyspec import DySpec
from vllm_ext.proposers.registry import METHODS, load_method
from vllm_ext.proposers.sampled import grow
from vllm_ext.proposers.specdec_pp import SpecDecOptions, SpecDecPP, StoppedChain
from vllm_ext.proposers.sure_text import EntropyRule, SureChain, SureTexts, entropy
from vllm_ext.samplers import recursive_rejection

TARGET, DRAFT = Model(1), Model(2)
LENGTH, NODES = 4, 3


def log(q: Any) -> Any:
    return np.log(np.sort(np.asarray(q))[::-1]).astype(np.float32)


def reference(q: Any) -> float:
    return -math.fsum(x * math.log(x) for x in q if x > 0)


@pytest.mark.parametrize("seed", range(5))
def test_entropy_of_all_of_a_distribution(seed: int) -> None:
    q = np.random.default_rng(seed).dirichlet(np.ones(20))
    assert entropy(log(q)) == pytest.approx(reference(q), abs=1e-6)
    with_masked = np.append(log(q), np.float32(-np.inf))
    assert entropy(with_masked) == pytest.approx(reference(q), abs=1e-6)


@pytest.mark.parametrize("kept", [1, 4, 16])
def test_what_is_not_known_counts_with_the_least_it_can_add(kept: int) -> None:
    q = np.random.default_rng(0).dirichlet(np.ones(1000))
    top = np.sort(q)[::-1][:kept]
    found = entropy(log(top))
    assert reference(top) < found <= reference(q) + 1e-6
    flat = np.full(1000, 1e-3)
    assert entropy(log(flat[:kept])) == pytest.approx(math.log(1000), rel=1e-5)


def test_certain_tokens_have_none() -> None:
    assert entropy(np.zeros(1, np.float32)) == 0.0
    assert entropy(np.array([1e-7, -20.0], np.float32)) >= 0.0


HALF, CERTAIN, FLAT = log([0.5, 0.5]), log([1.0]), log([0.25] * 4)  # 0.69, 0 and 1.39 nats


@pytest.mark.parametrize(
    ("threshold", "window", "before", "seen", "sure"),
    [
        (1.0, 1, [], [HALF, FLAT, CERTAIN], [True, False, True]),
        (1.0, 2, [], [HALF, FLAT, CERTAIN, FLAT], [True, False, True, True]),
        (1.0, 2, [9.0], [CERTAIN, CERTAIN], [False, True]),
        (1.0, 2, [9.0, 0.0], [CERTAIN], [True]),  # the last of those before alone
        (0.0, 5, [], [CERTAIN, HALF], [False, False]),
        (100.0, 5, [], [FLAT, FLAT], [True, True]),
    ],
)
def test_a_token_is_sure_where_the_mean_is_small(
    threshold: float, window: int, before: list[float], seen: list[Any], sure: list[bool]
) -> None:
    chain = SureChain(EntropyRule(threshold, window), before)
    for each in seen:
        chain.see(each)
    assert chain.sure == sure
    assert chain.chance(0.3) == (1.0 if sure[-1] else 0.3)


def test_entropies_of_what_was_put_out_count_in_the_next_chain() -> None:
    texts, rule = SureTexts(), EntropyRule(1.0, 2)
    chain = texts.start("r", rule)
    for each in (CERTAIN, FLAT, FLAT):
        chain.see(each)
    texts.observe(["other", "r"], [[1], [5, 6]])  # one was accepted, and the target said the second
    chain = texts.start("r", rule)
    chain.see(FLAT)
    assert chain.sure == [False]  # with the second's 1.39; with the first's it would be sure
    texts.clear()
    texts.observe(["r"], [[7]])  # of no chain
    chain = texts.start("r", rule)
    chain.see(CERTAIN)
    assert chain.sure == [True]
    texts.finish("r")
    assert texts.of("r") is None
    chain = texts.start("r", rule)
    assert not chain.entropies


def law(rule: EntropyRule) -> Any:
    """Of what is put out behind a drawn chain, all decisions enumerated."""

    def code(chance: Script) -> list[int]:
        sure = SureChain(rule)
        builder = StoppedChain(NODES, sure.chance, 1.0, chance)

        def answer(asked: Any) -> Any:
            q = DRAFT.after(builder.tokens)
            sure.see(log(q))
            return [sparse(q)]

        grow([builder], answer)
        tree = builder.tree()
        tokens = tree.tokens.tolist()

        def draw(row: int, children: list[int]) -> int:
            p = TARGET.after(tokens[:row])
            if not children:
                return chance.draw(p)
            if sure.sure[row]:
                return int(tokens[row])
            assert tree.drawn is not None
            return recursive_rejection.choose(p, [tokens[row]], tree.drawn.q[row - 1], chance)

        return walked([0, *tokens], [-1, *range(len(tokens))], draw)

    return law_of(code, TARGET, LENGTH)


def wanted(rule: EntropyRule) -> Any:
    """The draft's law where it is sure, and the target's elsewhere and behind where the two part."""
    found = np.zeros((3,) * LENGTH)

    def go(path: tuple[int, ...], weight: float, entropies: list[float], together: bool) -> None:
        if len(path) == LENGTH:
            found[path] += weight
            return
        p, q = TARGET.after(path), DRAFT.after(path)
        if not together or len(path) == NODES:
            for x in range(3):
                go((*path, x), weight * p[x], entropies, False)
            return
        known = [*entropies, reference(q)]
        last = known[-rule.window :]
        sure = sum(last) / len(last) < rule.threshold
        for x in range(3):
            if sure:
                go((*path, x), weight * q[x], known, True)
            else:
                go((*path, x), weight * min(p[x], q[x]), known, True)
                go((*path, x), weight * max(p[x] - q[x], 0.0), known, False)

    go((), 1.0, [], True)
    return found


MIDDLE = float(np.median([reference(q) for q in DRAFT.rows]))


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("threshold", [MIDDLE + 0.02, MIDDLE + 0.2, 100.0])
def test_the_law_is_the_drafts_where_it_is_sure(threshold: float, window: int) -> None:
    rule = EntropyRule(threshold, window)
    assert law(rule) == pytest.approx(wanted(rule), abs=1e-13)
    assert np.abs(law(rule) - TARGET.law(LENGTH)).max() > 0.005


def test_where_it_is_never_sure_the_law_is_the_targets() -> None:
    assert law(EntropyRule(0.0, 2)) == pytest.approx(TARGET.law(LENGTH), abs=1e-13)


def test_the_window_is_not_one_token() -> None:
    """A mutation: the mean is forgotten."""
    threshold = MIDDLE + 0.02
    assert np.abs(law(EntropyRule(threshold, 1)) - wanted(EntropyRule(threshold, 2))).max() > 0.001


def made(method: str) -> DraftModelProposer:
    proposer: DraftModelProposer = (
        SpecDecPP(SpecDecOptions(model="m", max_depth=9))
        if method == "specdec_pp"
        else DySpec(DraftModelOptions(model="m", max_depth=9))
    )
    proposer.draft = Draft()
    return proposer


WRITING = [name for name in METHODS if load_method(name).writes_text]


@pytest.mark.parametrize("method", WRITING)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("chain", [False, True])
def test_of_such_requests_the_draft_is_a_chain_that_says_what_is_sure(
    method: str, temperature: float, chain: bool
) -> None:
    proposer = made(method)
    plain = request("plain", temperature, budget_tokens=9)
    asks = [
        replace(request(name, temperature, budget_tokens=9, chain=chain), entropy_rule=EntropyRule(nats, 1))
        for name, nats in (("never", 0.0), ("always", 100.0), ("some", 1.6))
    ]
    other, never, always, some = proposer.propose([plain, *asks])
    assert other.sure is None
    for tree in (never, always, some):
        assert tree.is_chain
        assert tree.sure is not None
        assert len(tree.sure) == len(tree)
        assert (tree.drawn is not None) == (temperature > 0.0)
        assert len(tree.prefix(1).sure) == 1  # type: ignore[arg-type]
    marks = [tree.sure.tolist() for tree in (never, always, some) if tree.sure is not None]
    assert not any(marks[0])
    assert marks[1] == [True] * 9
    before = [0, *some.tokens.tolist()][: len(some)]
    model = Draft().model
    ids = [np.sort(model.rows[token])[::-1][:8] for token in before]
    assert marks[2] == [entropy(log(row)) < 1.6 for row in ids]


def test_of_a_seeded_request_nothing_is_drawn() -> None:
    rule = EntropyRule(100.0, 1)
    (tree,) = made("dyspec").propose([replace(request("r", 1.0, seed=1), entropy_rule=rule)])
    assert tree.drawn is None


def test_what_is_taken_teaches_specdec_nothing() -> None:
    proposer = made("specdec_pp")
    assert isinstance(proposer, SpecDecPP)
    before = proposer.calibration.estimates.copy()
    for nats, learns in ((100.0, False), (0.0, True)):
        (tree,) = proposer.propose([replace(request("r"), entropy_rule=EntropyRule(nats, 1))])
        rows = VerifiedRows(
            ["r"],
            np.array([0, 1], np.int32),
            np.zeros(1, np.int32),
            np.full(1, -1, np.int32),
            np.ones(1, bool),
            *no_top(1),
            [[*tree.tokens.tolist(), 0]],
            None,
        )
        proposer.observe(rows)
        assert (proposer.calibration.estimates != before).any() == learns
    proposer.finish("r")
