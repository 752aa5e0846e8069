# SPDX-License-Identifier: Apache-2.0
"""Grammar-aligned decoding (ASAp): samples of the model *given* that it obeys the grammar.

A mask renormalises ``p`` step by step, and so prefers prefixes that look likely and then leave the model nothing it
would say. The model's own law under the grammar weighs each token by the chance that the model goes on to obey it. That
chance is learnt here from above: of what was never looked at it is taken to be 1, and each row that was computed says
how much of ``p`` the grammar leaves, which is passed on to all prefixes above. So the first sample is plain constrained
decoding, and the law of later ones approaches the model's conditional.

Source: "Grammar-Aligned Decoding", arXiv 2405.21047, algorithm 1. Added: a bound on memory. A prefix that is forgotten
leaves its parent what it has said, which stays an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_ext.kernels.sparse import Float64, Int32


@dataclass(slots=True, eq=False)
class _Prefix:
    ids: Int32  # [allowed] tokens, ascending
    p: Float64  # [allowed] their probabilities; the whole vocabulary's add up to 1
    future: Float64  # [allowed] upper bounds of the chance that the model obeys the grammar behind each
    parent: _Prefix | None
    place: int  # among the parent's tokens
    below: dict[int, _Prefix] = field(default_factory=dict)  # by place


class ExpectedFuture:
    """What is known of one prompt under one grammar, over all its samples.

    Args:
        max_entries: most (prefix, allowed token) pairs that are kept, 20 bytes each; prefixes that were not used for
            longest go first, those above the others never before them.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        self._root: _Prefix | None = None
        self._used: dict[_Prefix, None] = {}  # the least recently used first

    def __len__(self) -> int:
        return self._num_entries

    @property
    def bound(self) -> float:
        """Upper bound of the chance that the model obeys the grammar at all."""
        return 1.0 if self._root is None else float(self._root.p @ self._root.future)

    def weights(self, prefix: Sequence[int], ids: Int32, p: Float64) -> Float64:
        """What to sample the next token by, and to learn from the row.

        Args:
            prefix: tokens since the prompt's end.
            ids: int32 ``[allowed]``, ascending; the same each time for the same prefix.
            p: float64 ``[allowed]``, the model's probabilities of these tokens, before any mask, penalty or truncation.

        Returns:
            float64 ``[allowed]``, in proportion to the law of the next token; all 0 where the grammar has no way on.
        """
        found = self._find(prefix, ids, p)
        if found is None:
            return p.copy()  # above it something was forgotten, or never looked at
        self._touch(found)
        result = found.p * found.future
        self._forget()
        return result

    def _find(self, prefix: Sequence[int], ids: Int32, p: Float64) -> _Prefix | None:
        """The prefix, made if there is what is above it."""
        node, parent, place = self._root, None, -1
        for depth, token in enumerate(prefix):
            if node is None:
                return None
            place = int(np.searchsorted(node.ids, token))
            if place == len(node.ids) or node.ids[place] != token:
                raise ValueError(f"prefix[{depth}]={token} was not allowed there")
            node, parent = node.below.get(place), node
        if node is None:
            node = _Prefix(ids.copy(), p.copy(), np.ones(len(ids)), parent, place)
            self._num_entries += len(ids)
            if parent is None:
                self._root = node
            else:
                parent.below[place] = node
            self._pass_on(node)
        return node

    def _pass_on(self, node: _Prefix) -> None:
        """Tell all prefixes above what is now known."""
        while node.parent is not None:
            bound = float(node.p @ node.future)
            # Never up: a prefix that was forgotten and comes again knows less than it did.
            if bound >= node.parent.future[node.place]:
                return
            node.parent.future[node.place] = bound
            node = node.parent

    def _touch(self, node: _Prefix) -> None:
        """From the bottom up, so that the least recently used one has nothing below it."""
        above: _Prefix | None = node
        while above is not None:
            self._used.pop(above, None)
            self._used[above] = None
            above = above.parent

    def _forget(self) -> None:
        while self._num_entries > self._max_entries:
            node = next(iter(self._used))
            del self._used[node]
            assert not node.below
            self._num_entries -= len(node.ids)
            if node.parent is None:
                self._root = None
            else:
                del node.parent.below[node.place]
