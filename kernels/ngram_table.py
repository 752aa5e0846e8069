# SPDX-License-Identifier: Apache-2.0
"""A bounded table of what follows short contexts, with weights, and draft trees grown from it.

`record_rows` and `record_text` write it, `grow_tree` reads it. `ngram_table_numba.py` has the loops,
`ngram_table_ref.py` is their readable form. numba is imported at the first call: vLLM's worker cannot start in a
process that holds it already.
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
Bool = npt.NDArray[np.bool_]

EMPTY = -1
WAYS = 4  # slots that a context may be in
# A context's mean is that of no more distributions: later ones then weigh as the last of them.
MOST_COUNT = 1 << 30


class NgramTable(NamedTuple):
    """Contexts by hash; a slot has the successors of one of them, the heaviest first.

    Of the ``WAYS`` slots that a new context may take it gets the one whose own was not recorded for longest.
    """

    keys: Int64  # [slots], a power of two, at least WAYS; 0: free
    used: Int64  # [slots] the clock when the context was recorded last; 0: free
    counts: Int32  # [slots] how many distributions its weights are the mean of, up to MOST_COUNT
    successors: Int32  # [slots, width] EMPTY behind the last one
    weights: Float32  # [slots, width] descending
    clock: Int64  # [1] records so far

    @classmethod
    def empty(cls, slots: int, width: int) -> "NgramTable":
        """A table that knows nothing."""
        # Written to, so that the memory is there: pages that `np.zeros` leaves to the first write cost steps.
        return cls(
            np.full(slots, 0, np.int64),
            np.full(slots, 0, np.int64),
            np.full(slots, 0, np.int32),
            np.full((slots, width), EMPTY, np.int32),
            np.full((slots, width), 0, np.float32),
            np.zeros(1, np.int64),
        )

    @classmethod
    def of_size(cls, num_bytes: int, width: int) -> "NgramTable":
        """The largest empty table of at most that many bytes, if that is enough for ``WAYS`` slots."""
        slots = max(num_bytes // (20 + 8 * width), WAYS)
        return cls.empty(1 << slots.bit_length() - 1, width)


class Entries(NamedTuple):
    """What a table knows, without its free slots: what is kept of it."""

    keys: Int64  # [contexts], of any order, no two alike
    used: Int64  # [contexts], above 0
    counts: Int32  # [contexts]
    successors: Int32  # [contexts, width]
    weights: Float32  # [contexts, width]


class Classes(NamedTuple):
    """How likely a child is to be accepted once its parent is, by what the table says of it."""

    # [levels, num_shares, num_depths] by length of the context above the shortest (longer ones count as the last),
    # share of its weight, depth (deeper ones count as the last); none above 1
    chances: Float32
    shares: Float32  # [num_shares - 1], ascending: a share's class is the number of these below it


class Growing(NamedTuple):
    """Which of a node's successors become its children, and which of all children a node."""

    branches: int  # most children of one node
    temperature: float  # above 0
    exploration: float  # see `grow_tree`


class Shape(NamedTuple):
    """What a request makes of a distribution before it draws."""

    temperature: float  # above 0
    top_p: float
    top_k: int  # 0: all
    min_p: float


class DrawnTree(NamedTuple):
    """A tree whose nodes were drawn, and the distributions they were drawn from: copies, the table may change."""

    tree: GrownTree
    # Both [1 + num_nodes, width], the root's first, heaviest first. Where q is 0 there is no token, or none to draw.
    ids: Int32
    q: Float64  # what the first of a node's children was drawn from; all 0 where nothing was known or asked


def contents(table: NgramTable) -> Entries:
    """What the table knows. Copies."""
    taken = np.flatnonzero(table.used)
    return Entries(
        table.keys[taken],
        table.used[taken],
        table.counts[taken],
        table.successors[taken],
        table.weights[taken],
    )


def insert(table: NgramTable, entries: Entries) -> int:
    """Put what another table knew in an empty one.

    Args:
        table: written to.
        entries: each of them as a table has it, but for the ways of the whole: they are checked here.

    Returns:
        The first entry that has no place, being there already or one of more than `WAYS` for the same slots; -1 if all
        have one.
    """
    refused: int = _compiled("insert")(table, *entries)
    table.clock[0] = entries.used.max(initial=0)
    return refused


