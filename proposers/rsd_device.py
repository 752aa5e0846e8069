# SPDX-License-Identifier: Apache-2.0
"""`rsd` and `static_tree` on the device: trees whose number of nodes at each depth never changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_ext.proposers.dyspec_device import in_drawn_order
from vllm_ext.proposers.sampled_device import (
    NONE,
    SUPPORT,
    Asked,
    Grown,
    Growth,
    Limits,
    Noise,
    Rows,
    at,
    gumbel,
)


class FixedWidths(Growth):
    """Trees of so many nodes at each depth, all of which are asked for but the deepest; in this order they are rows.

    Args:
        widths: by depth from 1 on.
        num_nodes: most nodes; what no longer fits is the last of the deepest.
    """

    def __init__(self, widths: Sequence[int], num_nodes: int) -> None:
        super().__init__(num_nodes, len(widths))
        self._all, room = [], num_nodes
        for width in widths:
            if room:
                self._all.append(min(width, room))
                room -= self._all[-1]
        # By depth, [requests, width]: tokens, and parents' places, NONE for what is no node.
        self._tokens: list[torch.Tensor] = []
        self._parents: list[torch.Tensor] = []

    @property
    def widths(self) -> Sequence[int]:
        """See `Growth.widths`."""
        return self._all[:-1]

    def first_place(self, depth: int) -> int:
        """Of the nodes of a depth; of the root's ROOT."""
        return sum(self._all[: depth - 1]) if depth else -1

    def add(
        self, depth: int, tokens: torch.Tensor, parents: torch.Tensor, there: torch.Tensor
    ) -> Asked | None:
        """The nodes of a depth: ``[requests, width]``, parents as places."""
        self._tokens.append(torch.where(there, tokens, 0))
        self._parents.append(torch.where(there, parents, NONE - 1))
        return Asked(self._tokens[-1], parents) if depth < len(self._all) else None

    def grown(self) -> Grown:
        """See `Growth.grown`."""
        tokens, parents = (
            torch.cat(self._tokens, 1),
            torch.cat(self._parents, 1) + 1,
        )  # places are rows less 1
        number, asked = parents.shape[1], sum(self.widths)
        place = torch.arange(number, dtype=torch.int32, device=tokens.device)
        depth = torch.cat([torch.full_like(one, d) for d, one in enumerate(self._tokens, 1)], 1)
        places = torch.where(place < asked, place, NONE).expand_as(tokens)
        return Grown(tokens, parents, depth, parents, places)


class FixedBranching(FixedWidths):
    """See `vllm_ext.proposers.rsd.BranchingTree`.

    Args:
        branching: children of each node, by its depth, the root's first.
        num_nodes: most nodes.
        drawn: children are drawn without replacement; else the likeliest.
    """

    def __init__(self, branching: Sequence[int], num_nodes: int, drawn: bool) -> None:
        self._branching, widths = [min(children, SUPPORT) for children in branching], [1]
        for children in self._branching:
            widths.append(min(widths[-1] * children, num_nodes))
        super().__init__(widths[1:], num_nodes)
        self.drawn = drawn

    def give(self, depth: int, rows: Rows, limits: Limits, noise: Noise) -> Asked | None:
        """See `Growth.give`."""
        tokens, q = rows
        if self.drawn:
            tokens, q = in_drawn_order(rows, noise(self.first_place(depth) + 1, q.shape[1]))
        children, width = self._branching[depth], self._all[depth]
        child = torch.arange(children, device=q.device)
        allowed = (depth < limits.depth)[:, None, None] & ((child == 0) | ~limits.chain[:, None, None])
        there = (q[..., :children] > 0.0) & allowed
        if depth:
            there = there & (self._parents[-1] >= -1)[:, : there.shape[1], None]
        parents = self.first_place(depth) + torch.arange(q.shape[1], dtype=torch.int32, device=q.device)
        parents = parents[None, :, None].expand(there.shape)
        own, parents, there = (
            part.flatten(1)[:, :width] for part in (tokens[..., :children], parents, there)
        )
        return self.add(depth + 1, own, parents, there)


class Beams(FixedWidths):
    """See `vllm_ext.proposers.rsd.BeamTree`.

    Args:
        width: most nodes of a depth.
        length: depths.
        num_nodes: most nodes.
    """

    def __init__(self, width: int, length: int, num_nodes: int) -> None:
        super().__init__([width] * length, num_nodes)
        self._phi = self._psi = torch.empty(0)  # float64 [requests, width]: of each path, and perturbed

    def give(self, depth: int, rows: Rows, limits: Limits, noise: Noise) -> Asked | None:
        """See `Growth.give`."""
        ids, q = rows
        first = self.first_place(depth)
        phi = q.log().to(torch.float64) + (self._phi[..., None] if depth else 0.0)
        psi = phi + gumbel(noise(first + 1, q.shape[1]))
        if depth:
            psi = conditioned(psi, self._psi[..., None])
        psi = torch.where(psi.isnan(), -torch.inf, psi)  # behind what is no node there may be anything
        chosen = psi.flatten(1).argsort(dim=1, descending=True, stable=True)[:, : self._all[depth]]
        self._phi, self._psi = phi.flatten(1).gather(1, chosen), psi.flatten(1).gather(1, chosen)
        there = torch.isfinite(self._psi) & (depth < limits.depth)[:, None]
        self._psi = torch.where(there, self._psi, -torch.inf)
        self._phi = torch.where(there, self._phi, -torch.inf)
        parents = (first + chosen // SUPPORT).to(torch.int32)
        return self.add(depth + 1, at(ids.flatten(1), chosen), parents, there)


def conditioned(perturbed: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Gumbel variables given what the largest of them is; -inf stays. See `vllm_ext.proposers.rsd`."""
    top = perturbed.amax(-1, keepdim=True)
    v = largest - perturbed + torch.log1p(-torch.exp(perturbed - top))
    shifted = largest - v.clamp(min=0.0) - torch.log1p(torch.exp(-v.abs()))
    return torch.where(torch.isneginf(perturbed) | torch.isneginf(largest), -torch.inf, shifted)
