# SPDX-License-Identifier: Apache-2.0
"""Where a chain stops, what its predictor learns, and that stopping leaves the target's law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from enumeration import Model, Script, law_of, sparse
from enumeration import verify as walked
from pydantic import ValidationError
from toy_draft import VOCAB, Draft, request

from vllm_ext.kernels.chance import Chance
from vllm_ext.proposers.base import VerifiedRows, no_top
from vllm_ext.proposers.sampled import grow
from vllm_ext.proposers.specdec_pp import BINS, LEAST_NODES, SpecDecOptions, SpecDecPP, StoppedChain
from vllm_ext.samplers import recursive_rejection

TARGET, DRAFT = Model(1), Model(2)
LENGTH = 4
EXACT = 1e-13


def grown(builder: StoppedChain, draft: Model = DRAFT) -> int:
    """Grow by a model; returns the passes, the root's among them."""
    return grow([builder], lambda asked: [sparse(draft.after(builder.tokens)) for _ in asked])


def told(chances: list[float]) -> Callable[[float], float]:
    """A predictor that gives these, one after the other."""
    left = iter(chances)
    return lambda _: next(left)


@pytest.mark.parametrize(
    ("chances", "threshold", "length"),
    [
        ([0.9, 0.9, 0.9, 0.9, 0.9, 0.9], 0.3, 4),  # 0.9 ** 3 = 0.73 goes on, 0.9 ** 4 = 0.66 does not
        ([0.1, 0.1, 0.1, 0.1, 0.1, 0.1], 0.3, LEAST_NODES),
        ([0.1, 1.0, 1.0, 1.0, 1.0, 1.0], 0.95, 6),
        ([0.0, 0.0, 0.0, 0.0, 0.0, 0.0], 1.0, 6),
        ([1.0, 1.0, 1.0, 1.0, 1.0, 0.0], 0.3, 6),
        ([1.0, 1.0, 0.69, 1.0, 1.0, 1.0], 0.3, 3),
    ],
)
def test_where_a_chain_stops(chances: list[float], threshold: float, length: int) -> None:
    builder = StoppedChain(6, told(chances), threshold, None)
    assert grown(builder) == length
    tree = builder.tree()
    assert tree.is_chain
    assert len(tree) == length
    assert tree.tokens.tolist() == [int(DRAFT.after(builder.tokens[:i]).argmax()) for i in range(length)]


@pytest.mark.parametrize("num_nodes", [0, 1, 20])
def test_no_chain_is_longer_than_it_may_be(num_nodes: int) -> None:
    builder = StoppedChain(num_nodes, lambda _: 1.0, 0.3, None)
    grown(builder)
    assert len(builder.tokens) == num_nodes


class Cut(StoppedChain):
    """A mutation: what made the chain stop is left out."""

    def kept(self) -> list[int]:
        stopped = 1.0 - self._all > self._threshold
        return super().kept()[: len(self.tokens) - stopped]


def law(kind: type[StoppedChain], threshold: float) -> Any:
    """Of what is put out, all decisions enumerated."""

    def code(chance: Script) -> list[int]:
        builder = kind(3, lambda probability: probability, threshold, chance)
        grown(builder)
        return verify(builder, chance)

    return law_of(code, TARGET, LENGTH)


def verify(builder: StoppedChain, chance: Chance) -> list[int]:
    tree = builder.tree()
    tokens = tree.tokens.tolist()

    def draw(row: int, children: list[int]) -> int:
        p = TARGET.after(tokens[:row])
        if not children:
            return chance.draw(p)
        assert tree.drawn is not None
        return recursive_rejection.choose(p, [tokens[row]], tree.drawn.q[row - 1], chance)

    return walked([0, *tokens], [-1, *range(len(tokens))], draw)


@pytest.mark.parametrize("threshold", [0.05, 0.5, 0.8, 0.9, 1.0])
def test_the_output_has_the_targets_law(threshold: float) -> None:
    assert law(StoppedChain, threshold) == pytest.approx(TARGET.law(LENGTH), abs=EXACT)


def test_a_chain_cut_by_its_own_last_token_is_biased() -> None:
    assert np.abs(law(Cut, 0.8) - TARGET.law(LENGTH)).max() > 0.005


def made(**options: Any) -> SpecDecPP:
    proposer = SpecDecPP(SpecDecOptions(model="m", **options))
    proposer.draft = Draft()
    return proposer


def put_out(proposer: SpecDecPP, name: str, tokens: list[int]) -> None:
    """A step that put out these."""
    rows = VerifiedRows(
        [name],
        np.array([0, 1], np.int32),
        np.zeros(1, np.int32),
        np.full(1, -1, np.int32),
        np.ones(1, bool),
        *no_top(1),
        [tokens],
        None,
    )
    proposer.observe(rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chains_are_as_long_as_tokens_are_right(temperature: float) -> None:
    lengths = {}
    for right in (True, False):
        proposer = made()
        for _ in range(200):
            (tree,) = proposer.propose([request("r", temperature, budget_tokens=20, max_depth=20)])
            assert tree.is_chain
            assert (tree.drawn is not None) == (temperature > 0.0)
            put_out(proposer, "r", [*tree.tokens.tolist(), 0] if right else [VOCAB])
        lengths[right] = len(tree)
    assert lengths[False] == LEAST_NODES
    assert lengths[True] > 10


def test_chosen_and_drawn_tokens_are_counted_apart_and_kept_over_a_restart() -> None:
    proposer, other = made(), made()
    before = proposer.calibration.estimates.copy()
    for _ in range(50):
        (tree,) = proposer.propose([request("r", budget_tokens=20, max_depth=20)])
        put_out(proposer, "r", [*tree.tokens.tolist(), 0])
    after = proposer.calibration.estimates
    assert after.shape == (2, BINS, 1)
    assert (after[0] > before[0]).any()
    assert (after[1] == before[1]).all()
    other.load_state_dict(proposer.state_dict())
    assert (other.calibration.estimates == after).all()
    proposer.propose([request("r", budget_tokens=20, max_depth=20)])
    proposer.finish("r")
    put_out(proposer, "r", [VOCAB])
    assert (proposer.calibration.estimates == after).all()


@pytest.mark.parametrize(
    "wrong", [{"stop_threshold": 0.0}, {"stop_threshold": 1.5}, {"max_depth": 21}, {"max_depth": 1}]
)
def test_options_out_of_bounds_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        SpecDecOptions(model="m", **wrong)
