# SPDX-License-Identifier: Apache-2.0
"""A small draft model, and requests to draft for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from enumeration import Model

from vllm_ext.proposers.base import Request, Sampling
from vllm_ext.proposers.draft_model import Rows
from vllm_ext.proposers.sampled import ROOT

VOCAB = 12


class Draft:
    """A `DraftModel` by an order-1 model, which checks what it is asked."""

    def __init__(self) -> None:
        self.model = Model(0, VOCAB)
        self.nodes_of: dict[str, list[int]] = {}  # tokens
        self.passes = 0

    def roots(self, request_ids: Sequence[str]) -> Rows:
        self.nodes_of = {name: [] for name in request_ids}
        return self._rows([0] * len(request_ids))

    def nodes(self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        self.passes += 1
        before = {name: len(nodes) for name, nodes in self.nodes_of.items()}
        assert list(request_ids) == sorted(request_ids, key=list(before).index)
        for name, parent, token in zip(request_ids, parents, tokens, strict=True):
            assert ROOT <= parent < before[name]  # read in an earlier pass
            self.nodes_of[name].append(token)
        return self._rows(tokens)

    def _rows(self, tokens: Sequence[int]) -> Rows:
        q = np.stack([self.model.rows[token] for token in tokens])
        ids = np.argsort(-q, axis=1)[:, :8]
        return Rows(ids.astype(np.int32), np.log(np.take_along_axis(q, ids, 1)).astype(np.float32))


def request(name: str, temperature: float = 0.0, **values: Any) -> Request:
    sampling = Sampling(temperature, 1.0, 0, 0.0, values.pop("seed", None))
    given = {"budget_tokens": 10, "max_depth": 9, **values}
    return Request(name, np.array([1, 0], np.int32), 1, sampling=sampling, **given)
