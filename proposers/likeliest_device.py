# SPDX-License-Identifier: Apache-2.0
"""`likeliest_tree` on the device, and what growing the best nodes first has in common there.

Each node has a value, not above its parent's, and a tree is the nodes of the largest values. Asked for are nodes below
which a child may be among these.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_ext.proposers.sampled import ASKED_PER_NODE, widths
from vllm_ext.proposers.sampled_device import (
    NONE,
    ROOT,
    Asked,
    Grown,
    Growth,
    Limits,
    Noise,
    Rows,
    at,
    rows_of_places,
)


class Children(NamedTuple):
    """Of each row that was given, what may come behind it, the best first."""

    tokens: torch.Tensor  # int32 [requests, width, children]
    values: torch.Tensor  # float32, the same shape; 0: no child
    below: torch.Tensor  # float32, the same shape: the value of the best child of each, at most
    reach: torch.Tensor | None = (
        None  # float32, the same shape: what else their children are to know, if anything
    )


class BestFirst(Growth):
    """Trees of the nodes of the largest values.

    Args:
        num_nodes: most nodes of a tree.
        max_depth: deepest nodes.
        asked_per_node: for each of them, how many may be asked for.
        width: most children of a node.
    """

    def __init__(
        self,
        num_nodes: int,
        max_depth: int,
        asked_per_node: int = ASKED_PER_NODE,
        width: int | None = None,
    ) -> None:
        super().__init__(num_nodes, max_depth)
        self._width = min(width or num_nodes, num_nodes)
        self._widths = widths(num_nodes, self.max_depth, asked_per_node, width)
        # float32 [requests, width] each, of the nodes asked for last: `Children.below` and `Children.reach`.
        self._base = torch.empty(0)
        self._reach: torch.Tensor | None = None
        # Of all nodes so far, [requests, nodes]: of each depth those that may be in the tree.
        self._values: list[torch.Tensor] = []
        self._tokens: list[torch.Tensor] = []
        self._parents: list[torch.Tensor] = []  # places
        self._places: list[torch.Tensor] = []

    @property
    def widths(self) -> Sequence[int]:
        """See `Growth.widths`."""
        return self._widths

    @abstractmethod
    def children(self, rows: Rows, base: torch.Tensor, depth: int, noise: Noise) -> Children:
        """Of rows whose nodes have these best children's values (1 of the root's), ``width`` children at most."""

    def rivals(self, below: torch.Tensor) -> Sequence[torch.Tensor]:
        """What a best child competes with besides the values of nodes: float32 ``[requests, n]`` each."""
        return ()

    def give(self, depth: int, rows: Rows, limits: Limits, noise: Noise) -> Asked | None:
        """See `Growth.give`."""
        requests, width = rows.q.shape[:2]
        base = rows.q.new_ones((requests, 1)) if depth == 0 else self._base
        tokens, values, below, reach = self.children(rows, base, depth, noise)
        first = torch.arange(values.shape[2], device=values.device) == 0
        allowed = (depth < limits.depth)[:, None, None] & (first | ~limits.chain[:, None, None])
        # Behind what is no node there may be anything, NaN too.
        values = torch.where(allowed & (base[..., None] > 0.0), values, 0.0).flatten(1)
        before = sum(self._widths[: depth - 1]) if depth else ROOT
        parents = torch.arange(before, before + width, dtype=torch.int32, device=values.device)
        kept_values, kept = values.sort(dim=1, descending=True, stable=True)
        kept_values, kept = kept_values[:, : self.num_nodes], kept[:, : self.num_nodes]
        self._values.append(kept_values)
        self._tokens.append(at(tokens.flatten(1), kept))
        self._parents.append(parents[kept // tokens.shape[2]])
        self._places.append(torch.full_like(self._tokens[-1], NONE))
        if depth >= len(self._widths):
            return None
        if reach is not None:
            reach = at(reach.flatten(1), kept)
        return self._ask(depth, at(below.flatten(1), kept), kept_values, reach)

    def _ask(
        self, depth: int, below: torch.Tensor, values: torch.Tensor, reach: torch.Tensor | None
    ) -> Asked:
        """The best of the newest nodes, as far as a child of theirs may be in the tree."""
        below = torch.where(values > 0.0, below, 0.0)
        others = torch.cat([*self._values, *self.rivals(below)], 1)
        better = (others[:, None, :] >= below[:, :, None]).sum(2)
        below = torch.where(better <= self.num_nodes, below, 0.0)
        width = min(self._widths[depth], below.shape[1])
        self._base, chosen = (part[:, :width] for part in below.sort(dim=1, descending=True, stable=True))
        missing = self._widths[depth] - width
        asked = self._base > 0.0
        place = torch.arange(width, dtype=torch.int32, device=below.device) + sum(self._widths[:depth])
        self._places[-1].scatter_(1, chosen, torch.where(asked, place, NONE))
        tokens, parents = at(self._tokens[-1], chosen), at(self._parents[-1], chosen)
        self._base = torch.nn.functional.pad(self._base, (0, missing))
        if reach is not None:
            self._reach = torch.nn.functional.pad(at(reach, chosen), (0, missing))
        return Asked(
            torch.nn.functional.pad(torch.where(asked, tokens, 0), (0, missing)),
            torch.nn.functional.pad(torch.where(asked, parents, ROOT), (0, missing), value=ROOT),
        )

    def grown(self) -> Grown:
        """See `Growth.grown`."""
        depths = torch.cat([torch.full_like(one, d) for d, one in enumerate(self._tokens, 1)], 1)
        values, kept = torch.cat(self._values, 1).sort(dim=1, descending=True, stable=True)
        values, kept = values[:, : self.num_nodes], kept[:, : self.num_nodes]
        there = values > 0.0
        places = torch.where(there, at(torch.cat(self._places, 1), kept), NONE)
        above = at(torch.cat(self._parents, 1), kept)
        number = sum(self._widths)
        row = at(rows_of_places(places, number), torch.where(above >= 0, above, number))
        parents = torch.where(there, torch.where(above == ROOT, 0, row), NONE)
        tokens = at(torch.cat(self._tokens, 1), kept)
        return Grown(tokens, parents, at(depths, kept), parents, places)


class Likeliest(BestFirst):
    """Trees that are chosen, not drawn, for greedy and seeded requests: a node's value is its path's probability.

    Args:
        num_nodes: see `BestFirst`.
        max_depth: see `BestFirst`.
        asked_per_node: see `BestFirst`.
        width: see `BestFirst`.
        least_sure: below nodes of less probability, given their parents, nothing is asked for.
    """

    drawn = False

    def __init__(
        self,
        num_nodes: int,
        max_depth: int,
        asked_per_node: int = ASKED_PER_NODE,
        width: int | None = None,
        least_sure: float = 0.0,
    ) -> None:
        super().__init__(num_nodes, max_depth, asked_per_node, width)
        self._least_sure = least_sure

    def children(self, rows: Rows, base: torch.Tensor, depth: int, noise: Noise) -> Children:
        """See `BestFirst.children`: the likeliest tokens."""
        q = rows.q[..., : self._width]
        values = base[..., None] * q
        below = values if self._least_sure == 0.0 else torch.where(q >= self._least_sure, values, 0.0)
        return Children(rows.ids[..., : self._width], values, below)
