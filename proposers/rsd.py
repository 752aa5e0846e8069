# SPDX-License-Identifier: Apache-2.0
"""Recursive Speculative Decoding: trees drawn without replacement, of a fixed branching or by stochastic beam search.

RSD-C gives every node of a depth the same number of children. RSD-S keeps, at each depth, the ``width`` best of all
sequences by their perturbed log-probability: sequences drawn without replacement. Both take one forward pass a depth.

Source: "Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without Replacement", arXiv 2402.14160,
section 3 and appendix; the beam search is that of "Stochastic Beams and Where to Find Them", arXiv 1903.06059.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_ext.kernels.chance import Chance
from vllm_ext.proposers.sampled import ROOT, Float64, TreeBuilder


class BranchingTree(TreeBuilder):
    """RSD-C. Children stand in the order they were drawn.

    Args:
        branching: children of each node, by its depth, the root's first.
        num_nodes: most nodes; what no longer fits is the last drawn.
        chance: of this request alone; not verification's.
    """

    def __init__(self, branching: Sequence[int], num_nodes: int, chance: Chance) -> None:
        super().__init__()
        self._branching, self._num_nodes, self._chance = list(branching), num_nodes, chance
        self._wanted = [ROOT] if branching and num_nodes > 0 else []

    def wanted(self) -> list[int]:
        """See `TreeBuilder.wanted`."""
        return self._wanted

    def give(self, rows: Float64) -> None:
        """See `TreeBuilder.give`."""
        children = self._branching.pop(0)
        below = []
        for node, row in zip(self._wanted, rows, strict=True):
            self.q[node] = row
            left = row.copy()
            for _ in range(children):
                if len(self.tokens) >= self._num_nodes or not left.any():
                    break
                token = self._chance.draw(left)
                left[token] = 0.0
                below.append(self.add(token, node))
        self._wanted = below if self._branching and len(self.tokens) < self._num_nodes else []


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

    def give(self, rows: Float64) -> None:
        """See `TreeBuilder.give`."""
        vocab = rows.shape[1]
        with np.errstate(divide="ignore"):
            phi = np.log(rows)
        for place, node in enumerate(self._wanted):
            self.q[node] = rows[place]
            phi[place] += self.phi[node] if node != ROOT else 0.0
        gumbel = phi + self._noise.gumbel(size=phi.shape)
        psi = np.empty_like(gumbel)
        for place, node in enumerate(self._wanted):
            psi[place] = _condition(gumbel[place], self.psi[node]) if node != ROOT else gumbel[place]
        most = min(self._width, self._num_nodes - len(self.tokens), int(np.isfinite(psi).sum()))
        flat = psi.reshape(-1)
        best = np.argpartition(-flat, most - 1)[:most] if most else np.zeros(0, np.int64)
        first = len(self.tokens)
        for index in best[np.argsort(-flat[best], kind="stable")].tolist():
            place, token = divmod(index, vocab)
            self.add(token, self._wanted[place])
            self.phi.append(float(phi[place, token]))
            self.psi.append(float(flat[index]))
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
