# SPDX-License-Identifier: Apache-2.0
"""Verification by another rule than the target's own draw, inside vLLM's own sampler.

The stock ``Sampler`` does all it does to a row's logits: penalties, masks, temperature, min-p, top-k and top-p. What is
left is the target's distribution ``p``, and instead of the last draw from it comes the rule that fits how the
row's children were drawn from a draft model or a table, or a lossy one where it was asked for. Rows without children,
and all other requests' rows, are drawn as ever. Greedy requests have no last draw: there the argmax is replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_ext.engine.lossy.entropy import EntropyStep
from vllm_ext.engine.lossy.typical import TypicalStep
from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.kernels.chance import RandomChance
from vllm_ext.kernels.sparse import Float64
from vllm_ext.samplers import k_seq, recursive_rejection


class MultiDraftSampler:
    """A sampler whose draws know of the children that were drawn.

    Args:
        sampler: vLLM's; stays as it is.
        noise: used for nothing else, and the same on all ranks.
    """

    def __init__(self, sampler: Any, noise: np.random.Generator) -> None:
        self._sampler = copy.copy(sampler)
        self._sampler._modules = dict(sampler._modules)
        self._sampler.topk_topp_sampler = _LastDraw(sampler.topk_topp_sampler, self)
        self._sampler.greedy_sample = self._greedy
        self._stock_greedy = sampler.greedy_sample
        self._chance = RandomChance(noise)
        self.trees: StepTrees  # of the step
        self.typical: TypicalStep | None = None
        self.entropy: EntropyStep | None = None
        self._visited: list[tuple[int, int]] = []  # request and row of each row of logits of the next call

    def step(self, trees: StepTrees, typical: TypicalStep | None, entropy: EntropyStep | None) -> None:
        """The next calls are of this step's rows."""
        self.trees, self.typical, self.entropy = trees, typical, entropy

    def at(self, requests: Sequence[int], rows: Sequence[int]) -> None:
        """Which rows the next call samples."""
        self._visited = list(zip(requests, rows, strict=True))

    def __call__(self, **kwargs: Any) -> Any:
        return self._sampler(**kwargs)

    def children(self) -> dict[int, tuple[int, list[int]]]:
        """By row of logits: the request, and the child rows that were drawn; those that have some."""
        found = {}
        for place, (request, row) in enumerate(self._visited):
            if request in self.trees.drawn:
                below = np.flatnonzero(self.trees.parents[self.trees.rows(request)] == row).tolist()
                if below:
                    found[place] = request, below
        return found

    def typical_tokens(self, logits: torch.Tensor) -> dict[int, int]:
        """By row of logits, the child that is kept without a draw."""
        return {} if self.typical is None else self.typical.choose(self._visited, logits)

    def sure_tokens(self, logits: torch.Tensor, *, greedy: bool = False) -> dict[int, int]:
        """By row of logits, the child that is taken because the draft model is sure of it."""
        return {} if self.entropy is None else self.entropy.choose(self._visited, logits, greedy=greedy)

    def _greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """Instead of vLLM's ``greedy_sample``: of a batch some of whose requests are greedy, all rows."""
        tokens: torch.Tensor = self._stock_greedy(logits)
        for place, token in self.sure_tokens(logits, greedy=True).items():
            tokens[place] = token
        return tokens

    def choose(self, place: int, request: int, below: list[int], p: Float64) -> int:
        """The next token after one row."""
        row = self._visited[place][1]
        drawn, tokens = self.trees.drawn[request], self.trees.tokens[self.trees.rows(request)]
        q = drawn.q[row - 1]
        if drawn.drafts is None:
            return recursive_rejection.choose(p, tokens[below].tolist(), q, self._chance)
        nodes = drawn.drafts
        depth = 0 if row == 0 else int(np.flatnonzero((nodes == row - 1).any(0))[0]) + 1
        here = nodes if row == 0 else nodes[nodes[:, depth - 1] == row - 1]
        return k_seq.choose(p, tokens[here[:, depth] + 1].tolist(), q, self._chance)


class _LastDraw(torch.nn.Module):
    """Instead of vLLM's ``TopKTopPSampler``."""

    def __init__(self, stock: Any, owner: MultiDraftSampler) -> None:
        super().__init__()
        self._stock = stock
        self._owner = [owner]  # in a list: no submodule

    def forward(self, logits: torch.Tensor, generators: Any, k: Any, p: Any) -> Any:
        (owner,) = self._owner
        sure = owner.sure_tokens(logits)  # before they are written to
        children = {place: child for place, child in owner.children().items() if place not in sure}
        if not children and not sure and owner.typical is None:
            return self._stock(logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        places = list(children)
        target = logits[places].softmax(-1, dtype=torch.float32).cpu().numpy().astype(np.float64)
        target /= target.sum(1, keepdims=True)
        typical = owner.typical_tokens(logits)
        tokens, kept = self._stock(logits, generators, None, None)
        for row, (place, (request, below)) in zip(target, children.items(), strict=True):
            tokens[place] = owner.choose(place, request, below, row)
        for place, token in (typical | sure).items():
            tokens[place] = token
        return tokens, kept
