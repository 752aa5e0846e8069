# SPDX-License-Identifier: Apache-2.0
"""An index of text by its last tokens, and draft trees of what followed them.

`append` writes the index, `find` and `grow_tree` read it. It is the dictionary of LZ77 compressors (hash chains,
RFC 1951, section 4) rather than a suffix tree: a token costs as much in a full index as in an empty one, and old text
leaves a full one by being overwritten. `suffix_index_numba.py` has the loops, `suffix_index_ref.py` is their readable
form. numba is imported at the first call: vLLM's worker cannot start in a process that holds it already.
"""

import functools
import itertools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ext.kernels.grown_tree import GrownTree

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

SEPARATOR = -1  # stands between texts; equals nothing and follows nothing
CONTEXT_ONLY = -1  # in place of a link: nothing is found to follow this position
NUM_ORDERS = 4  # the last 1, 2, 4 and 8 tokens have a chain each
LONGEST_ORDER = 1 << NUM_ORDERS - 1
# One int32 and, for each order, an int32 and an int64.
BYTES_PER_TOKEN = 4 + 12 * NUM_ORDERS
# Most occurrences of a context gathered from one index, and most links of one chain followed for them.
OCCURRENCES = 64


class SuffixIndex(NamedTuple):
    """The last ``capacity`` tokens of all that was appended, and where each of their contexts was seen before.

    Tokens are known by their *position*, counted from 1 and never reused; position 0 is a separator. Position p is
    held in column ``p % capacity``.
    """

    log: Int32  # [capacity], a power of two: token ids, SEPARATOR where there is none
    previous: Int32  # [NUM_ORDERS, capacity] how far back the context ending here ended before; 0: nowhere.
    # A context of no chain has any number, its first order CONTEXT_ONLY if the token was appended as that.
    newest: (
        Int64  # [NUM_ORDERS, capacity] by hash of the context: the position where it ended last; 0: nowhere
    )
    end: Int64  # [1] the position that the next token gets

    @classmethod
    def empty(cls, capacity: int) -> "SuffixIndex":
        """An index of no text; ``capacity`` is a power of two, at least 16 and at most ``2**28``."""
        # Written to, so that the memory is there: pages that `np.zeros` leaves to the first write would cost the
        # first long text some 30 ms.
        log = np.full(capacity, 0, np.int32)
        log[0] = SEPARATOR
        return cls(
            log,
            np.full((NUM_ORDERS, capacity), 0, np.int32),
            np.full((NUM_ORDERS, capacity), 0, np.int64),
            np.ones(1, np.int64),
        )


class Estimates(NamedTuple):
    """How likely a child is to be accepted once its parent is, by what is known of its occurrences."""

    # [3, num_lengths, num_shares] by source (0: the own index, 1: the shared one, 2: both), longest match, share
    chances: Float32
    lengths: Int64  # [num_lengths - 1], ascending: a length's class is the number of these below it
    shares: Float64  # [num_shares - 1], ascending, likewise


def append(index: SuffixIndex, tokens: Int32, first: int, vocab_size: int) -> None:
    """Append tokens. Those before ``tokens[first]`` are context only: nothing is ever found to follow them.

    Args:
        index: written to. What no longer fits is forgotten, oldest first.
        tokens: int32 ``[num_tokens]``. What is not in the vocabulary becomes a separator.
        first: index of the first token whose successor can be found.
        vocab_size: number of token ids.
    """
    _compiled("append")(index, tokens, first, vocab_size)


def contents(index: SuffixIndex) -> tuple[Int32, Bool]:
    """What `rebuild` makes an index of, of which every answer is this one's.

    Returns:
        int32 ``[num_tokens]`` the tokens that are not forgotten, oldest first, and bool ``[num_tokens]`` those whose
        successors can be found, separators among them: theirs have no links.
    """
    capacity, end = len(index.log), int(index.end[0])
    if end <= capacity:
        tokens, links = index.log[1:end].copy(), index.previous[0, 1:end]
    else:
        oldest = end % capacity
        tokens = np.concatenate([index.log[oldest:], index.log[:oldest]])
        links = np.concatenate([index.previous[0, oldest:], index.previous[0, :oldest]])
    return tokens, (links != CONTEXT_ONLY) | (tokens < 0)


def rebuild(capacity: int, tokens: Int32, findable: Bool, vocab_size: int) -> SuffixIndex:
    """An index of the last ``capacity`` tokens of `contents`, or of several in a row."""
    index = SuffixIndex.empty(capacity)
    # A copy of exactly this type, or numba would compile once more.
    tokens, findable = np.array(tokens[-capacity:], np.int32), findable[-capacity:]
    # A part is context, possibly none, and what is found to follow.
    begins = np.flatnonzero(np.diff(findable, prepend=np.True_) & ~findable).tolist()
    bounds = [0, *(begin for begin in begins if begin), len(tokens)]
    for begin, end in itertools.pairwise(bounds):
        first = int(findable[begin:end].argmax()) if findable[begin:end].any() else end - begin
        append(index, tokens[begin:end], first, vocab_size)
    return index


def find(index: SuffixIndex, text: SuffixIndex, min_match: int, max_match: int) -> tuple[Int64, Int64]:
    """Where the last tokens of ``text`` occur in ``index`` with a token behind them.

    Longer matches first, by the longest order they reach; of one order the latest first. Complete where no chain is
    longer than `OCCURRENCES`; else the later ones.

    Args:
        index: searched; may be ``text`` itself.
        text: not yet overflowed.
        min_match: fewest last tokens in common.
        max_match: most that are compared.

    Returns:
        int64 ``[num_found]`` positions of the last token in common, and int64 ``[num_found]`` how many are in
        common, backwards from there.
    """
    positions, lengths = np.empty(OCCURRENCES, np.int64), np.empty(OCCURRENCES, np.int64)
    count = _compiled("find")(index, text, min_match, max_match, positions, lengths)
    return positions[:count], lengths[:count]


def grow_tree(
    own: SuffixIndex,
    shared: SuffixIndex,
    estimates: Estimates,
    min_match: int,
    max_match: int,
    budget: int,
    max_depth: int,
    chain: bool,
) -> GrownTree:
    """From the root on, open the newest node and take the most probable of all unopened children.

    The children of a node are the tokens that follow the path to it at those occurrences of ``own``'s last tokens
    that agree with the path. An occurrence that reaches the end of ``own`` goes on with the path itself, as the copies
    of LZ77 do: a loop is followed to any depth. With m the length of an occurrence's match, path included, it weighs
    m * m; a child's share is the weight of its occurrences over that of all its siblings' and its own, plus once the
    square of the longest of them all: one occurrence alone has the share 1/2, two alike have 2/3. The child's own
    probability is the chance of its source, its longest match and its share. Of equally probable children the one
    found first is taken.

    Args:
        own: the request's text, not yet overflowed; its last token is the root.
        shared: other text.
        estimates: what a child's occurrences say; at most 256 chances, none above 1.
        min_match: fewest last tokens an occurrence has in common with ``own``, before the path.
        max_match: most that are compared.
        budget: most nodes.
        max_depth: deepest nodes; the root's children have depth 1.
        chain: consider the newest node's children alone.
    """
    tree = GrownTree.of_size(budget)
    count = _compiled("grow_tree")(
        own, shared, estimates, min_match, max_match, OCCURRENCES, max_depth, chain, tree
    )
    return tree.first(count)


@functools.cache
def _compiled(name: str) -> Any:
    from vllm_ext.kernels import suffix_index_numba

    return suffix_index_numba.compiled(name)
