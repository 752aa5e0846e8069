# SPDX-License-Identifier: Apache-2.0
"""Trees that are drawn on the device and verified there leave the target's law: by chi-squared, over many requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from enumeration import Model
from scipy.stats import chisquare

from vllm_ext.kernels.drawn_rows import K_SEQ, RECURSIVE, DrawnTrees, choose_drawn
from vllm_ext.proposers.dyspec_device import DynamicTrees
from vllm_ext.proposers.likeliest_device import Children, Likeliest
from vllm_ext.proposers.mixed_device import Mixed
from vllm_ext.proposers.rsd_device import Beams, FixedBranching
from vllm_ext.proposers.sampled_device import SUPPORT, Asked, Growth, Limits, Noise, Rows, gumbel, uniform
from vllm_ext.proposers.spectr_device import IndependentDrafts

VOCAB, LENGTH, REQUESTS = 4, 3, 12_000
TARGET, DRAFT = Model(11, VOCAB), Model(12, VOCAB)
GROWTHS: dict[str, Callable[[], Growth]] = {
    "dyspec": lambda: DynamicTrees(5, 3),
    "dyspec, all of it": lambda: DynamicTrees(16, 3),
    "rsd_c": lambda: FixedBranching([3, 2], 9, drawn=True),
    "rsd_c, cut": lambda: FixedBranching([2, 2, 1], 5, drawn=True),
    "rsd_s": lambda: Beams(3, 3, 9),
    "rsd_s, cut": lambda: Beams(4, 3, 6),
    "spectr": lambda: IndependentDrafts(3, 2, 6),
    "spectr, long": lambda: IndependentDrafts(2, 3, 6),
}


def rows_after(tokens: torch.Tensor) -> Rows:
    """By the draft, after int ``[requests, width]`` tokens."""
    q = torch.zeros((VOCAB, SUPPORT))
    q[:, :VOCAB] = torch.from_numpy(DRAFT.rows)
    order = q[:, :VOCAB].argsort(dim=1, descending=True)
    q[:, :VOCAB] = q[:, :VOCAB].gather(1, order)
    ids = torch.zeros((VOCAB, SUPPORT), dtype=torch.int32)
    ids[:, :VOCAB] = order.to(torch.int32)
    return Rows(ids[tokens.long()], q[tokens.long()])


def drafted(growth: Growth, requests: int) -> tuple[torch.Tensor, DrawnTrees]:
    """A tree for each request: int32 ``[requests, 1 + nodes]`` tokens, and what its verifier is told."""
    seeds, length = torch.arange(requests) * 7919, torch.full((requests,), 5)

    def noise(first: int, count: int) -> torch.Tensor:
        numbers = torch.arange(first * SUPPORT, (first + count) * SUPPORT)
        return uniform(seeds, length, numbers).view(requests, count, SUPPORT)

    limits = Limits(torch.full((requests,), 99, dtype=torch.int32), torch.zeros(requests, dtype=torch.bool))
    rows = rows_after(torch.zeros((requests, 1)))
    known = [rows]
    for depth in itertools.count():
        asked: Asked | None = growth.give(depth, rows, limits, noise)
        if asked is None:
            break
        rows = rows_after(asked.tokens)
        known.append(rows)
    grown = growth.grown()
    root = torch.zeros((requests, 1), dtype=torch.int32)
    ids, q = (torch.cat(part, 1) for part in zip(*known, strict=True))
    kind = K_SEQ if growth.independent else RECURSIVE
    places = torch.where(grown.places >= 0, grown.places + 1, -1)
    drawn = DrawnTrees(
        torch.full((requests,), kind, dtype=torch.int32),
        torch.cat([root - 1, grown.child_of], 1),
        torch.cat([root, places], 1),
        torch.where(q > 0, ids, -1),
        q,
    )
    return torch.cat([root, grown.tokens], 1), drawn


def put_out(tokens: torch.Tensor, drawn: DrawnTrees, rng: np.random.Generator) -> np.ndarray:
    """The first tokens of each request, ``[requests, LENGTH]``; plain decoding goes on behind a tree's."""
    requests, width = tokens.shape
    p = torch.from_numpy(TARGET.rows).float()
    logits = p[tokens.long()].log().view(-1, VOCAB).contiguous()
    depth = torch.zeros((requests, width), dtype=torch.int64)
    for row in range(1, width):
        above = drawn.child_of[:, row].clamp(min=0).long()
        depth[:, row] = depth.gather(1, above[:, None])[:, 0] + 1
    accepted = choose_drawn(
        logits,
        torch.arange(0, (requests + 1) * width, width, dtype=torch.int32),
        torch.arange(requests),
        tokens.flatten().contiguous(),
        (5 + depth).flatten(),
        torch.zeros(requests, dtype=torch.int32),
        drawn,
        torch.arange(requests) * 104729 + 1,
        backend="torch",
    )
    own = (logits + gumbel(torch.from_numpy(rng.random(logits.shape)))).argmax(1)
    said = torch.where(accepted >= 0, accepted, own).view(requests, width)
    output = torch.full((requests, LENGTH), -1, dtype=torch.int64)
    at = torch.zeros(requests, dtype=torch.int64)  # the row that speaks; -1: none
    for place in range(LENGTH):
        last = output[:, place - 1] if place else torch.zeros(requests, dtype=torch.int64)
        plain = (p[last].log() + gumbel(torch.from_numpy(rng.random((requests, VOCAB))))).argmax(1)
        output[:, place] = torch.where(at >= 0, said.gather(1, at.clamp(min=0)[:, None])[:, 0], plain)
        place_of = torch.arange(width)
        is_child = (drawn.child_of == at[:, None]) & (tokens == output[:, place, None]) & (at >= 0)[:, None]
        at = torch.where(is_child.any(1), torch.where(is_child, place_of, width).amin(1), -1)
    found: np.ndarray = output.numpy()
    return found


