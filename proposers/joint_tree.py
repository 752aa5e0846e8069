# SPDX-License-Identifier: Apache-2.0
"""The tree of a draft that knows what others have proposed: it goes on below their nodes, and rests where they know.

Others' nodes are there before the first pass. The draft is asked below the likeliest nodes of all; what a pass may gain
is the chance that the text comes to one of them and does not go on as the others say. Where they are sure, it gains
little, and no pass takes place; see `sampled.grow`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from vllm_ext.kernels.sparse import Sparse
from vllm_ext.proposers.base import Request
from vllm_ext.proposers.draft_model import DraftModelProposer
from vllm_ext.proposers.likeliest_tree import LikeliestTree
from vllm_ext.proposers.sampled import ASKED_PER_NODE, ROOT, TreeBuilder, largest, share
from vllm_ext.proposers.tree import DraftTree

FADE = 0.98  # of evidence, a step
TRUST = 8.0  # reach's worth of it that FIRST of it is accepted, and said by no other
FIRST = 0.6
OWN_TRUST = 3.0  # reach's worth of what is known of all requests, where one has evidence of its own
LEAST = 0.01  # with less a node of others is none of the draft's own
UNSAID = 1e-6  # of such a node that has some of its own below


class PassGain:
    """What passes of a draft have brought that others had not: learnt from what became of them.

    A pass is expected to bring `JointTree.reach`; what it brought is one where the text came to a node of its depth
    that no other had proposed. Of all requests that fades, so that what did not pay is tried again; what a request has
    shown itself does not.
    """

    def __init__(self) -> None:
        self._reach = self._hits = 0.0
        self._own: dict[str, tuple[float, float]] = {}  # by request, reach and hits
        self._drafted: dict[
            str, tuple[DraftTree, list[float]]
        ] = {}  # by request, what others said, reach by pass

    @property
    def given(self) -> float:
        """Tokens for each of reach."""
        return (self._hits + TRUST * FIRST) / (self._reach + TRUST)

    def given_to(self, request_id: str) -> float:
        """Tokens for each of reach, of one request."""
        reach, hits = self._own.get(request_id, (0.0, 0.0))
        return (hits + OWN_TRUST * self.given) / (reach + OWN_TRUST)

    def drafted(self, request_id: str, others: DraftTree, reach: Sequence[float]) -> None:
        """A request has a tree.

        Args:
            request_id: whose.
            others: what was proposed without the draft.
            reach: of each of its passes.
        """
        self._drafted[request_id] = others, list(reach)

    def judge(self, request_ids: Sequence[str], emitted: Sequence[Sequence[int]]) -> None:
        """Learn from a verified step.

        Args:
            request_ids: the batch.
            emitted: by request its tokens, those accepted and one more; none where it had no step.
        """
        self._reach *= FADE
        self._hits *= FADE
        for name, tokens in zip(request_ids, emitted, strict=True):
            others, reach = self._drafted.pop(name, (None, []))
            if others is not None and tokens:
                hits = max(min(len(reach), len(tokens) - 1) - len(others.path(tokens)), 0)
                self._reach += sum(reach)
                self._hits += hits
                before = self._own.get(name, (0.0, 0.0))
                self._own[name] = FADE * before[0] + sum(reach), FADE * before[1] + hits

    def forget(self, request_id: str) -> None:
        """A request is gone."""
        self._drafted.pop(request_id, None)
        self._own.pop(request_id, None)


def unsaid(others: DraftTree) -> float:
    """The chance that the next token is none of those that others say."""
    return max(1.0 - float(others.probabilities[others.parents == ROOT].sum()), 0.0)


class JointTree(LikeliestTree):
    """A tree that is chosen, beside another.

    Args:
        num_nodes: most nodes of the draft's own.
        max_depth: deepest nodes.
        others: the other tree, with the chances of its paths.
        given: tokens for each of reach, see `PassGain`.
        asked_per_node: as in `LikeliestTree`.
    """

    def __init__(
        self,
        num_nodes: int,
        max_depth: int,
        others: DraftTree,
        given: float = 1.0,
        asked_per_node: int = ASKED_PER_NODE,
    ) -> None:
        super().__init__(num_nodes, max_depth, asked_per_node)
        self._given = given
        self._own: dict[
            int, float
        ] = {}  # by node that the draft was asked about, what it gives it after its parent
        self._place: dict[tuple[int, int], int] = {}  # by parent and token
        self._told: dict[int, float] = {}  # by node, the chance that the text goes on as the others say
        rows = zip(
            others.tokens.tolist(), others.parents.tolist(), others.probabilities.tolist(), strict=True
        )
        for token, parent, chance in rows:
            self._place[parent, token] = self.add(token, parent)
            self.values.append(chance)
            above = self.values[parent] if parent != ROOT else 1.0
            self._told[parent] = self._told.get(parent, 0.0) + (chance / above if above > 0.0 else 0.0)

    def give(self, rows: Sequence[Sparse]) -> None:
        """See `TreeBuilder.give`."""
        asked = self._wanted
        for node, row in zip(asked, rows, strict=True):
            self.q[node] = row
            above = self.values[node] if node != ROOT else 1.0
            order = np.lexsort((row.ids, -row.q))
            least = self._least_kept()
            for token, q in zip(row.ids[order].tolist(), row.q[order].tolist(), strict=True):
                child = self._place.get((node, token))
                if child is None:
                    if above * q <= least:
                        continue
                    child = self._place[node, token] = self.add(token, node)
                    self.values.append(0.0)
                self.values[child] = max(self.values[child], above * q)
                self._own[child] = q
        # What is not among the best now is not in the tree, and nothing below it.
        best = [
            node
            for node in largest(self.values, self._num_nodes)
            if self.parents[node] in self.q and node not in self.q
        ]
        if not best or self.depth(asked[0]) + 1 >= self._max_depth:
            best = []
        self._wanted = best[: share(self._room)]
        self._room -= len(self._wanted)

    def reach(self) -> float:
        """See `TreeBuilder.reach`: what is said better by others does not count; in tokens that it will bring."""
        unsaid = sum(self.values[node] * max(1.0 - self._told.get(node, 0.0), 0.0) for node in self._wanted)
        return self._given * unsaid

    def kept(self) -> list[int]:
        """The draft's own nodes, and of others' those that have some of it below."""
        own = [node for node in largest(self.values, len(self.values)) if self._own.get(node, 0.0) >= LEAST]
        kept: set[int] = set()
        for node in own:
            path = [node]
            while self.parents[path[-1]] != ROOT and self.parents[path[-1]] not in kept:
                path.append(self.parents[path[-1]])
            if len(kept) + len(path) <= self._num_nodes:
                kept.update(path)
        return sorted(kept)

    def tree(self) -> DraftTree:
        """The finished tree; its probabilities are the paths', by the draft alone."""
        kept = self.kept()
        chances: dict[int, float] = {ROOT: 1.0}
        for node in kept:
            chances[node] = chances[self.parents[node]] * max(self._own.get(node, 0.0), UNSAID)
        kept.sort(key=lambda node: (-chances[node], node))
        place = {ROOT: ROOT} | {node: index for index, node in enumerate(kept)}
        return DraftTree(
            np.array([self.tokens[node] for node in kept], np.int32),
            np.array([place[self.parents[node]] for node in kept], np.int32),
            np.array([chances[node] for node in kept], np.float32),
        )


class JointProposer(DraftModelProposer):
    """A draft that is asked node by node: in a hybrid it goes on below what the other drafters say."""

    fuses: ClassVar[bool] = True
    in_rounds: ClassVar[bool] = True
    asked_per_node: ClassVar[int] = ASKED_PER_NODE
    # Set by a hybrid, by request id: what its other drafters propose, and what passes have been worth.
    beside: Mapping[str, DraftTree] = {}
    given: Mapping[str, float] = {}

    def _builder(self, request: Request) -> TreeBuilder:
        others = self.beside.get(request.request_id)
        if others is None or request.chain:
            return super()._builder(request)
        given = self.given[request.request_id]
        return JointTree(*self.limits(request), others, given, self.asked_per_node)
