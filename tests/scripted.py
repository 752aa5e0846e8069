# SPDX-License-Identifier: Apache-2.0
"""Drafters that say what they are told, and any trees, for what fuses them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from vllm_ext.proposers.base import MethodOptions, Proposer, Request, Sampling, VerifiedRows
from vllm_ext.proposers.tree import DraftTree

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None)


class Scripted(Proposer):
    """Proposes what it is told to."""

    def __init__(self, tree: DraftTree, width: int = 0) -> None:
        self.tree = tree
        self.verified_top_k = width
        self.rows: list[VerifiedRows] = []
        self.finished: list[str] = []

    @classmethod
    def from_options(cls, options: MethodOptions, vocab_size: int) -> Scripted:
        raise NotImplementedError

    @property
    def memory_bytes(self) -> int:
        return 1000

    def observe(self, rows: VerifiedRows) -> None:
        self.rows.append(rows)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        return [self.tree.prefix(request.budget_tokens) for request in requests]

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)


def tree(tokens: list[int], parents: list[int], probabilities: list[float]) -> DraftTree:
    made = DraftTree(
        np.array(tokens, np.int32), np.array(parents, np.int32), np.array(probabilities, np.float32)
    )
    made.validate()
    return made


def request(budget: int = 16, name: str = "r") -> Request:
    return Request(name, np.array([1, 2], np.int32), 2, budget, 99, GREEDY)


def verified(emitted: list[int], width: int = 0, name: str = "r") -> VerifiedRows:
    return VerifiedRows(
        [name],
        np.array([0, 1], np.int32),
        np.array([2], np.int32),
        np.array([-1], np.int32),
        np.array([True]),
        np.arange(width, dtype=np.int32)[None],
        np.zeros((1, width), np.float32),
        [emitted],
    )


def paths(of: DraftTree) -> dict[tuple[int, ...], float]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(of.tokens.tolist(), of.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return dict(zip(found, of.probabilities.tolist(), strict=True))


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Any valid tree over a few tokens; probabilities are eighths, so that equal ones are common."""
    nodes: dict[tuple[int, ...], float] = {}
    for _ in range(draw(st.integers(0, 10))):
        above = draw(st.sampled_from([(), *nodes]))
        path = (*above, draw(st.integers(0, 3)))
        nodes.setdefault(path, draw(st.integers(0, 8)) / 8 * (nodes[above] if above else 1.0))
    place = {path: i for i, path in enumerate(nodes)}
    return DraftTree.from_nodes(
        np.array([path[-1] for path in nodes], np.int32),
        np.array([place.get(path[:-1], -1) for path in nodes], np.int32),
        np.array(list(nodes.values()), np.float32),
    )