def pvalue(output: np.ndarray) -> float:
    counts = np.zeros((VOCAB,) * LENGTH)
    np.add.at(counts, tuple(output.T), 1)
    expected = TARGET.law(LENGTH) * len(output)
    return float(chisquare(counts.ravel(), expected.ravel()).pvalue)


@pytest.mark.parametrize("name", GROWTHS)
def test_the_output_has_the_targets_law(name: str) -> None:
    tokens, drawn = drafted(GROWTHS[name](), REQUESTS)
    output = put_out(tokens, drawn, np.random.default_rng(3))
    assert pvalue(output) > 1e-3
    accepted = (tokens[:, 1:] == torch.from_numpy(output[:, :1])) & (drawn.child_of[:, 1:] == 0)
    assert accepted.any(1).float().mean() > 0.4


def test_a_tree_beside_chosen_ones_has_it_too() -> None:
    flags = torch.arange(REQUESTS) % 3 > 0
    tokens, drawn = drafted(Mixed(Likeliest(7, 3), FixedBranching([3, 2], 9, drawn=True), flags), REQUESTS)
    drawn = drawn._replace(kind=drawn.kind * flags.to(torch.int32))
    output = put_out(tokens, drawn, np.random.default_rng(4))
    assert pvalue(output[flags.numpy()]) > 1e-3
    assert pvalue(output[~flags.numpy()]) > 1e-3


def test_trees_of_the_likeliest_tokens_verified_as_drawn_ones_have_not() -> None:
    tokens, drawn = drafted(Likeliest(5, 3), REQUESTS)
    assert pvalue(put_out(tokens, drawn, np.random.default_rng(3))) < 1e-6


class Lucky(DynamicTrees):
    """Values what was drawn, not what may be."""

    def children(self, rows: Rows, base: torch.Tensor, depth: int, noise: Noise) -> Children:
        found = super().children(rows, base, depth, noise)
        return found._replace(values=found.below)


def test_trees_that_value_what_was_drawn_have_not() -> None:
    tokens, drawn = drafted(Lucky(3, 3), REQUESTS)
    assert pvalue(put_out(tokens, drawn, np.random.default_rng(3))) < 1e-6


def test_children_out_of_order_have_not() -> None:
    tokens, drawn = drafted(FixedBranching([3], 3, drawn=True), REQUESTS)
    tokens[:, 1:] = tokens[:, 1:].sort(1).values
    assert pvalue(put_out(tokens, drawn, np.random.default_rng(3))) < 1e-6


def test_drafts_without_those_that_agree_have_not() -> None:
    """As if each draft that another stands for had not been drawn."""
    growth = IndependentDrafts(3, 2, 6)
    tokens, drawn = drafted(growth, REQUESTS)
    stands = growth.grown().parents >= 0
    drawn.child_of[:, 1:] = torch.where(stands, drawn.child_of[:, 1:], -1)
    assert pvalue(put_out(tokens, drawn, np.random.default_rng(3))) < 1e-6
