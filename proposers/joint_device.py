# SPDX-License-Identifier: Apache-2.0
"""`hybrid` with heads on the device: what others propose is there before the first pass, and heads go on below it.

As `joint_tree` has it on the host, but all in one growth: a node's value is its path's chance, of whoever proposes it,
and heads are asked below the nodes of the largest values. How often a head's nodes are right is counted by what it gave
them, by whether the others propose them too, and by depth, in the groups of a level of its own (`joint_prior`). Nodes
that others propose alone keep their own groups.

An *entry* is a node that may be in the tree, numbered: the others' nodes first, then the head's own, depth by depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm_ext.kernels.device_trees import SlotTrees
from vllm_ext.proposers.hybrid import AGREEMENT, BOUNDS
from vllm_ext.proposers.sampled import widths
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

NOBODY = -3  # an entry that is none, and nobody's parent
MIDDLES = (np.array([0.0, *BOUNDS], np.float32) + np.array([*BOUNDS, 1.0], np.float32)) / 2  # of the bins
MOST = 0.999  # of a chance: below its parent's in any rounding
LEAST = 1e-30


def joint_prior(bases: int) -> npt.NDArray[np.float64]:
    """float64 ``[bases]``: chances of a head's nodes before anything was counted, its own first, then those that others
    propose too, by bins of what it gives them. Behind these there is nothing.

    Args:
        bases: how many there are, ``2 * len(MIDDLES)`` at least.
    """
    shared = 1.0 - (1.0 - MIDDLES) * AGREEMENT
    return np.concatenate([MIDDLES, shared, np.zeros(bases - 2 * len(MIDDLES))])


class Bins(NamedTuple):
    """Of what the head gives a node after its parent. Made once: a graph must not copy from the host."""

    bounds: torch.Tensor  # float32 [bins - 1]
    middles: torch.Tensor  # float32 [bins]

    @classmethod
    def on(cls, device: torch.device) -> Bins:
        """There."""
        return cls(*(torch.from_numpy(each).to(device) for each in (BOUNDS, MIDDLES)))


class Others(NamedTuple):
    """Trees that are there before. A node stands behind its parent; what is no node has no parent."""

    tokens: torch.Tensor  # int32 [requests, nodes]
    above: torch.Tensor  # int32 [requests, nodes] the parent's entry, or ROOT; -2: no node
    depths: torch.Tensor  # int32 [requests, nodes]
    groups: torch.Tensor  # int32 [requests, nodes] of their estimates; negative: no node
    paths: torch.Tensor  # float32 [requests, nodes, nodes] 1: the node itself, and those above it

    @classmethod
    def of(cls, trees: SlotTrees, slots: torch.Tensor, tokens: torch.Tensor) -> Others:
        """Those of some requests.

        Args:
            trees: of all slots.
            slots: int64 ``[requests]``.
            tokens: int64 ``[requests, nodes]``.
        """
        row = torch.arange(1, trees.parents.shape[1], device=slots.device)
        words = trees.bits[slots, 1:][:, :, row // 32]
        return cls(
            tokens.to(torch.int32),
            trees.parents[slots, 1:] - 1,  # -1 is that of what is no node
            trees.depths[slots, 1:],
            trees.groups[slots, 1:],
            (words >> (row % 32).to(torch.int32) & 1).float(),
        )


class Joint(Growth):
    """Trees of heads and others.

    Args:
        num_nodes: most nodes of a tree.
        max_depth: deepest nodes of the head's own.
        others: the other trees.
        estimates: float32 ``[levels, bases, depths]``; the last level is the head's, of `joint_prior`.
        bins: on their device.
        chains: whether there may be requests whose trees have no branches.
    """

    drawn = False

    def __init__(
        self,
        num_nodes: int,
        max_depth: int,
        others: Others,
        estimates: torch.Tensor,
        bins: Bins,
        *,
        chains: bool = True,
    ) -> None:
        super().__init__(num_nodes, max_depth)
        self._others, self._chains = others, chains
        self._widths = widths(num_nodes, self.max_depth)
        levels, bases, self._depths = estimates.shape
        self._first_group = (levels - 1) * bases * self._depths  # of the head's
        self._bounds = bins.bounds
        # Chances of what the head gives, for each of it: inside a bin as it is given.
        own = estimates[-1, : 2 * len(bins.middles)].view(2, -1, self._depths)
        self._worth = own / bins.middles[:, None]
        self._there = others.above >= ROOT
        # By other node, the group that says what it has of its parent's chance, and that.
        self._groups = others.groups
        chances = estimates.view(-1)[others.groups.clamp(min=0).long()]
        self._chances = chances.clamp(LEAST, MOST)
        self._of_others: torch.Tensor  # values; `give` makes them
        # Of the head's nodes, by depth: float32 [requests, nodes] values, and int32 [4, requests, nodes] tokens,
        # parents' entries, depths and groups.
        self._values: list[torch.Tensor] = []
        self._nodes: list[torch.Tensor] = []
        # Entries of the nodes that were asked for, by depth from the root on, and values of the last of them.
        self._asked = [torch.full_like(others.tokens[:, :1], ROOT)]
        self._base = torch.ones_like(self._asked[0], dtype=torch.float32)

    @property
    def widths(self) -> Sequence[int]:
        """See `Growth.widths`."""
        return self._widths

    def _values_of_others(self) -> torch.Tensor:
        found = torch.matmul(self._others.paths, self._chances.log()[..., None])[..., 0].exp()
        return torch.where(self._there, found, 0.0)

    def _learnt(self, given: torch.Tensor, shared: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 bins, and float32 chances, of the head's nodes of a depth.

        Args:
            given: float32, what it gives them after their parents.
            shared: 1 if others propose them too.
            depth: from 0 on.
        """
        column = torch.bucketize(given.contiguous(), self._bounds, out_int32=True)
        worth = self._worth[shared, :, min(depth, self._depths - 1)]
        return column, (worth[column] * given).clamp(LEAST, MOST)

    def _groups_of(self, column: torch.Tensor, shared: int, depth: int) -> torch.Tensor:
        """Of bins, arguments as of `_learnt`."""
        first = shared * len(MIDDLES) * self._depths + min(depth, self._depths - 1)
        return column * self._depths + (self._first_group + first)

    def give(self, depth: int, rows: Rows, limits: Limits, noise: Noise) -> Asked | None:
        """See `Growth.give`."""
        others, q, asked = self._others, rows.q, self._asked[-1]
        # Which of the others' nodes are children of which of those that were asked for, and what the head gives them.
        below = others.above[..., None] == asked[:, None]
        hit = below[..., None] & (rows.ids[:, None] == others.tokens[..., None, None])
        given = torch.where(hit, q[:, None], 0.0).amax((2, 3))
        column, chances = self._learnt(torch.maximum(given, self._chances), 1, depth)
        shared = given > 0.0
        self._groups = torch.where(shared, self._groups_of(column, 1, depth), self._groups)
        self._chances = torch.where(shared, chances, self._chances)
        self._of_others = self._values_of_others()
        # The head's own.
        width = min(q.shape[2], self.num_nodes)
        column, chances = self._learnt(q[..., :width], 0, depth)
        allowed = (self._base[..., None] > 0.0) & (q[..., :width] > 0.0) & ~hit.any(1)[..., :width]
        allowed &= (depth < limits.depth)[:, None, None]
        values = torch.where(allowed, self._base[..., None] * chances, 0.0).flatten(1)
        values, kept = (
            part[:, : self.num_nodes] for part in values.sort(dim=1, descending=True, stable=True)
        )
        if self._chains:
            values = self._in_chains(limits.chain, others.depths == depth + 1, values)
        whose = kept // width
        tokens = at(rows.ids[..., :width].flatten(1), kept)
        groups = self._groups_of(at(column.flatten(1), kept), 0, depth)
        self._values.append(values)
        self._nodes.append(
            torch.stack([tokens, at(asked, whose), torch.full_like(tokens, depth + 1), groups])
        )
        if depth >= len(self._widths):
            return None
        newest = torch.where(below.any(2), self._of_others, 0.0), values
        parents = torch.cat([below.to(torch.uint8).argmax(2), whose], 1)
        return self._ask(depth, torch.cat(newest, 1), parents)

    def _in_chains(self, chain: torch.Tensor, children: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The head's values of a depth; where there must be no branches, one node of the depth is left.

        Args:
            chain: bool ``[requests]``.
            children: bool ``[requests, nodes]``: the others' nodes of that depth.
            values: of the head's, descending.
        """
        chain = chain[:, None]
        best = torch.where(children, self._of_others, 0.0).amax(1, keepdim=True)
        own = values[:, :1] > best
        dropped = (self._others.paths @ children.float()[..., None])[..., 0] > 0.0  # and what is below them
        self._there = self._there & ~(chain & own & dropped)
        self._of_others = torch.where(self._there, self._of_others, 0.0)
        first = torch.arange(values.shape[1], device=values.device) == 0
        return torch.where(chain & ~(own & first), 0.0, values)

    def _ask(self, depth: int, values: torch.Tensor, parents: torch.Tensor) -> Asked:
        """The best of the newest nodes, as far as a child of theirs may be in the tree.

        Args:
            depth: of their parents.
            values: of the others' nodes, 0 if they are older, and of the head's newest.
            parents: which of the nodes that were asked for theirs is.
        """
        among = torch.cat([self._of_others, *self._values], 1)
        better = (among[:, None, :] >= values[:, :, None]).sum(2)
        values = torch.where(better <= self.num_nodes, values, 0.0)
        width = self._widths[depth]
        missing = max(width - values.shape[1], 0)
        base, chosen = (part[:, :width] for part in values.sort(dim=1, descending=True, stable=True))
        there = base > 0.0
        tokens = at(torch.cat([self._others.tokens, self._nodes[-1][0]], 1), chosen)
        above = at(parents, chosen) + (sum(self._widths[: depth - 1]) if depth else ROOT)
        number = self._of_others.shape[1]
        shift = sum(part.shape[1] for part in self._values[:-1])
        entries = torch.where(chosen < number, chosen, chosen + shift) if shift else chosen
        self._base = _padded(base, missing)
        self._asked.append(_padded(torch.where(there, entries, NOBODY).to(torch.int32), missing, NOBODY))
        above = torch.where(there, above, ROOT).to(torch.int32)
        return Asked(_padded(tokens, missing), _padded(above, missing, ROOT))

    def grown(self) -> Grown:
        """See `Growth.grown`."""
        others, most = self._others, self.num_nodes
        values = torch.cat([self._of_others, *self._values], 1)
        number = values.shape[1]
        values, entries = (part[:, :most] for part in values.sort(dim=1, descending=True, stable=True))
        there = values > 0.0
        of_others = torch.stack([others.tokens, others.above, others.depths, self._groups])
        nodes = torch.cat([of_others, *self._nodes], 2)
        tokens, above, depths, groups = nodes.gather(2, entries.expand(4, -1, -1))
        rows = rows_of_places(torch.where(there, entries, NONE).to(torch.int32), number)
        row = at(rows, torch.where(there & (above >= 0), above, number))
        parents = torch.where(there, torch.where(above == ROOT, 0, row), NONE)
        asked = torch.cat(self._asked[1:], 1) if self._widths else others.tokens[:, :0]
        # By entry, the place of one that was asked for; there may be several of NOBODY.
        place = torch.arange(asked.shape[1], dtype=torch.int32, device=asked.device).expand_as(asked)
        places = torch.full_like(values[:, :1], NONE, dtype=torch.int32).repeat(1, number + 1)
        places.scatter_(1, torch.where(asked >= 0, asked, number).long(), place)
        self._groups_of_rows = torch.where(there, groups, NONE)
        return Grown(tokens, parents, depths, parents, torch.where(there, at(places, entries), NONE))

    def groups(self) -> torch.Tensor:
        """See `Growth.groups`."""
        return self._groups_of_rows


def _padded(values: torch.Tensor, missing: int, value: float = 0) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, missing), value=value) if missing else values
