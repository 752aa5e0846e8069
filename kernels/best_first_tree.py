# SPDX-License-Identifier: Apache-2.0
"""Tables of token successors, and draft trees grown from them.

`grow_trees` reads the tables, the ``record_*`` functions write them, `judge_tree` counts how good the trees
were. `best_first_tree_numba.py` has the loops, `best_first_tree_ref.py` is their readable form. numba is imported
at the first call: vLLM's worker cannot start in a process that holds it already.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ext.kernels.grown_tree import GrownTree

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
UInt8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]

EMPTY = -1


class SuccessorTables(NamedTuple):
    """What followed which token, by three keys: one token, a pair of tokens, a longer context of seen text.

    Rows ``0 .. vocab - 1`` belong to tokens, the others to pairs. A newer key displaces an older in its slot.
    """

    successors: Int32  # [vocab + pair_slots, width] best first, EMPTY behind the last one
    bases: UInt8  # [vocab + pair_slots, width] the class of each entry, see `record_rows`
    pair_keys: Int64  # [pair_slots], a power of two or none
    text_keys: Int64  # [text_slots], a power of two or none
    text_successors: Int32  # [text_slots] what followed that context last

    @classmethod
    def empty(cls, vocab_size: int, width: int, pair_slots: int, text_slots: int) -> "SuccessorTables":
        """Tables that know nothing."""
        return cls(
            np.full((vocab_size + pair_slots, width), EMPTY, np.int32),
            np.zeros((vocab_size + pair_slots, width), np.uint8),
            np.zeros(pair_slots, np.int64),
            np.zeros(text_slots, np.int64),
            np.full(text_slots, EMPTY, np.int32),
        )


class GrownTrees(NamedTuple):
    """Trees of a batch; of request ``i`` the first ``counts[i]`` columns are nodes."""

    counts: Int32  # [num_requests]
    tokens: Int32  # [num_requests, most]
    parents: Int32  # [num_requests, most] -1 is the root
    probabilities: Float32  # [num_requests, most] path probabilities, descending
    groups: UInt8  # [num_requests, most] which estimate the node's own probability came from

    def tree(self, request: int) -> GrownTree:
        """One request's; views."""
        tokens, parents, probabilities, groups = (part[request] for part in self[1:])
        return GrownTree(tokens, parents, probabilities, groups).first(int(self.counts[request]))


def record_rows(
    tables: SuccessorTables,
    row_start: Int32,
    tokens: Int32,
    parents: Int32,
    accepted: Bool,
    root_previous: Int32,
    top_ids: Int32,
    top_logits: Float32,
    shares: Float32,
) -> None:
    """Overwrite the rows of verified tokens, and of their pairs with the token before.

    Rejected rows first, then accepted ones, each in order: of rows with one key the last accepted one stays.
    An entry's class is 1 + the number of ``shares`` below its part of the softmax over the row's logits; in a
    pair's row ``len(shares) + 1`` more. Class 0 is left to entries that come from no logits.

    Args:
        tables: written to.
        row_start: int32 ``[num_requests + 1]``; request i has the rows ``row_start[i]:row_start[i + 1]``, the
            root first.
        tokens: int32 ``[num_rows]``; a row whose token is not in the vocabulary is skipped.
        parents: int32 ``[num_rows]`` offset inside the request of the token before; -1 for roots.
        accepted: bool ``[num_rows]``.
        root_previous: int32 ``[num_requests]`` the token before each root; -1 if unknown.
        top_ids: int32 ``[num_rows, width]``, best first.
        top_logits: float32 ``[num_rows, width]``.
        shares: float32 ``[num_bounds]``, ascending.
    """
    _compiled("record_rows")(
        tables, row_start, tokens, parents, accepted, root_previous, top_ids, top_logits, shares
    )


def record_text(tables: SuccessorTables, tokens: Int32, start: int, longest: int) -> None:
    """Note ``tokens[start:]`` as the successors of the 2 to ``longest`` tokens before each of them.

    Args:
        tables: written to.
        tokens: int32 ``[num_tokens]``. Contexts and successors outside the vocabulary are skipped.
        start: index of the first successor.
        longest: most tokens of a context.
    """
    _compiled("record_text")(tables, tokens, start, longest)


def grow_trees(
    tables: SuccessorTables,
    estimates: Float32,
    contexts: Int32,
    budgets: Int64,
    max_depths: Int64,
    chains: Bool,
    template: Int32,
) -> GrownTrees:
    """From each root on, open the newest node and take the most probable of all unopened children.

    The children of a node are its pair's row, or its token's where the pair is unknown, and what followed
    the longest known context of text. A child's own probability is ``estimates[level, base, depth - 1]``, at
    greater depths the last one. ``level`` is 0, or for the text's successor the length of that context minus
    1. ``base`` is the class of its entry in the row. A text's successor that the row lacks has the last class
    if that is a pair's row, the last but one if it is a token's, and 0 if the row holds nothing from logits.
    Of equally probable children the one found first is taken.

    Args:
        tables: as recorded.
        estimates: float32 ``[longest, num_bases, num_depths]``, at most 1; ``longest * num_bases <= 256``.
        contexts: int32 ``[num_requests, longest]`` the last tokens, newest last, -1 before the first.
        budgets: int64 ``[num_requests]`` most nodes.
        max_depths: int64 ``[num_requests]`` deepest nodes; the root's children have depth 1.
        chains: bool ``[num_requests]`` consider the newest node's children alone.
        template: int32 ``[num_positions, width]`` the shape: position 0 is the root, an entry the position of
            the child of that rank, -1 where there is none; a successor that the row lacks has none. No
            positions: any shape.
    """
    num_requests, most = len(budgets), max(int(budgets.max(initial=0)), 0)
    trees = GrownTrees(
        np.zeros(num_requests, np.int32),
        np.empty((num_requests, most), np.int32),
        np.empty((num_requests, most), np.int32),
        np.empty((num_requests, most), np.float32),
        np.empty((num_requests, most), np.uint8),
    )
    _compiled("grow_trees")(tables, estimates, contexts, budgets, max_depths, chains, template, trees)
    return trees


def judge_tree(
    tokens: Int32,
    parents: Int32,
    groups: UInt8,
    emitted: Int32,
    hits: Float64,
    trials: Float64,
    fade: float,
) -> None:
    """Count for each group how often its nodes were right, older counts fading by ``fade`` with each new one.

    A node is tried if its ancestors are what the request put out; it is hit if it is too.

    Args:
        tokens: int32 ``[num_nodes]`` of a tree that was proposed.
        parents: int32 ``[num_nodes]``.
        groups: uint8 ``[num_nodes]``, as `grow_trees` gave them.
        emitted: int32 ``[num_emitted]`` what the request put out behind the tree's root.
        hits: float64 ``[num_groups, num_depths]``, written to.
        trials: float64 ``[num_groups, num_depths]``, written to.
        fade: below 1.
    """
    _compiled("judge_tree")(tokens, parents, groups, emitted, hits, trials, fade)


@functools.cache
def _compiled(name: str) -> Any:
    from vllm_ext.kernels import best_first_tree_numba

    return best_first_tree_numba.compiled(name)
