# SPDX-License-Identifier: Apache-2.0
"""Token Recycling: draft from what the target itself ranked highest the last time it read a token.

An adjacency matrix holds, for each vocabulary token, the ids of the ``matrix_width`` tokens the target ranked
highest after it, most recent observation only.

Source: "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling",
arXiv 2408.08696, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from vllm_ext.kernels.best_first_tree import best_first_trees
from vllm_ext.proposers.base import MethodOptions, Proposer, Request, VerifiedRows
from vllm_ext.proposers.tree import DraftTree, Float32, Int32

EMPTY = -1
SHARES = np.array(
    [0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.08, 0.12, 0.18, 0.26, 0.36, 0.5, 0.65, 0.8, 0.92], np.float32
)
NUM_BUCKETS = len(SHARES) + 1
DEPTHS = 4
PAIR_SLOTS = 1 << 16
PRIOR_WEIGHT = 8.0
FADE = 0.995


class TokenRecyclingOptions(MethodOptions):
    """Options of ``token_recycling``."""

    matrix_width: int = Field(
        default=8,
        ge=1,
        le=32,
        description="successors kept for each vocabulary token (memory: vocabulary * width * 4 bytes)",
    )
    tree: Literal["dynamic", "static"] = Field(default="dynamic", description="shape")


@dataclass(slots=True)
class _Drafted:
    """What was proposed for a request last."""

    context: tuple[int, int]
    parents: list[int]
    tokens: list[int]
    depths: list[int]
    classes: list[int]


class TokenRecycling(Proposer):
    """Trees of successors.

    Args:
        vocab_size: number of token ids of the target.
        matrix_width: successors kept for each token.
    """

    summary: ClassVar[str] = "successors the target ranked highest the last time it read a token"
    paper: ClassVar[str] = "arXiv 2408.08696"
    Options: ClassVar[type[MethodOptions]] = TokenRecyclingOptions

    def __init__(self, vocab_size: int, matrix_width: int = 8, tree: str = "dynamic") -> None:
        self.verified_top_k = matrix_width
        self._vocab = vocab_size
        rows = vocab_size + PAIR_SLOTS
        self.matrix: Int32 = np.full((rows, matrix_width), EMPTY, dtype=np.int32)
        self.classes = np.zeros((rows, matrix_width), dtype=np.uint8)
        self.keys = np.full(PAIR_SLOTS, -1, dtype=np.int64)
        share = np.sqrt(np.concatenate([[0.001], SHARES]) * np.concatenate([SHARES, [1.0]]))
        prior = np.concatenate([share * 0.6, [0.3], share * 0.8, [0.5]])
        self.trials = np.full((len(prior), DEPTHS), PRIOR_WEIGHT, np.float64)
        self.hits = self.trials * prior[:, None]
        self._drafted: dict[str, _Drafted] = {}

    @classmethod
    def from_options(cls, options: TokenRecyclingOptions, vocab_size: int) -> TokenRecycling:
        """See `Proposer.from_options`."""
        return cls(vocab_size, options.matrix_width, options.tree)

    @property
    def memory_bytes(self) -> int:
        """``vocab_size * matrix_width * 4``."""
        return self.matrix.nbytes + self.classes.nbytes + self.keys.nbytes

    def start(self, request: Request) -> None:
        """Seed the entries no verified row has filled yet with the prompt's own successors."""
        prompt = request.tokens[: request.num_prompt_tokens].astype(np.int64)
        head, successor = prompt[:-1], prompt[1:]
        known = self._in_vocabulary(head) & self._in_vocabulary(successor)
        previous = np.concatenate([[-1], head[:-1]])
        paired = known & self._in_vocabulary(previous)
        # A token that occurs twice keeps its last successor: numpy assigns in order.
        unseen = known & (self.matrix[np.where(known, head, 0), 0] == EMPTY)
        self.matrix[head[unseen], 0] = successor[unseen]
        self.classes[head[unseen], 0] = NUM_BUCKETS
        key = previous[paired] * self._vocab + head[paired]
        slots = key % PAIR_SLOTS
        self.keys[slots] = key
        self.matrix[self._vocab + slots] = EMPTY
        self.matrix[self._vocab + slots, 0] = successor[paired]
        self.classes[self._vocab + slots, 0] = 2 * NUM_BUCKETS + 1

    def observe(self, rows: VerifiedRows) -> None:
        """Overwrite the entry of every verified token; of two rows with one token the accepted one stays."""
        if not len(rows.tokens):
            return
        previous = np.full(len(rows.tokens), -1, np.int64)
        starts = rows.row_start.tolist()
        for i, (name, emitted) in enumerate(zip(rows.request_ids, rows.emitted, strict=True)):
            drafted = self._drafted.get(name)
            if drafted is None:
                continue
            if emitted:
                self._judge(drafted, emitted)
            start, end = starts[i], starts[i + 1]
            if end > start and rows.tokens[start] == drafted.context[1]:
                previous[start] = drafted.context[0]
        below = rows.parents >= 0
        first = np.repeat(rows.row_start[:-1], np.diff(rows.row_start))
        previous[below] = rows.tokens[(first + rows.parents)[below]]
        weight = np.exp(rows.top_logits - rows.top_logits[:, :1])
        share = weight / weight.sum(axis=1, keepdims=True)
        bucket = np.searchsorted(SHARES, share).astype(np.uint8)
        known = self._in_vocabulary(rows.tokens)
        paired = known & self._in_vocabulary(previous)
        key = previous * self._vocab + rows.tokens
        for kept in (False, True):
            mask = known & (rows.accepted == kept)
            self.matrix[rows.tokens[mask]] = rows.top_ids[mask]
            self.classes[rows.tokens[mask]] = bucket[mask]
            mask = paired & (rows.accepted == kept)
            slots = key[mask] % PAIR_SLOTS
            self.keys[slots] = key[mask]
            self.matrix[self._vocab + slots] = rows.top_ids[mask]
            self.classes[self._vocab + slots] = bucket[mask] + (NUM_BUCKETS + 1)

    def _judge(self, drafted: _Drafted, emitted: Sequence[int]) -> None:
        """Compare a proposed tree with what its request put out."""
        reached = {-1}  # the nodes on the output's path
        for node, (token, parent) in enumerate(zip(drafted.tokens, drafted.parents, strict=True)):
            if parent not in reached:
                continue
            depth = drafted.depths[node]
            if depth > len(emitted):
                continue
            group, column = drafted.classes[node], min(depth - 1, DEPTHS - 1)
            hit = token == emitted[depth - 1]
            self.trials[group, column] = self.trials[group, column] * FADE + 1.0
            self.hits[group, column] = self.hits[group, column] * FADE + hit
            if hit:
                reached.add(node)

    def _in_vocabulary(self, tokens: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """False for the placeholder ids of images and prompt embeddings, which have no successor."""
        return (tokens >= 0) & (tokens < self._vocab)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Grow each request's tree from its root, always the most probable node next."""
        estimates: Float32 = (self.hits / self.trials).astype(np.float32)
        contexts = np.full((len(requests), 2), -1, np.int64)
        for i, request in enumerate(requests):
            contexts[i, max(2 - len(request.tokens), 0) :] = request.tokens[-2:]
        counts, tokens, parents, probabilities, classes = best_first_trees(
            self.matrix,
            self.classes,
            estimates,
            self.keys,
            contexts,
            np.array([request.budget_tokens for request in requests], np.int64),
            np.array([request.max_depth for request in requests], np.int64),
        )
        trees = []
        for i, (request, count) in enumerate(zip(requests, counts.tolist(), strict=True)):
            tree = DraftTree(tokens[i, :count], parents[i, :count], probabilities[i, :count])
            trees.append(tree)
            self._drafted[request.request_id] = _Drafted(
                (int(contexts[i, 0]), int(contexts[i, 1])),
                tree.parents.tolist(),
                tree.tokens.tolist(),
                tree.depths().tolist(),
                classes[i, :count].tolist(),
            )
        return trees

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        self._drafted.pop(request_id, None)

    def warm_up(self) -> None:
        """Compile what would else stall the first request."""
        one = np.ones(1, np.int64)
        best_first_trees(
            self.matrix, self.classes, np.zeros((1, 1), np.float32), self.keys, np.zeros((1, 2), np.int64), one, one
        )
