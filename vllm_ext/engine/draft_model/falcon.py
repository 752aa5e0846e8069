# SPDX-License-Identifier: Apache-2.0
"""Falcon's head in vLLM's V1 worker: blocks of two rows, and a pass for every other depth.

See `vllm_ext.training.eagle_relatives.falcon` for the paper, and what deviates. A block ends at the last token, and at
the nodes of every second depth: its rows are the node's and its parent's, and the parent's is read again behind both.
That row says what comes next, the node's own row what comes after, whatever comes next: nodes of the depths between are
answered without a pass. Keys of what is read again lie behind all others, where the next pass or the next committed
token overwrites them; no block of the cache counts as read for them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_ext.engine.draft_model.eagle import EaglePasses
from vllm_ext.engine.draft_model.passes import stacked
from vllm_ext.proposers.draft_model import Rows
from vllm_ext.proposers.sampled import ROOT

BLOCK = 2


@dataclass(slots=True)
class _Tree:
    """Nodes that were asked for, and of those that end blocks what the blocks put out."""

    parents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    rows: dict[int, int] = field(
        default_factory=lambda: {ROOT: ROOT}
    )  # by node, its row among those in the cache
    first: dict[int, int] = field(
        default_factory=dict
    )  # by end, which of the step's outputs is its block's first
    said: dict[int, list[Any]] = field(default_factory=dict)  # by end, two distributions

    def add(self, parent: int, token: int) -> int:
        """A node more."""
        self.parents.append(parent)
        self.tokens.append(token)
        self.depths.append(1 + (self.depths[parent] if parent != ROOT else 0))
        return len(self.parents) - 1

    def end_above(self, node: int) -> int:
        """The last node of the block before the one that a node belongs to."""
        parent = self.parents[node]
        return parent if self.depths[node] % BLOCK else self.parents[parent]

    def output_above(self, node: int) -> int:
        """Which of the step's outputs a node's row takes as its feature."""
        return self.first[self.end_above(node)] + (self.depths[node] - 1) % BLOCK


class FalconPasses(EaglePasses):
    """See the module, and `EaglePasses`."""

    depths_a_pass = BLOCK

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._trees: dict[str, _Tree] = {}
        self._last: dict[str, torch.Tensor] = {}  # by request, the feature of the last row that was read

    def _begin(self, request_id: str, blocks: Any, computed: int) -> None:
        super()._begin(request_id, blocks, computed)
        self._last.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """See `ModelPasses`."""
        super().forget(request_id)
        self._last.pop(request_id, None)

    def advance(self, num_tokens: Sequence[int], drafting: set[str]) -> None:
        """See `ModelPasses`."""
        self._trees.clear()
        super().advance(num_tokens, drafting)

    def _features_before(self, name: str, features: torch.Tensor) -> torch.Tensor:
        # Of a text that goes on from another request's blocks it is not known: then the last row's own stands in.
        last = self._last.get(name, features[-1:])
        self._last[name] = features[-1:].clone()
        return features[-2:-1] if len(features) > 1 else last

    def _plant(self, names: Sequence[str], normed: torch.Tensor, stream: torch.Tensor) -> None:
        for name in names:
            self._trees[name] = _Tree()
        self._end([(name, ROOT) for name in names], normed, stream)
        for name in names:
            self._roots[name] = self._trees[name].said[ROOT][0]

    def _end(self, ends: Sequence[tuple[str, int]], normed: torch.Tensor, stream: torch.Tensor) -> None:
        """Blocks have put out ``[BLOCK * num_blocks, hidden_size]``."""
        first = self._streams.add(stream)
        said = list(zip(*self._distributions(normed), strict=True))
        for number, (name, node) in enumerate(ends):
            tree = self._trees[name]
            tree.first[node] = first + BLOCK * number
            tree.said[node] = said[BLOCK * number : BLOCK * (number + 1)]

    def nodes(self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        """See `DraftModel`."""
        started = time.perf_counter()
        asked = [
            (name, self._trees[name].add(parent, token))
            for name, parent, token in zip(request_ids, parents, tokens, strict=True)
        ]
        ends = [(name, node) for name, node in asked if self._trees[name].depths[node] % BLOCK == 0]
        if ends:
            self._pass_over_blocks(ends)
            self._timed(started, [name for name, _ in ends])
        found = []
        for name, node in asked:
            tree = self._trees[name]
            place = tree.depths[node] % BLOCK
            found.append(tree.said[tree.end_above(node) if place else node][place])
        return stacked(found)

    def _pass_over_blocks(self, ends: Sequence[tuple[str, int]]) -> None:
        """One pass over blocks that these nodes end, those of a request next to each other."""
        growing: dict[str, int] = {}
        inputs: list[int] = []
        rows: list[int] = []  # of the pass, by end: what is read again, and the end's own
        for name, of_request in itertools.groupby(ends, key=lambda end: end[0]):
            tree, growth = self._trees[name], self._growth[name]
            before = growing[name] = len(growth.parents)
            start = len(inputs)
            own = [node for _, node in of_request]
            for node in own:
                for member in (tree.parents[node], node):
                    if member not in tree.rows:
                        above = tree.rows[tree.parents[member]]
                        tree.rows[member] = growth.add(above, tree.tokens[member], tree.depths[member] - 1)
                        inputs.append(tree.output_above(member))
            for node in own:
                member = tree.parents[node]
                again = growth.add(tree.rows[node], tree.tokens[member], tree.depths[member] - 1)
                inputs.append(tree.output_above(member))
                rows += [start + again - before, start + tree.rows[node] - before]
        self._features = self._streams.rows(inputs)
        normed, stream = self._pass_over(growing)
        for name in growing:
            growth = self._growth[name]
            kept = len(self._trees[name].rows) - 1  # the others' places are free
            for each in (growth.parents, growth.tokens, growth.depths):
                del each[kept:]
        wanted = self._to(np.array(rows, np.int64))
        self._end(ends, normed[wanted], stream[wanted])
