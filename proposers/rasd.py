# SPDX-License-Identifier: Apache-2.0
"""RASD: what was retrieved, as far as the draft model finds its first token plausible, fused with the draft's tree.

Retrieved continuations are a tree with the shares of their counts. Those whose first token is not among the draft's
likeliest at the root are pruned; the others are ranked by the draft's chance of that token times their share, and cut
to a budget of their own. What is left is joined to the draft's tree along the longest common prefix. Neither displaces
the other: a node of both is the draft's, what retrieval leaves is the draft's too, and without any so is the tree.

Source: "RASD: Retrieval-Augmented Speculative Decoding", arXiv 2503.03434. Its code is not public. Uncertain, and ours:
all constants (``first_k``, ``first_eps``, ``retrieval_share``, ``max_continuation``).

Deviations:

- A share is not a count's but what the retriever has learnt of it: the chance that a node is accepted.
- Retrieved nodes that the draft's likeliest ones hold already do not count against retrieval's budget.
- All requests have chosen nodes, verified by the target's own draws (`tree_walk`): retrieved ones were not drawn.
- The fused nodes are put in order by what each set of drafters was worth so far, as in `hybrid`, for budgets to cut.
- The draft is asked where a pass pays beside what was retrieved, as in `hybrid`; elsewhere nothing is pruned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator

from vllm_ext.kernels.sparse import Sparse
from vllm_ext.kernels.user_paths import UserPath
from vllm_ext.proposers.base import Proposer, Request
from vllm_ext.proposers.draft_model import DraftModelProposer, PassOptions
from vllm_ext.proposers.hybrid import Hybrid
from vllm_ext.proposers.joint_tree import unsaid
from vllm_ext.proposers.tree import DraftTree, Int32

MOST_KNOWN = 32  # of the draft's distributions, tokens


class RasdOptions(PassOptions):
    """Options of ``rasd``."""

    draft: Literal["dyspec", "eagle_tree", "clover_tree"] = Field(
        default="dyspec", description="the method that drafts with passes of the model"
    )
    model: UserPath = Field(min_length=1, description="that method's: a draft model, or heads")
    datastore: UserPath | None = Field(
        default=None, min_length=1, description="also retrieve from this folder, as method rest does"
    )
    retrieval: list[Literal["suffix_tree", "input_copy"]] = Field(
        default=["suffix_tree"],
        max_length=2,
        validate_default=True,
        description="methods that retrieve from prompts and answers; none: from the datastore alone",
    )
    retrieval_share: float = Field(
        default=0.5, gt=0.0, le=1.0, description="most nodes of the tree that are retrieval's, of all"
    )
    first_k: int | None = Field(
        default=MOST_KNOWN,
        ge=1,
        le=MOST_KNOWN,
        description="what was retrieved must begin with one of so many tokens that the draft finds likeliest; "
        "none: with any",
    )
    first_eps: float | None = Field(
        default=None, gt=0.0, le=1.0, description="or with one that the draft gives at least this chance"
    )
    max_continuation: int = Field(default=12, ge=1, le=32, description="most tokens that are retrieved")

    @field_validator("retrieval")
    @classmethod
    def _something(cls, retrieval: list[str], info: Any) -> list[str]:
        if not retrieval and info.data.get("datastore") is None:
            raise ValueError(
                "nothing is retrieved; name 'suffix_tree' or 'input_copy', or give a datastore. "
                "Without retrieval it is the method of `draft`"
            )
        if len(set(retrieval)) < len(retrieval):
            raise ValueError("a method is there more than once; name each once")
        return retrieval

    @property
    def drafters(self) -> list[dict[str, Any] | str]:
        """As `HybridOptions.drafters`: the draft, then what retrieves."""
        draft: dict[str, Any] = {"method": self.draft, "model": self.model, "max_depth": self.max_depth}
        if self.datastore is None:
            return [draft, *self.retrieval]
        rest = {
            "method": "rest",
            "datastore": self.datastore,
            "max_continuation": self.max_continuation,
        }
        return [draft, rest, *self.retrieval]


def first_tokens(tree: DraftTree) -> Int32:
    """int32 ``[num_nodes]``: the token of each node's ancestor below the root, or its own."""
    first = tree.tokens.copy()
    for node, parent in enumerate(tree.parents.tolist()):
        if parent >= 0:
            first[node] = first[parent]
    return first


def pruned(tree: DraftTree, q: Sparse, first_k: int | None, first_eps: float | None) -> DraftTree:
    """The paths whose first token is plausible to the draft.

    Args:
        tree: what was retrieved.
        q: the draft's distribution after the root.
        first_k: plausible are so many of its likeliest tokens; of equals those of the smaller id. None: all.
        first_eps: and those of at least this chance, if it is given.
    """
    if first_k is None:
        return tree
    order = np.lexsort((q.ids, -q.q))
    plausible = np.arange(len(order)) < first_k
    if first_eps is not None:
        plausible |= q.q[order] >= first_eps
    return tree.where(np.isin(first_tokens(tree), q.ids[order[plausible]]))


