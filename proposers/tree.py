# SPDX-License-Identifier: Apache-2.0
"""The draft tree: what proposers return, budgets cut and verifiers walk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ext.kernels.sparse import Sparse

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


def num_ancestors(parents: Int32) -> Int32:
    """int32 ``[num_nodes]``: how many ancestors each node has.

    Args:
        parents: int32 ``[num_nodes]`` of a forest, each smaller than the node's own index; -1 for none.
    """
    above: list[int] = []
    for parent in parents.tolist():
        above.append(0 if parent < 0 else above[parent] + 1)
    return np.array(above, dtype=np.int32)


def path_below(above: int, tokens: Int32, parents: Int32, wanted: Iterable[int]) -> list[int]:
    """The nodes below one, each the child of the last, that the first of the wanted tokens are.

    Args:
        above: a node; -1 is the root.
        tokens: int32 ``[num_nodes]``.
        parents: int32 ``[num_nodes]``.
        wanted: one a depth.
    """
    nodes: list[int] = []
    for token in wanted:
        below = np.flatnonzero((parents == above) & (tokens == token))
        if not len(below):
            break
        above = int(below[0])
        nodes.append(above)
    return nodes


@dataclass(frozen=True, slots=True)
class SampledDrafts:
    """What the verifier of a tree must know whose tokens were drawn from the draft's distributions."""

    q: Mapping[
        int, Sparse
    ]  # by node that has children, -1 for the root: what the first of them was drawn from
    # int32 [k, length], the nodes of k drafts drawn independently; None where siblings are without replacement, in the
    # order they were drawn.
    drafts: Int32 | None = None


