# SPDX-License-Identifier: Apache-2.0
"""Draft trees of a few copies that go on from different places of one text.

`copy_tree_numba.py` has the loop, `copy_tree_ref.py` is its readable form. numba is imported at the first call: vLLM's
worker cannot start in a process that holds it already.
"""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ext.kernels.grown_tree import GrownTree

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


def copy_tree(
    text: Int32,
    copies: Int64,
    chances: Float32,
    lengths: Int64,
    vocab_size: int,
    budget: int,
    max_depth: int,
    chain: bool,
) -> GrownTree:
    """From the root on take the most probable of what the copies have next.

    Copies that agree so far share their nodes. The next token's own probability is ``chances[kind, class, depth - 1]``,
    at greater depths the last one, with the class of the length that the copy has come to: each token adds one. A
    shared node has the probability of its most probable copy; of equals the first copy's.

    Args:
        text: int32 ``[num_tokens]``. A copy ends with it, and before a token that is not in the vocabulary.
        copies: int64 ``[num_copies, 3]`` index in the text of each copy's first token, its length so far and kind.
        chances: float32 ``[kinds, num_lengths, num_depths]``, none above 1; at most 256 kinds and lengths.
        lengths: int64 ``[num_lengths - 1]``, ascending: a length's class is the number of these below it.
        vocab_size: number of token ids.
        budget: most nodes.
        max_depth: deepest nodes; the root's children have depth 1.
        chain: go on from the newest node alone.
    """
    tree = GrownTree.of_size(budget)
    count = _compiled()(text, copies, chances, lengths, vocab_size, max_depth, chain, tree)
    return tree.first(count)


@functools.cache
def _compiled() -> Any:
    from vllm_ext.kernels import copy_tree_numba

    return copy_tree_numba.compiled()
