# SPDX-License-Identifier: Apache-2.0
"""Typical acceptance in the V1 runner: which requests have it, and the child that each visited row goes on with.

Whether a child is kept goes by the distribution that vLLM's sampler would draw from, behind the child's own path: after
penalties, masks, rules, temperature, min-p, top-k and top-p. What is forbidden has no probability, and is not kept.
Which of several children goes on furthest is looked up ahead of the walk, by the logits as they come and the
temperature alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_ext.config import request_options, speculative
from vllm_ext.engine import paired_requests
from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.kernels.sparse import Float64
from vllm_ext.proposers.tree import Int32
from vllm_ext.samplers.typical_acceptance import Typical, best_below, choose


class TypicalRequests:
    """The requests of one runner whose drafts are verified lossily; none of servers and requests that say nothing."""

    def __init__(self, vllm_config: Any) -> None:
        settings = speculative.from_vllm_config(vllm_config)
        assert settings is not None
        self._options = settings.options
        self._rules: dict[str, Typical] = {}

    def admit(self, request_id: str, params: Any) -> None:
        """A request has come. A pair gets its primary's tokens, whatever is kept of its own rows."""
        rule = request_options.typical(self._options, params)
        if rule is not None and paired_requests.primary_of(params) is None:
            self._rules[request_id] = rule

    def finish(self, request_id: str) -> None:
        """A request is gone."""
        self._rules.pop(request_id, None)

    def of_step(self, request_ids: Sequence[str]) -> dict[int, Typical]:
        """By batch index, the rules of a step's requests."""
        if not self._rules:
            return {}
        return {index: self._rules[name] for index, name in enumerate(request_ids) if name in self._rules}


@dataclass(frozen=True, slots=True)
class _Tree:
    """One request's drafts; the arrays are ``[num_rows]``."""

    rule: Typical
    tokens: Int32
    parents: Int32
    length: Int32  # of the best path below each row
    log_p: Float64

    def children(self, row: int) -> Int32:
        """Those of one row that are tokens."""
        found = np.flatnonzero((self.parents == row) & (self.tokens >= 0))
        return found.astype(np.int32)


class TypicalStep:
    """Of one step.

    Args:
        rules: by batch index.
        trees: the step's.
        tokens: int32 ``[num_rows]``, the drafts that may be accepted.
        logits: ``[num_rows, vocab]``, the target's; they stay as they are.
        temperature: float32 ``[num_requests]``.
    """

    def __init__(
        self,
        rules: Mapping[int, Typical],
        trees: StepTrees,
        tokens: Int32,
        logits: torch.Tensor,
        temperature: torch.Tensor,
    ) -> None:
        self.num_kept = 0  # so far
        self._trees: dict[int, _Tree] = {}
        for request, rule in rules.items():
            rows = trees.rows(request)
            own = np.where(tokens[rows] < logits.shape[1], tokens[rows], -1)  # above are prompt tokens
            if len(own) > 1:
                best = _best_below(rule, own, trees.parents[rows], logits[rows], temperature[request])
                self._trees[request] = _Tree(rule, own, trees.parents[rows], *best)

    def choose(self, visited: Sequence[tuple[int, int]], logits: torch.Tensor) -> dict[int, int]:
        """The tokens that are kept without a draw.

        Args:
            visited: request and row of each row of logits.
            logits: ``[num_visited, vocab]``, those of the distributions that the sampler draws from.

        Returns:
            By row of logits; of the others the target draws.
        """
        below = {
            place: (self._trees[request], children)
            for place, (request, row) in enumerate(visited)
            if request in self._trees and len(children := self._trees[request].children(row))
        }
        if not below:
            return {}
        p = logits[list(below)].softmax(-1, dtype=torch.float32)
        sizes = [len(children) for _, children in below.values()]
        tokens = np.concatenate([tree.tokens[children] for tree, children in below.values()])
        chance, entropy = _read(p, np.repeat(np.arange(len(sizes)), sizes), tokens)
        kept, end = {}, 0
        for place, (tree, children), its_entropy in zip(below, below.values(), entropy, strict=True):
            start, end = end, end + len(children)
            length, log_p = tree.length[children].tolist(), tree.log_p[children].tolist()
            found = choose(chance[start:end], float(tree.rule.limit(its_entropy)), length, log_p)
            if found is not None:
                kept[place] = int(tree.tokens[children[found]])
        self.num_kept += len(kept)
        return kept


def _best_below(
    rule: Typical, tokens: Int32, parents: Int32, logits: torch.Tensor, temperature: torch.Tensor
) -> tuple[Int32, Float64]:
    """`best_below` each row of one tree; of a chain there is one path, and nothing to look up."""
    num_rows = len(parents)
    if (parents[1:] == np.arange(num_rows - 1)).all():
        return np.zeros(num_rows, dtype=np.int32), np.zeros(num_rows)
    inner, place = np.unique(parents[1:], return_inverse=True)
    p = (logits[torch.from_numpy(inner).to(logits.device)].to(torch.float32) / temperature).softmax(-1)
    of_children, entropy = _read(p, place, np.maximum(tokens[1:], 0))
    chance, limit = np.zeros(num_rows), np.ones(num_rows)
    chance[1:] = np.where(tokens[1:] >= 0, of_children, 0.0)
    limit[inner] = rule.limit(entropy)
    return best_below(parents, chance, limit)


def _read(p: torch.Tensor, rows: Any, tokens: Int32) -> tuple[Float64, Float64]:
    """Of some tokens the probabilities and of each row the entropy, in one transfer."""
    index = torch.from_numpy(np.stack([rows, tokens]).astype(np.int64)).to(p.device)
    found = torch.cat([p[index[0], index[1]], torch.special.entr(p).sum(-1)]).cpu().numpy().astype(np.float64)
    return found[: len(tokens)], found[len(tokens) :]
