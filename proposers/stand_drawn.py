# SPDX-License-Identifier: Apache-2.0
"""STAND's drawn trees: what they are drawn from, and how often what was drawn so is accepted.

Source: "Accelerated Test-Time Scaling with Model-Free Speculative Sampling", arXiv 2506.04708, section 3; each node is
placed before it is drawn, as in DySpec, arXiv 2410.11744. There the draft's own probability says where a node is worth
most; here it is how often nodes like it were accepted, as a table is not as sure as it looks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_ext.kernels.grown_tree import GrownTree
from vllm_ext.kernels.ngram_table import Classes, NgramTable, Shape, draw_tree
from vllm_ext.kernels.sparse import Sparse
from vllm_ext.proposers.base import Request, VerifiedRows
from vllm_ext.proposers.calibration import Calibration, Float64
from vllm_ext.proposers.tree import DraftTree, Float32, Int32, SampledDrafts

SEED = 0x57A2D  # of the draws' noise: apart from vLLM's and from verification's


class DrawnTrees:
    """Draws trees from a table, and counts what becomes of them.

    Args:
        prior: float64 ``[orders, ranks, num_shares]`` chance that a child is accepted once its parent is, by the length
            of its context, how many siblings were drawn before it, and its share of what they have left.
        shares: float32 ``[num_shares - 1]`` bounds between the classes of a share.
    """

    def __init__(self, prior: Float64, shares: Float32) -> None:
        self.calibration = Calibration(prior)
        self._shares = shares
        # Of all requests: tensor-parallel ranks ask for the same trees in the same order.
        self._noise = np.random.default_rng(SEED)
        self._drafted: dict[str, GrownTree] = {}

    def draw(self, table: NgramTable, request: Request, context: Int32) -> DraftTree:
        """One request's tree. What it was drawn from is copied: the table may change before it is verified.

        Args:
            table: as recorded.
            request: samples, without a seed.
            context: see `draw_tree`.
        """
        sampling = request.sampling
        tree, ids, q = draw_tree(
            table,
            context,
            Classes(self.calibration.estimates, self._shares),
            Shape(float(sampling.temperature), float(sampling.top_p), sampling.top_k, float(sampling.min_p)),
            int(self._noise.integers(1 << 63)),
            request.budget_tokens,
            request.max_depth,
        )
        self._drafted[request.request_id] = tree
        rows = {}
        for parent in set(tree.parents.tolist()):
            kept = q[parent + 1] > 0.0
            rows[parent] = Sparse(ids[parent + 1, kept], q[parent + 1, kept])
        return DraftTree(*tree[:3], SampledDrafts(rows))

    def judge(self, rows: VerifiedRows) -> None:
        """Count the nodes of the last trees that were verified: others have not been tried by the verifier's rule."""
        sizes = np.diff(rows.row_start) - 1
        for name, size, emitted in zip(rows.request_ids, sizes.tolist(), rows.emitted, strict=True):
            if emitted and (tree := self._drafted.pop(name, None)) is not None and size > 0:
                self.calibration.drafted(name, tree.first(size))
        self.calibration.judge(rows.request_ids, rows.emitted)

    def forget(self, request_id: str) -> None:
        """A request is gone, or has another tree."""
        self._drafted.pop(request_id, None)
        self.calibration.forget(request_id)

    @staticmethod
    def prior(trust: Sequence[float], num_ranks: int, middles: Float64) -> Float64:
        """What is believed before anything was counted.

        Args:
            trust: by length of the context, the chance that the first child is accepted.
            num_ranks: most children.
            middles: float64 ``[num_shares]`` of the classes of a share.
        """
        first = np.array(trust)[:, None, None]
        rejected = (1.0 - first) ** np.arange(num_ranks)[None, :, None]
        believed: Float64 = first * rejected * (0.5 + 0.5 * middles)
        return believed
