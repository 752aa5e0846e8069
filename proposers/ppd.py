# SPDX-License-Identifier: Apache-2.0
"""Parallel prompt decoding: the target guesses the tokens of the next step while it verifies those of this one.

Trained *prompt tokens* stand in rows of the tree, in chains below the nodes that are verified, the *candidates*. What
the target says at the chain below the last accepted node are the guesses for the next step: prompt token ``d`` guesses
depth ``d`` of its tree. No pass of a draft is needed, and no other weights than the prompt tokens' embeddings.

A prompt token is a node whose id lies behind the target's vocabulary. No sampler draws such an id, so that it is never
accepted; and nothing but its own chain attends to it, so that no other row depends on it.

A request's *state* is the number of prompt tokens that stood below its last accepted node: so deep the next tree can
be. A row is spent where it is worth most tokens: on a candidate by the chance that it is accepted, on prompt token
``i`` below a node by the chance that the node is the last accepted one times ``F_i - F_(i-1)``, the tokens that state
``i`` brings over state ``i - 1``. That difference is the chance that depth ``i`` of the next tree is accepted.

Source: "Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of LLM Inference", arXiv 2405.18628,
section 4. Deviations: candidates are the likeliest ones by this step's own probabilities instead of ranks whose
accuracy was measured beforehand; ``F_i - F_(i-1)`` is learnt from the steps themselves; the split between candidates
and prompt tokens is chosen for each tree, by that one step ahead and not by the steady state of fixed trees; how many
rows pay is the budget's (`budget`). No ensembles of several embeddings for one prompt token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from pydantic import Field

from vllm_ext.kernels.sparse import Float64, Sparse
from vllm_ext.kernels.user_paths import UserPath
from vllm_ext.proposers.base import MethodOptions, Proposer, Request, VerifiedRows
from vllm_ext.proposers.draft_model import shaped
from vllm_ext.proposers.medusa import product_tree
from vllm_ext.proposers.tree import DraftTree, Float32, Int32, path_below

MOST_RANKS = 32  # of a guess; also the most of `kernels.top_k`
FADE = 0.99  # of evidence, a step
TRUST = 16.0  # steps' worth of it that a depth is accepted HALF as often as the one above
HALF = 0.5


class PpdOptions(MethodOptions):
    """Options of ``ppd``."""

    model: UserPath = Field(
        min_length=1,
        description="folder or hub name of prompt tokens for the target: `vllm-ext train heads --kind ppd`",
    )
    num_prompt_tokens: int = Field(
        default=3, ge=1, le=8, description="prompt tokens of a chain, and so the deepest candidate"
    )


class Guesses(NamedTuple):
    """What the target said at a chain of prompt tokens."""

    ids: Int32  # [num_depths, verified_top_k] token ids, likeliest first
    log_p: Float32  # [num_depths, verified_top_k] log-probabilities at temperature 1


class Ppd(Proposer):
    """Trees of candidates and prompt tokens.

    Args:
        vocab_size: number of token ids of the target; prompt token ``i`` has the id ``vocab_size + i``.
        num_prompt_tokens: of a chain.
        num_nodes: most rows of a tree, which bounds the ranks that are of use.
    """

    summary: ClassVar[str] = "the target guesses at trained prompt tokens in the tree"
    paper: ClassVar[str] = "arXiv 2405.18628"
    Options: ClassVar[type[MethodOptions]] = PpdOptions
    on_v2 = None
    why_v1 = "needs a target whose embeddings are longer than its vocabulary, which V2 does not load yet"
    verified_log_total: ClassVar[bool] = True
    fuses: ClassVar[bool] = False

    def __init__(self, vocab_size: int, num_prompt_tokens: int, num_nodes: int) -> None:
        self.vocab_size, self._most = vocab_size, num_prompt_tokens
        self.verified_top_k = min(num_nodes, MOST_RANKS, vocab_size)
        self._guesses: dict[str, Guesses] = {}  # by request, for its next tree
        self._depth: dict[str, int] = {}  # by request, of its last tree: the state it was made in
        # By depth: faded steps in a state as deep, and those of them that accepted as many candidates.
        self._trials: Float64 = np.zeros(num_prompt_tokens)
        self._hits: Float64 = np.zeros(num_prompt_tokens)

    @classmethod
    def from_options(cls, options: Any, vocab_size: int) -> Ppd:
        """See `Proposer.from_options`."""
        return cls(vocab_size, options.num_prompt_tokens, options.num_speculative_tokens)

    @property
    def memory_bytes(self) -> int:
        """Counts by depth; the embeddings are the target's."""
        return self._trials.nbytes + self._hits.nbytes

    def reach(self) -> Float64:
        """float64 ``[num_prompt_tokens]`` descending: the chance that a step in such a state accepts so deep a node.

        It is what a prompt token more brings in the step after: ``F_i - F_(i-1)``. Trees count as they were verified:
        what a budget cuts off is not accepted.
        """
        found = np.empty(self._most)
        above = 1.0
        for depth in range(self._most):
            chance = (self._hits[depth] + TRUST * HALF * above) / (self._trials[depth] + TRUST)
            found[depth] = above = min(chance, above)
        return found

    def observe(self, rows: VerifiedRows) -> None:
        """Keep what the target said at the chain below each last accepted node, and how deep trees were right."""
        assert rows.log_total is not None
        judged = False
        for i, (name, emitted) in enumerate(zip(rows.request_ids, rows.emitted, strict=True)):
            own = slice(int(rows.row_start[i]), int(rows.row_start[i + 1]))
            self._guesses.pop(name, None)
            depth = self._depth.pop(name, 0)
            path = np.flatnonzero(rows.accepted[own])
            # A token that was put off is no root: what was guessed would stand a place too far.
            if not emitted or len(path) != len(emitted):
                continue
            if depth and len(rows.tokens[own]) > 1:
                if not judged:
                    self._trials *= FADE
                    self._hits *= FADE
                    judged = True
                self._trials[:depth] += 1.0
                self._hits[: min(depth, len(path) - 1)] += 1.0
            chain = self._chain(rows.tokens[own], rows.parents[own], int(path[-1])) + own.start
            if len(chain):
                log_p = rows.top_logits[chain] - rows.log_total[chain, None]
                self._guesses[name] = Guesses(rows.top_ids[chain].copy(), log_p)

    def _chain(self, tokens: Int32, parents: Int32, last: int) -> Int32:
        """The rows of the prompt tokens below a row, from the first one on."""
        ids = range(self.vocab_size, self.vocab_size + self._most)
        return np.array(path_below(last, tokens, parents, ids), np.int32)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """See `Proposer.propose`. A guess serves one tree."""
        reach = self.reach()
        trees = []
        for request in requests:
            guesses = self._guesses.pop(request.request_id, None)
            if not request.has_room:
                trees.append(DraftTree.empty())
                continue
            depths: list[Sparse] = []
            if guesses is not None:
                depths = [_chances(*row, request) for row in zip(*guesses, strict=True)]
                self._depth[request.request_id] = len(depths)
            trees.append(
                split_tree(
                    depths, reach, request.budget_tokens, request.max_depth, self.vocab_size, request.chain
                )
            )
        return trees

    def finish(self, request_id: str) -> None:
        """See `Proposer.finish`."""
        self._guesses.pop(request_id, None)
        self._depth.pop(request_id, None)


