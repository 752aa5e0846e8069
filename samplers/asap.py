# SPDX-License-Identifier: Apache-2.0
"""Grammar-aligned decoding (ASAp): samples of the model *given* that it obeys the grammar.

A mask renormalises ``p`` step by step, and so prefers prefixes that look likely and then leave the model nothing it
would say. The model's own law under the grammar weighs each token by the chance that the model goes on to obey it. That
chance is learnt here from above: of what was never looked at it is taken to be 1, and each row that was computed says
how much of ``p`` the grammar leaves, which is passed on to all prefixes above. So the first sample is plain constrained
decoding, and the law of later ones approaches the model's conditional.

Source: "Grammar-Aligned Decoding", arXiv 2405.21047, algorithm 1. Added: a bound on memory. A prefix that is forgotten
leaves its parent what it has said, and tokens beyond the likeliest of a prefix are taken for ones that lead on; both
are upper bounds still.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_ext.kernels.learned_arrays import Learned, check_array
from vllm_ext.kernels.sparse import Float64, Int32

ENTRY_BYTES = 20
PREFIX_BYTES = 800  # besides its entries: an object, three arrays, a dict
EXACT = 1e-9  # what sums of probabilities may be beside 1
MOST = (
    256  # tokens of a prefix that are learnt about: in a JSON string nearly the whole vocabulary is allowed
)


@dataclass(slots=True, eq=False)
class _Prefix:
    ids: Int32  # [kept] allowed tokens, ascending
    p: Float64  # [kept] their probabilities; the whole vocabulary's add up to 1
    future: Float64  # [kept] upper bounds of the chance that the model obeys the grammar behind each
    rest: float  # probability of the allowed tokens that are not kept
    parent: _Prefix | None
    place: int  # among the parent's tokens
    below: dict[int, _Prefix] = field(default_factory=dict)  # by place

    @property
    def bound(self) -> float:
        """Of the chance that the model obeys the grammar behind it."""
        return float(self.p @ self.future) + self.rest


class ExpectedFuture:
    """What is known of one prompt under one grammar, over all its samples.

    Args:
        max_bytes: most of what is kept, `PREFIX_BYTES` for a prefix and `ENTRY_BYTES` for each of its tokens; prefixes
            that were not used for longest go first, those above the others never before them.
    """

    ARRAYS = ("parent", "place", "count", "rest", "ids", "p", "future")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_entries = 0
        self._root: _Prefix | None = None
        self._used: dict[_Prefix, None] = {}  # the least recently used first

    def __len__(self) -> int:
        return self._num_entries

    @property
    def num_bytes(self) -> int:
        """What is kept, nearly."""
        return PREFIX_BYTES * len(self._used) + ENTRY_BYTES * self._num_entries

    @property
    def bound(self) -> float:
        """Upper bound of the chance that the model obeys the grammar at all."""
        return 1.0 if self._root is None else self._root.bound

    def chances(self, prefix: Sequence[int], ids: Int32, p: Float64) -> Float64:
        """What to weigh the next token's probabilities by, and to learn from the row.

        Args:
            prefix: tokens since the prompt's end.
            ids: int32 ``[allowed]``, ascending; the same each time for the same prefix.
            p: float64 ``[allowed]``, the model's probabilities of these tokens, before any mask, penalty or truncation.

        Returns:
            float64 ``[allowed]``, upper bounds of the chance that the model obeys the grammar behind each; the law of
            the next token is in proportion to ``p`` times them. All 0 where the grammar has no way on.
        """
        result = np.ones(len(ids))
        found = self._find(prefix, ids, p)
        if found is not None:  # else something above it was forgotten, or never looked at
            self._touch(found)
            result[np.searchsorted(ids, found.ids)] = found.future
            self._forget()
        return result

    def state_dict(self) -> dict[str, Learned]:
        """Copies of `ARRAYS`: of each prefix, behind the one above it; then those of all their tokens."""
        order = [] if self._root is None else [self._root]
        number: dict[_Prefix | None, int] = {None: -1}
        for node in order:  # it grows
            number[node] = len(number) - 1
            order.extend(node.below.values())
        return {
            "parent": np.array([number[node.parent] for node in order], dtype=np.int32),
            "place": np.array([node.place for node in order], dtype=np.int32),
            "count": np.array([len(node.ids) for node in order], dtype=np.int32),
            "rest": np.array([node.rest for node in order], dtype=np.float64),
            "ids": np.concatenate([np.empty(0, np.int32), *(node.ids for node in order)]),
            "p": np.concatenate([np.empty(0), *(node.p for node in order)]),
            "future": np.concatenate([np.empty(0), *(node.future for node in order)]),
        }

    @classmethod
    def restored(cls, max_bytes: int, arrays: Mapping[str, Learned], vocab_size: int) -> ExpectedFuture:
        """One that knows what `state_dict` has given.

        Raises:
            ValueError: these can be no such arrays.
        """
        count = arrays["count"]
        check_array("count", count, (None,), np.int32, 0, MOST)
        size, total = len(count), int(count.sum())
        check_array("parent", arrays["parent"], (size,), np.int32, -1, size)
        check_array("place", arrays["place"], (size,), np.int32, -1, MOST)
        check_array("rest", arrays["rest"], (size,), np.float64, 0.0, 1.0 + EXACT)
        check_array("ids", arrays["ids"], (total,), np.int32, 0, vocab_size - 1)
        check_array("p", arrays["p"], (total,), np.float64, 0.0, 1.0 + EXACT)
        check_array("future", arrays["future"], (total,), np.float64, 0.0, 1.0 + EXACT)
        result = cls(max_bytes)
        nodes: list[_Prefix] = []
        ends = np.cumsum(count).tolist()
        for number, (above, place, end) in enumerate(
            zip(arrays["parent"].tolist(), arrays["place"].tolist(), ends, strict=True)
        ):
            part = slice(end - int(count[number]), end)
            ids = arrays["ids"][part].copy()
            if (np.diff(ids) <= 0).any():
                raise ValueError("ids has a prefix whose tokens do not ascend")
            if (above < 0) != (number == 0) or above >= number:
                raise ValueError(f"parent[{number}]={above} is not above it")
            parent = None if above < 0 else nodes[above]
            if parent is not None and (not 0 <= place < len(parent.ids) or place in parent.below):
                raise ValueError(f"place[{number}]={place} is none of its parent's, or another's too")
            node = _Prefix(
                ids,
                arrays["p"][part].copy(),
                arrays["future"][part].copy(),
                float(arrays["rest"][number]),
                parent,
                place,
            )
            if parent is None:
                result._root = node
            else:
                parent.below[place] = node
            nodes.append(node)
        result._num_entries = total
        # Those above behind those below, as `_touch` leaves them.
        result._used = dict.fromkeys(reversed(nodes))
        result._forget()
        return result

    def _find(self, prefix: Sequence[int], ids: Int32, p: Float64) -> _Prefix | None:
        """The prefix, made if there is what is above it."""
        node, parent, place = self._root, None, -1
        for depth, token in enumerate(prefix):
            if node is None:
                return None
            place = int(np.searchsorted(node.ids, token))
            if place == len(node.ids) or node.ids[place] != token:
                if node.rest > 0.0:
                    return None
                raise ValueError(f"prefix[{depth}]={token} was not allowed there")
            node, parent = node.below.get(place), node
        if node is None:
            kept, rest = np.arange(len(ids)), 0.0
            if len(ids) > MOST:
                kept = np.sort(np.argpartition(p, -MOST)[-MOST:])
                rest = float(np.delete(p, kept).sum())
            node = _Prefix(ids[kept], p[kept], np.ones(len(kept)), rest, parent, place)
            self._num_entries += len(kept)
            if parent is None:
                self._root = node
            else:
                parent.below[place] = node
            self._pass_on(node)
        return node

    def _pass_on(self, node: _Prefix) -> None:
        """Tell all prefixes above what is now known."""
        while node.parent is not None:
            bound = node.bound
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
        while self.num_bytes > self._max_bytes:
            node = next(iter(self._used))
            del self._used[node]
            assert not node.below
            self._num_entries -= len(node.ids)
            if node.parent is None:
                self._root = None
            else:
                del node.parent.below[node.place]
