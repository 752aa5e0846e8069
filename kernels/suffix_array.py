# SPDX-License-Identifier: Apache-2.0
"""Search in sorted texts for what followed a context, and draft trees from it.

A text is tokens with a separator before, between and behind its documents; the separator is greater than every
token. ``suffixes`` lists its positions in the order of the tokens read from there *backwards*, up to the
document's start or `SORTED_TOKENS` of them: the suffix array of the reversed text. So one search finds the
longest end of a context that occurs, and what followed stands behind the positions found.

`suffix_array_numba.py` has the loops, `suffix_array_ref.py` is their readable form. numba is imported at the
first call: vLLM's worker cannot start in a process that holds it already.
"""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ext.kernels.grown_tree import GrownTree

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.int32]

# Contexts longer than this are not looked up, and merging need not look further.
SORTED_TOKENS = 64

EMPTY = -1


def find(tokens: Tokens, suffixes: Int32, separator: int, context: Int32) -> tuple[int, int, int]:
    """The longest end of ``context`` that occurs in the text, and where.

    Args:
        tokens: uint16 or int32 ``[num_tokens]``, the text.
        suffixes: int32 ``[num_tokens]``, its sorted positions.
        separator: greater than every token id.
        context: int32 ``[length]``, newest last, at most `SORTED_TOKENS`. What stands before an id that is no
            token (negative, or the separator and above) is not looked at.

    Returns:
        ``length, first, last``: the last ``length`` tokens of the context end at exactly the positions
        ``suffixes[first:last]``. All 0 if not even the newest token occurs.
    """
    length, first, last = _compiled("find")(tokens, suffixes, separator, context)
    return length, first, last


def continuations(
    tokens: Tokens,
    suffixes: Int32,
    separator: int,
    first: int,
    last: int,
    before: int,
    total: int,
    rows: Int32,
    start: int,
) -> int:
    """Copy what followed some of the occurrences that `find` returned, evenly spaced over their order.

    Of ``total`` occurrences row ``r`` of ``n`` belongs to number ``(2 r + 1) * total // (2 n)``. This text holds
    the numbers ``before`` to ``before + last - first - 1``; other texts hold the others.

    Args:
        tokens: the text.
        suffixes: its sorted positions.
        separator: ends a continuation.
        first: of this text's occurrences in ``suffixes``.
        last: one behind them.
        before: occurrences in the texts searched before this one.
        total: occurrences in all texts, at least ``num_rows``.
        rows: int32 ``[num_rows, width]``, written to; `EMPTY` behind a continuation's end.
        start: first row not yet written.

    Returns:
        The first row that is still not written: its occurrence lies in a later text.
    """
    return int(
        _compiled("continuations")(tokens, suffixes, separator, first, last, before, total, rows, start)
    )


def grow_tree(
    rows: Int32,
    level: int,
    estimates: Float32,
    shares: Float32,
    evidence: Int32,
    budget: int,
    max_depth: int,
    chain: bool,
) -> GrownTree:
    """Grow a tree of the rows' prefixes: open the newest node, take the most probable of all unopened children.

    A node stands for the rows that begin with its path; their number is its weight. The probability of a child
    is its parent's, times ``estimates[group, depth - 1]`` (at greater depths the last one), where::

        group = (level * num_evidence + e) * num_shares + s
        e = number of evidence bounds below the parent's weight
        s = number of share bounds below (the child's weight / the parent's)

    Of equally probable children the heavier is taken, of equally heavy ones the shallower, then the smaller id.

    Args:
        rows: int32 ``[num_rows, width]`` continuations; `EMPTY` and what is behind it is no node.
        level: class of the length of the match.
        estimates: float32 ``[num_groups, num_depths]``, at most 1; ``num_groups <= 256``.
        shares: float32 ``[num_shares - 1]``, ascending.
        evidence: int32 ``[num_evidence - 1]``, ascending.
        budget: most nodes.
        max_depth: deepest nodes; the root's children have depth 1.
        chain: consider the newest node's children alone.
    """
    tree = GrownTree.of_size(budget)
    count = _compiled("grow_tree")(rows, level, estimates, shares, evidence, max_depth, chain, tree)
    return tree.first(count)


def merge_sorted(tokens: Tokens, separator: int, left: Int32, right: Int32, out: Int32) -> tuple[int, int]:
    """Merge two runs of sorted positions of one text until one of them is used up.

    Args:
        tokens: the text.
        separator: ends the comparison of two positions.
        left: int32 ``[num_left]``, sorted.
        right: int32 ``[num_right]``, sorted; of positions that compare as equal the left one comes first.
        out: int32 ``[num_left + num_right]`` or more, written to.

    Returns:
        How many of the left and of the right run are in ``out`` now.
    """
    num_left, num_right = _compiled("merge_sorted")(tokens, separator, left, right, out)
    return num_left, num_right


@functools.cache
def _compiled(name: str) -> Any:
    from vllm_ext.kernels import suffix_array_numba

    return suffix_array_numba.compiled(name)
