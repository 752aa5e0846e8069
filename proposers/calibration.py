# SPDX-License-Identifier: Apache-2.0
"""How often a drafter's nodes are right, counted by class and depth as requests go on.

A drafter sorts its nodes into *groups*: by what it knows of a node before the target has seen it, a count's share or a
match's length. An estimate is hits over trials of a group, from a prior on; so what drafters promise means the same for
all of them, on the text that is served now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vllm_ext.kernels.best_first_tree import judge_tree
from vllm_ext.kernels.grown_tree import GrownTree
from vllm_ext.kernels.learned_arrays import Learned, check_array

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

NUM_DEPTHS = 4  # the deeper ones count as the last
FADE = 0.995  # what is left of a count when the next one is added: the last 200 or so count
PRIOR_TRIALS = 8.0  # what the prior is worth


class Calibration:
    """Estimates of one drafter, and the trees that the next step's output judges.

    Args:
        prior: float64 ``[..., classes]`` chance of acceptance before anything was counted; a node's group is its
            index in this, flattened. At most 256: groups are bytes.
        num_depths: depths that are told apart.
    """

    def __init__(self, prior: Float64, num_depths: int = NUM_DEPTHS) -> None:
        if prior.size > 256:
            raise ValueError(f"prior has {prior.size} groups; a byte tells 256 apart")
        # [*prior.shape, num_depths]
        self.trials: Float64 = np.full((*prior.shape, num_depths), PRIOR_TRIALS)
        self.hits: Float64 = self.trials * prior[..., None]
        self._drafted: dict[str, GrownTree] = {}

    @property
    def estimates(self) -> Float32:
        """float32 ``[*prior.shape, num_depths]``: how often a node is accepted when its parent was."""
        return (self.hits / self.trials).astype(np.float32)

    @property
    def nbytes(self) -> int:
        """Memory of the counts."""
        return self.hits.nbytes + self.trials.nbytes

    def drafted(self, request_id: str, tree: GrownTree) -> None:
        """What was proposed for a request, instead of what was before."""
        self._drafted[request_id] = tree

    def judge(self, request_ids: Sequence[str], emitted: Sequence[Sequence[int]]) -> None:
        """Count the trees of those requests that have put out something since; each tree once."""
        hits, trials = (array.reshape(-1, array.shape[-1]) for array in (self.hits, self.trials))
        for request_id, tokens in zip(request_ids, emitted, strict=True):
            if tokens and (tree := self._drafted.pop(request_id, None)) is not None:
                now = np.array(tokens, np.int32)
                judge_tree(tree.tokens, tree.parents, tree.groups, now, hits, trials, FADE)

    def forget(self, request_id: str) -> None:
        """Judge nothing of this request, until it is drafted for again."""
        self._drafted.pop(request_id, None)

    def state_dict(self) -> dict[str, Learned]:
        """See `Proposer.state_dict`."""
        return {"hits": self.hits.copy(), "trials": self.trials.copy()}

    def load_state_dict(self, arrays: Mapping[str, Learned]) -> None:
        """See `Proposer.load_state_dict`; takes ``arrays["hits"]`` and ``arrays["trials"]``."""
        most = max(PRIOR_TRIALS, 1 / (1 - FADE)) * (1 + 1e-9)  # where a faded sum of ones tends to
        least = min(PRIOR_TRIALS, 1.0)
        check_array("trials", arrays["trials"], self.trials.shape, np.float64, least, most)
        check_array("hits", arrays["hits"], self.hits.shape, np.float64, 0.0, most)
        if (arrays["hits"] > arrays["trials"]).any():
            raise ValueError("hits has more than trials at some place")
        self.hits[...] = arrays["hits"]
        self.trials[...] = arrays["trials"]
