# SPDX-License-Identifier: Apache-2.0
"""What the tree-growing kernels write."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class GrownTree(NamedTuple):
    """One tree, its nodes in the order they were taken."""

    tokens: npt.NDArray[np.int32]  # [num_nodes]
    parents: npt.NDArray[np.int32]  # [num_nodes] -1 is the root
    probabilities: npt.NDArray[np.float32]  # [num_nodes] path probabilities
    groups: npt.NDArray[np.uint8]  # [num_nodes] which estimate the node's own probability is

    @classmethod
    def of_size(cls, most: int) -> "GrownTree":
        """Room for so many nodes; none if ``most`` is negative."""
        most = max(most, 0)
        return cls(
            np.empty(most, np.int32),
            np.empty(most, np.int32),
            np.empty(most, np.float32),
            np.empty(most, np.uint8),
        )

    def first(self, count: int) -> "GrownTree":
        """The first nodes; views."""
        return GrownTree(
            self.tokens[:count], self.parents[:count], self.probabilities[:count], self.groups[:count]
        )