class ReadAgain(NamedTuple):
    """Of a chain whose last nodes are scratch: what they are for (`reflection`)."""

    num_drafts: int  # the nodes before them
    weight: float  # of what the target says of their second copy, which the last nodes are


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft nodes below the root (the last committed token, which is not a node).

    Nodes stand in descending order of path probability. A node's path probability is at most its parent's,
    so the order is topological: every prefix is a tree, and the best one of its size. A scheduler that
    truncates the flat list therefore does no harm.
    """

    tokens: Int32  # [num_nodes] token ids
    parents: Int32  # [num_nodes] index of the parent node, always smaller than the node's own; -1 is the root
    # [num_nodes] estimate of the chance that the node is accepted, with all its ancestors; descending
    probabilities: Float32
    drawn: SampledDrafts | None = None  # None: the nodes were chosen, by whatever rule
    # bool [num_nodes] of a chain: which nodes are taken without asking the target (`sure_text`); None: none of them
    sure: npt.NDArray[np.bool_] | None = None
    again: ReadAgain | None = None  # None: all nodes are drafts

    def __len__(self) -> int:
        return len(self.tokens)

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The nodes, from the root down, that the first of the tokens are, until one has no node."""
        return path_below(-1, self.tokens, self.parents, tokens)

    @classmethod
    def empty(cls) -> DraftTree:
        """The tree without nodes."""
        return cls(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))

    @classmethod
    def chain(cls, tokens: Int32, probabilities: Float32) -> DraftTree:
        """The tree in which each node follows the one before it.

        Args:
            tokens: int32 ``[num_nodes]``.
            probabilities: float32 ``[num_nodes]`` path probabilities, descending.
        """
        return cls(tokens, np.arange(-1, len(tokens) - 1, dtype=np.int32), probabilities)

    @classmethod
    def from_nodes(cls, tokens: Int32, parents: Int32, probabilities: Float32) -> DraftTree:
        """The tree of nodes given in any order, a parent possibly behind its children.

        A node more probable than one of its ancestors is lowered to that. Equal nodes stand by depth, then
        as given.

        Args:
            tokens: int32 ``[num_nodes]``; siblings are distinct.
            parents: int32 ``[num_nodes]`` indices into these arrays; -1 is the root.
            probabilities: float32 ``[num_nodes]`` path probabilities.

        Raises:
            ValueError: a parent is out of range, or a node its own ancestor.
        """
        num_nodes = len(parents)
        out_of_range = (parents < -1) | (parents >= num_nodes)
        if out_of_range.any():
            raise ValueError(f"parents[{out_of_range.argmax()}]={parents[out_of_range.argmax()]} is no node")
        capped = np.array(probabilities, dtype=np.float32)
        depths = np.ones(num_nodes, dtype=np.int32)
        ancestors = np.array(parents, dtype=np.int32)
        while (below := np.flatnonzero(ancestors >= 0)).size:
            above = ancestors[below]
            capped[below] = np.minimum(capped[below], probabilities[above])
            depths[below] += 1
            ancestors[below] = parents[above]
            if depths[below[0]] > num_nodes:
                raise ValueError(f"parents[{below[0]}]={parents[below[0]]}: the node is its own ancestor")
        order = np.lexsort((depths, -capped))  # stable
        position = np.empty(num_nodes + 1, dtype=np.int32)
        position[order] = np.arange(num_nodes)
        position[-1] = -1  # what the root's index -1 reads
        return cls(tokens[order], position[parents[order]], capped[order])

    @classmethod
    def merge(cls, trees: Sequence[DraftTree], num_nodes: int) -> DraftTree:
        """The best ``num_nodes`` nodes of the union of several trees below one root.

        Nodes with the same tokens from the root are one node, whose probability is the largest of theirs. Of
        equally probable nodes of equal depth the one of the earlier tree stands first.

        Source: the fusion of RASD, arXiv 2503.03434. Taking the maximum is ours.
        """
        nodes: dict[tuple[int, int], int] = {}  # (parent, token) in the union to index in the union
        parents: list[int] = []
        tokens: list[int] = []
        probabilities: list[float] = []
        for tree in trees:
            merged: list[int] = []  # index in the union of each of the tree's nodes
            for token, parent, probability in zip(
                tree.tokens.tolist(), tree.parents.tolist(), tree.probabilities.tolist(), strict=True
            ):
                above = -1 if parent < 0 else merged[parent]
                node = nodes.setdefault((above, token), len(tokens))
                if node == len(tokens):
                    parents.append(above)
                    tokens.append(token)
                    probabilities.append(probability)
                elif probability > probabilities[node]:
                    probabilities[node] = probability
                merged.append(node)
        union = cls.from_nodes(
            np.array(tokens, np.int32), np.array(parents, np.int32), np.array(probabilities, np.float32)
        )
        return union.prefix(num_nodes)

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before it; true of the empty tree."""
        return bool((self.parents == np.arange(-1, len(self.parents) - 1)).all())

    def prefix(self, num_nodes: int) -> DraftTree:
        """The best subtree of at most ``num_nodes`` nodes. Views, no copy.

        Of independent drafts a part is no smaller set of them: they are whole or not to be verified.
        """
        num_nodes = max(num_nodes, 0)
        return DraftTree(
            self.tokens[:num_nodes],
            self.parents[:num_nodes],
            self.probabilities[:num_nodes],
            self.drawn,
            None if self.sure is None else self.sure[:num_nodes],
            self.again,
        )

    def where(self, kept: npt.NDArray[np.bool_]) -> DraftTree:
        """The tree of some of the nodes; not of drawn ones, of which a part has another distribution.

        Args:
            kept: bool ``[num_nodes]``; with a node its parent is kept too.
        """
        if kept.all():
            return self
        position = np.append(np.cumsum(kept, dtype=np.int32) - 1, np.int32(-1))  # the last is the root's
        return DraftTree(self.tokens[kept], position[self.parents[kept]], self.probabilities[kept])

    def depths(self) -> Int32:
        """int32 ``[num_nodes]``: how far below the root each node is; the root's children have 1."""
        return num_ancestors(self.parents) + 1

    def best_chain(self) -> DraftTree:
        """From the root always the most probable child, down to a leaf."""
        nodes = []
        last = -1
        for node, parent in enumerate(self.parents.tolist()):
            if parent == last:  # the first child is the most probable one
                nodes.append(node)
                last = node
        return DraftTree.chain(self.tokens[nodes], self.probabilities[nodes])

    def validate(self) -> None:
        """Check what the class promises; for tests, and for trees that come from code one does not know.

        Raises:
            ValueError: the message names the field and the value.
        """
        num_nodes = len(self.tokens)
        for name, dtype in (("tokens", np.int32), ("parents", np.int32), ("probabilities", np.float32)):
            values = getattr(self, name)
            if values.dtype != dtype or values.shape != (num_nodes,):
                raise ValueError(
                    f"{name} is {values.dtype}{list(values.shape)}; expected {np.dtype(dtype)}[{num_nodes}]"
                )
        index = np.arange(num_nodes, dtype=np.int32)
        self._check("tokens", self.tokens >= 0, "a token id is at least 0")
        above = (self.parents >= -1) & (self.parents < index)
        self._check("parents", above, "a parent stands before its node")
        # Written so that NaN fails.
        self._check("probabilities", (self.probabilities >= 0) & (self.probabilities <= 1), "between 0 and 1")
        # With the order of the parents this is also "at most the parent's".
        self._check(
            "probabilities", self.probabilities <= np.roll(self.probabilities, 1) + (index == 0), "descending"
        )
        _, first = np.unique(self.parents.astype(np.int64) << 32 | self.tokens, return_index=True)
        distinct = np.zeros(num_nodes, dtype=np.bool_)
        distinct[first] = True
        self._check("tokens", distinct, "siblings are distinct")

    def _check(self, field: str, good: npt.NDArray[np.bool_], rule: str) -> None:
        if not good.all():
            node = int(good.argmin())
            raise ValueError(f"{field}[{node}]={getattr(self, field)[node]} breaks the rule: {rule}")