def cut(tree: DraftTree, q: Sparse, beside: DraftTree, num_nodes: int) -> DraftTree:
    """The nodes of the largest share times the draft's chance of their first token.

    Args:
        tree: what was retrieved, pruned; its probabilities are the shares.
        q: the draft's distribution after the root; what it does not know has the least chance that is known.
        beside: another tree, whose nodes do not count.
        num_nodes: most nodes that count.
    """
    chance = dict(zip(q.ids.tolist(), q.q.tolist(), strict=True))
    least = q.q.min()
    worth = tree.probabilities * np.array([chance.get(token, least) for token in first_tokens(tree).tolist()])
    best = np.argsort(-worth, kind="stable")  # parents before their children
    new = common_nodes(beside, tree)[best] == len(beside)
    kept: npt.NDArray[np.bool_] = np.zeros(len(tree), np.bool_)
    kept[best[~new | (np.cumsum(new) <= num_nodes)]] = True
    return tree.where(kept)


def common_nodes(tree: DraftTree, other: DraftTree) -> Int32:
    """int32 ``[len(other)]``: the node of ``tree`` with the same tokens from the root; ``len(tree)`` where none is."""
    place = {
        key: node for node, key in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    }
    found: list[int] = []
    for parent, token in zip(other.parents.tolist(), other.tokens.tolist(), strict=True):
        found.append(place.get((found[parent] if parent >= 0 else -1, token), len(tree)))
    return np.array(found, np.int32)


def room_beside(tree: DraftTree, other: DraftTree, num_nodes: int) -> int:
    """How many of the tree's first nodes there may be for their union with ``other`` to have ``num_nodes`` at most."""
    sizes = np.arange(len(tree) + 1)
    union = sizes + (common_nodes(tree, other)[None, :] >= sizes[:, None]).sum(axis=1)
    return int(np.flatnonzero(union <= num_nodes)[-1])


class Rasd(Hybrid):
    """A draft's tree and what was retrieved.

    Args:
        drafters: the draft, and up to three that retrieve.
        retrieval_share: most of a tree's nodes that are theirs, 0 to 1.
        first_k: see `pruned`.
        first_eps: likewise.
        max_continuation: deepest node that is retrieved.
    """

    on_v2 = None
    why_v1: ClassVar[str] = "prunes what was retrieved on the host, by the draft's first distribution"
    fuses: ClassVar[bool] = False
    summary: ClassVar[str] = "a draft's tree, and what was retrieved that it finds likely"
    paper: ClassVar[str] = "arXiv 2503.03434"
    Options: ClassVar[type[PassOptions]] = RasdOptions
    tested_with: ClassVar[dict[str, Any]] = {"model": "self"}

    def __init__(
        self,
        drafters: Sequence[Proposer],
        retrieval_share: float = 0.5,
        first_k: int | None = MOST_KNOWN,
        first_eps: float | None = None,
        max_continuation: int = 12,
    ) -> None:
        super().__init__(drafters)
        draft, *self.retrieval = drafters
        assert isinstance(draft, DraftModelProposer)
        self.draft = draft
        self._share, self._first, self._longest = retrieval_share, (first_k, first_eps), max_continuation

    @classmethod
    def from_options(cls, options: RasdOptions, vocab_size: int) -> Rasd:
        """See `Proposer.from_options`."""
        return cls(
            Hybrid.from_options(options, vocab_size).drafters,
            options.retrieval_share,
            options.first_k,
            options.first_eps,
            options.max_continuation,
        )

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The draft's trees, and below their roots what was retrieved."""
        # More than there is room for, as some will be pruned.
        wanted = [
            replace(each, budget_tokens=2 * each.budget_tokens, max_depth=min(each.max_depth, self._longest))
            for each in requests
        ]
        found = [drafter.propose(wanted) for drafter in self.retrieval]
        none = [DraftTree.empty() for _ in requests]
        drafted = self._drafted(requests, self._others(requests, [none, *found]))
        fused = []
        for request, own, *retrieved in zip(requests, drafted, *found, strict=True):
            tree = self._fuse(request, self._joined(request, own, retrieved))
            self.calibration.drafted(request.request_id, tree)
            fused.append(DraftTree(*tree[:3]))
        return fused

    def _drafted(self, requests: Sequence[Request], others: Mapping[str, DraftTree]) -> list[DraftTree]:
        """The draft's trees; none where a pass brings less, beside what was retrieved, than it costs."""
        worth = self._paying(requests, others)
        most = max(worth.values(), default=0.0)
        self.draft.least_reach = self.least_reach / most if most > 0.0 else self.least_reach
        trees = self._ask(self.draft, requests, worth.keys())
        for name in worth.keys() & self.draft.first.keys():
            reach = [unsaid(others[name]) * chance for chance in (1.0, *self.draft.reached[name])]
            self.gain.drafted(name, others[name], reach)
        return trees

    def _joined(
        self, request: Request, own: DraftTree, retrieved: Sequence[DraftTree]
    ) -> tuple[DraftTree, DraftTree]:
        """What of the draft's tree and of what was retrieved is in the request's tree, whole."""
        nodes = max(request.budget_tokens, 0)
        union = DraftTree.merge(retrieved, sum(map(len, retrieved)))
        q = self.draft.first.get(request.request_id)
        if q is None:
            return own, union.prefix(nodes)
        most = int(self._share * nodes)
        kept = cut(pruned(union, q, *self._first), q, own.prefix(nodes - most), most)
        return own.prefix(room_beside(own, kept, nodes)), kept
