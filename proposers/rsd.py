# SPDX-License-Identifier: Apache-2.0
"""Recursive Speculative Decoding: trees drawn without replacement, of a fixed branching or by stochastic beam search.

RSD-C gives every node of a depth the same number of children. RSD-S keeps, at each depth, the ``width`` best of all
sequences by their perturbed log-probability: sequences drawn without replacement. Both take one forward pass a depth.

Source: "Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement", arXiv 2402.14160,
section 3 and appendix; the beam search is that of "Stochastic Beams and Where to Find Them", arXiv 1903.06059.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from pydantic import Field

from vllm_ext.kernels.chance import Chance
from vllm_ext.kernels.sparse import Float64, Sparse
from vllm_ext.proposers.base import MAX_SPECULATIVE_TOKENS, MethodOptions
from vllm_ext.proposers.draft_model import DraftModelOptions, DraftModelProposer
from vllm_ext.proposers.sampled import ROOT, TreeBuilder
from vllm_ext.proposers.tree import SampledDrafts

if TYPE_CHECKING:
    from vllm_ext.proposers.sampled_device import Growth  # with torch


class BranchingTree(TreeBuilder):
    """RSD-C. Children stand in the order they were drawn, or by descending probability.

    Args:
        branching: children of each node, by its depth, the root's first.
        num_nodes: most nodes; what no longer fits is the last drawn.
        chance: of this request alone; not verification's. None: the likeliest are taken, none drawn.
    """

    def __init__(self, branching: Sequence[int], num_nodes: int, chance: Chance | None) -> None:
        super().__init__()
        self._branching, self._num_nodes, self._chance = list(branching), num_nodes, chance
        self._wanted = [ROOT] if branching and num_nodes > 0 else []

    def wanted(self) -> list[int]:
        """See `TreeBuilder.wanted`."""
        return self._wanted

    def give(self, rows: Sequence[Sparse]) -> None:
        """See `TreeBuilder.give`."""
        children = self._branching.pop(0)
        below = []
        for node, row in zip(self._wanted, rows, strict=True):
            self.q[node] = row
            left = row.q.copy()
            for _ in range(children):
                if len(self.tokens) >= self._num_nodes or not left.any():
                    break
                place = self._chance.draw(left) if self._chance else int(left.argmax())
                left[place] = 0.0
                below.append(self.add(int(row.ids[place]), node))
        self._wanted = below if self._branching and len(self.tokens) < self._num_nodes else []

    def drawn(self, q: dict[int, Sparse]) -> SampledDrafts | None:
        """See `TreeBuilder.drawn`."""
        return super().drawn(q) if self._chance else None


class BeamTree(TreeBuilder):
    """RSD-S. Children stand by descending perturbed log-probability.

    Args:
        width: most nodes of a depth.
        length: depths.
        num_nodes: most nodes; what no longer fits is the least of the deepest.
        noise: of this request alone; not verification's.
    """

    def __init__(self, width: int, length: int, num_nodes: int, noise: np.random.Generator) -> None:
        super().__init__()
        self._width, self._length, self._num_nodes, self._noise = width, length, num_nodes, noise
        self.phi: list[float] = []  # log-probability of each node's path
        self.psi: list[float] = []  # the same, perturbed: the largest of a node's children is its own
        self._wanted = [ROOT] if width > 0 and length > 0 and num_nodes > 0 else []
        self._depth = 0

    def wanted(self) -> list[int]:
        """See `TreeBuilder.wanted`."""
        return self._wanted

    def give(self, rows: Sequence[Sparse]) -> None:
        """See `TreeBuilder.give`."""
        phis, psis = [], []
        for node, row in zip(self._wanted, rows, strict=True):
            self.q[node] = row
            with np.errstate(divide="ignore"):
                phi = np.log(row.q) + (self.phi[node] if node != ROOT else 0.0)
            gumbel = phi + self._noise.gumbel(size=phi.shape)
            phis.append(phi)
            psis.append(_condition(gumbel, self.psi[node]) if node != ROOT else gumbel)
        phi, psi = np.concatenate(phis), np.concatenate(psis)
        ids = np.concatenate([row.ids for row in rows])
        parents = np.repeat(self._wanted, [len(row.ids) for row in rows])
        most = min(self._width, self._num_nodes - len(self.tokens), int(np.isfinite(psi).sum()))
        first = len(self.tokens)
        for index in np.argsort(-psi, kind="stable")[:most].tolist():
            self.add(int(ids[index]), int(parents[index]))
            self.phi.append(float(phi[index]))
            self.psi.append(float(psi[index]))
        self._depth += 1
        more = self._depth < self._length and len(self.tokens) < self._num_nodes
        self._wanted = list(range(first, len(self.tokens))) if more else []


def _condition(gumbel: Float64, largest: float) -> Float64:
    """Gumbel variables given what the largest of them is; -inf stays.

    ``-log(exp(-largest) - exp(-max) + exp(-gumbel))``, without overflow (arXiv 1903.06059, appendix B).
    """
    top = gumbel.max()
    with np.errstate(divide="ignore", invalid="ignore"):
        v = largest - gumbel + np.log1p(-np.exp(gumbel - top))
        shifted: Float64 = largest - np.maximum(v, 0.0) - np.log1p(np.exp(-np.abs(v)))
    return np.where(np.isneginf(gumbel), -np.inf, shifted)


class RsdCOptions(DraftModelOptions):
    """Options of ``rsd_c``."""

    branching: list[Annotated[int, Field(ge=1, le=MAX_SPECULATIVE_TOKENS)]] = Field(
        default=[3, 2, 1, 1], min_length=1, max_length=32, description="children of each node, by its depth"
    )


class RsdC(DraftModelProposer):
    """Trees of a fixed branching."""

    summary: ClassVar[str] = "a draft model's tree, sampled without replacement"
    paper: ClassVar[str] = "arXiv 2402.14160"
    Options: ClassVar[type[MethodOptions]] = RsdCOptions
    on_v2 = "device"

    def drawn(self, num_nodes: int, max_depth: int) -> TreeBuilder:
        """See `DraftModelProposer.drawn`."""
        return BranchingTree(self.options.branching[:max_depth], num_nodes, self.chance)

    def drawn_on_device(self, num_nodes: int) -> Growth:
        """See `DraftModelProposer.drawn_on_device`."""
        from vllm_ext.proposers.rsd_device import FixedBranching

        return FixedBranching(self.options.branching[: self.options.max_depth], num_nodes, drawn=True)


class RsdSOptions(DraftModelOptions):
    """Options of ``rsd_s``."""

    width: int = Field(default=4, ge=1, le=32, description="most nodes of a depth")


class RsdS(DraftModelProposer):
    """Trees of a stochastic beam search."""

    summary: ClassVar[str] = "a draft model's beams, sampled without replacement"
    paper: ClassVar[str] = "arXiv 2402.14160"
    Options: ClassVar[type[MethodOptions]] = RsdSOptions
    on_v2 = "device"

    def drawn(self, num_nodes: int, max_depth: int) -> TreeBuilder:
        """See `DraftModelProposer.drawn`."""
        return BeamTree(self.options.width, max_depth, num_nodes, self.noise)

    def drawn_on_device(self, num_nodes: int) -> Growth:
        """See `DraftModelProposer.drawn_on_device`."""
        from vllm_ext.proposers.rsd_device import Beams

        return Beams(self.options.width, self.options.max_depth, num_nodes)
