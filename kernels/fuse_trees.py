# SPDX-License-Identifier: Apache-2.0
"""Several drafters' trees below one root as one tree, ordered by probabilities learnt for who proposed what.

`fuse_trees_numba.py` has the loops, `fuse_trees_ref.py` is their readable form. numba is imported at the first call:
vLLM's worker cannot start in a process that holds it already.
"""

import functools
from typing import Any

from vllm_ext.kernels.best_first_tree import Float32, Int32
from vllm_ext.kernels.grown_tree import GrownTree


def fuse_trees(
    tokens: Int32,
    parents: Int32,
    probabilities: Float32,
    tree_start: Int32,
    estimates: Float32,
    bounds: Float32,
    budget: int,
) -> GrownTree:
    """Merge one request's trees as a trie and keep the ``budget`` most probable nodes.

    Nodes with the same tokens from the root are one. Its group is ``(mask - 1) * num_bins + bin``: bit d of the
    mask says that tree d has it, the bin is the number of ``bounds`` below the largest chance that one of
    these trees gave it after its parent. Its chance after its parent is ``estimates[mask - 1, bin, depth - 1]``,
    at greater depths the last one. Of equally probable nodes the one found first stands first.

    Args:
        tokens: int32 ``[num_nodes]`` of all trees, one tree after the other, each as in ``DraftTree``.
        parents: int32 ``[num_nodes]`` index inside the tree, -1 for the root's children.
        probabilities: float32 ``[num_nodes]`` path probabilities as the drafters see them.
        tree_start: int32 ``[num_trees + 1]``, at most 8 trees.
        estimates: float32 ``[2 ** num_trees - 1, num_bins, num_depths]``, at most 1; at most 256 groups.
        bounds: float32 ``[num_bins - 1]``, ascending.
        budget: most nodes.

    Returns:
        the nodes kept, path probabilities descending.
    """
    fused = GrownTree.of_size(min(len(tokens), budget))
    count = _compiled()(tokens, parents, probabilities, tree_start, estimates, bounds, *fused)
    return fused.first(count)


@functools.cache
def _compiled() -> Any:
    from vllm_ext.kernels import fuse_trees_numba

    return fuse_trees_numba.compiled()
