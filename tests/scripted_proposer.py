# SPDX-License-Identifier: Apache-2.0
"""A drafter that proposes what it is told to, and what a hybrid is given."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