def record_rows(
    table: NgramTable,
    row_start: Int32,
    tokens: Int32,
    parents: Int32,
    accepted: Bool,
    before: Int32,
    top_ids: Int32,
    top_logits: Float32,
    vocab_size: int,
) -> None:
    """Take each accepted row's distribution into those of all contexts that end with its token.

    A row's distribution is the softmax over its logits. A context's weights are the mean of those recorded for it,
    of which the heaviest ``width`` are kept, so that they add up to less than 1 once others were dropped.

    Args:
        table: written to.
        row_start: int32 ``[num_requests + 1]``; request i has the rows ``row_start[i]:row_start[i + 1]``, the
            root first.
        tokens: int32 ``[num_rows]``; contexts with a token that is not in the vocabulary are skipped.
        parents: int32 ``[num_rows]`` offset inside the request of the token before; -1 for roots.
        accepted: bool ``[num_rows]``.
        before: int32 ``[num_requests, longest - 1]`` the tokens before each root, newest last; -1 if unknown.
        top_ids: int32 ``[num_rows, width]``, best first.
        top_logits: float32 ``[num_rows, width]``; a row whose first is not finite is skipped.
        vocab_size: number of token ids.
    """
    _compiled("record_rows")(
        table, row_start, tokens, parents, accepted, before, top_ids, top_logits, vocab_size
    )


def record_text(
    table: NgramTable, tokens: Int32, order: int, step: float, cap: float, vocab_size: int
) -> None:
    """Add ``step``, up to ``cap``, to the weight of each of ``tokens[order:]`` behind the ``order`` tokens before it.

    A new successor takes the place of the lightest where there is no other. Of equal ones the latest stands first.

    Args:
        table: written to.
        tokens: int32 ``[num_tokens]``. Contexts and successors outside the vocabulary are skipped.
        order: tokens of a context.
        step: above 0.
        cap: at least ``step``.
        vocab_size: number of token ids.
    """
    _compiled("record_text")(table, tokens, order, step, cap, vocab_size)


def grow_tree(
    table: NgramTable,
    context: Int32,
    shortest: int,
    classes: Classes,
    growing: Growing,
    budget: int,
    max_depth: int,
    chain: bool,
) -> GrownTree:
    """From the root on, open the newest node and take the best of all unopened children.

    The children of a node are among the successors of the longest context in the table that ends with it. A share is
    a successor's part of their weights to the power of ``1 / temperature``; the largest ones become children. The best
    of all unopened children is the one of the largest path probability times ``1 + exploration * sqrt(n)``, with n the
    number of nodes already taken below its parent; of equals the first found. Nodes stand in the order they were taken:
    with exploration not always in that of their probabilities.

    Args:
        table: as recorded.
        context: int32 ``[longest]`` the last tokens, newest last, -1 before the first.
        shortest: tokens of the shortest context looked up.
        classes: of at most 256 groups.
        growing: how children are chosen.
        budget: most nodes.
        max_depth: deepest nodes; the root's children have depth 1.
        chain: consider the newest node's children alone.
    """
    tree = GrownTree.of_size(budget)
    count = _compiled("grow_tree")(table, context, shortest, classes, growing, max_depth, chain, tree)
    return tree.first(count)


def draw_tree(
    table: NgramTable,
    context: Int32,
    classes: Classes,
    shape: Shape,
    noise: int,
    budget: int,
    max_depth: int,
) -> DrawnTree:
    """Draw a tree without replacement, one node after the other where it is likeliest to be accepted.

    A node's children are drawn from the distribution of the longest context in the table that ends with it: the next
    one is that of the largest ``log(q) + G`` left, with standard Gumbel noise G that depends on ``noise`` and the path.
    Which node gets the next child, and whether any does, depends on nothing that is drawn then: of all places for one
    more child it is the one that verification comes to most likely, the mean over what may be drawn of the estimates,
    times the chance that the node is accepted. So the first ``n`` nodes are the tree of budget ``n``, and children
    stand in the order they were drawn.

    Args:
        table: as recorded.
        context: int32 ``[longest]`` the last tokens, newest last, -1 before the first.
        classes: ``chances`` is ``[levels, num_ranks, num_shares, num_depths]``, by how many of its siblings were drawn
            before too; a child's share is its part of what they have left. As many children as ranks at most.
        shape: how the request samples.
        noise: of this tree alone, uniform among 63 bits.
        budget: most nodes.
        max_depth: deepest nodes; the root's children have depth 1.

    Returns:
        The tree; a node's probability is the chance of its place, which was known before it was drawn.
    """
    tree = GrownTree.of_size(budget)
    width = table.successors.shape[1]
    ids, q = np.full((len(tree.tokens) + 1, width), EMPTY, np.int32), np.zeros((len(tree.tokens) + 1, width))
    count = _compiled("draw_tree")(table, context, classes, shape, noise, max_depth, tree, ids, q)
    return DrawnTree(tree.first(count), ids[: count + 1], q[: count + 1])


@functools.cache
def _compiled(name: str) -> Any:
    from vllm_ext.kernels import ngram_table_numba

    return ngram_table_numba.compiled(name)