def _chances(ids: Int32, log_p: Float32, request: Request) -> Sparse:
    """A guess as the request samples; the tokens that are not among ``ids`` keep their share."""
    found = shaped(ids, log_p, request.sampling)
    known = min(float(np.exp(log_p.astype(np.float64)).sum()), 1.0)
    return Sparse(found.ids, found.q * known)


def split_tree(
    depths: Sequence[Sparse],
    reach: Float64,
    num_nodes: int,
    max_depth: int,
    first_id: int,
    chain: bool = False,
) -> DraftTree:
    """Candidates and prompt tokens of the largest sum of values, each value being the tokens that a row brings.

    Args:
        depths: by depth the guessed distribution, likeliest first.
        reach: float64 ``[num_prompt_tokens]`` descending: what prompt tokens are worth below the last accepted node.
        num_nodes: most rows.
        max_depth: deepest row.
        first_id: of the first prompt token.
        chain: no node may have two children: prompt tokens stand below the last candidate alone.

    Returns:
        The tree, whose probabilities are the rows' values: what a budget cuts is worth least.
    """
    if chain:
        depths = [Sparse(depth.ids[:1], depth.q[:1]) for depth in depths]
    candidates = product_tree(depths[:max_depth], num_nodes)
    most, count = len(candidates), len(reach)
    chances = np.concatenate([[1.0], candidates.probabilities.astype(np.float64)])  # the root's first
    # [kept, node]: of so many candidates, the chance that the node is the last one accepted.
    last = np.zeros((most + 1, most + 1))
    last[np.arange(1, most + 1), candidates.parents + 1] = -chances[1:]
    last = np.tril(np.maximum(last.cumsum(0) + chances, 0.0))
    if chain:
        last = np.diag(last.diagonal())
    room = max_depth - np.concatenate([[0], candidates.depths()])  # rows that may stand below each node
    values = last[:, :, None] * np.where(np.arange(count) < room[:, None], reach, 0.0)
    values = values.reshape(most + 1, -1)
    # A chain's values descend: with the sort stable, a prompt token comes before the one below it.
    order = np.argsort(-values, axis=1, kind="stable")
    gains = np.take_along_axis(values, order, 1).cumsum(1)
    spare = np.minimum(num_nodes - np.arange(most + 1), values.shape[1])
    prompt_gain = np.where(spare > 0, gains[np.arange(most + 1), np.maximum(spare - 1, 0)], 0.0)
    kept = int((chances.cumsum() - 1.0 + prompt_gain).argmax())
    chosen = order[kept, : max(int(spare[kept]), 0)]
    chosen = chosen[values[kept, chosen] > 0.0]
    node, step = np.divmod(chosen, count)
    place = {(int(n), int(s)): kept + i for i, (n, s) in enumerate(zip(node, step, strict=True))}
    above = [n - 1 if s == 0 else place[n, s - 1] for n, s in place]
    return DraftTree.from_nodes(
        np.concatenate([candidates.tokens[:kept], first_id + step]).astype(np.int32),
        np.concatenate([candidates.parents[:kept], above]).astype(np.int32),
        np.concatenate([candidates.probabilities[:kept], values[kept, chosen]]).astype(np.float32),
    )
