# SPDX-License-Identifier: Apache-2.0
"""Token Recycling: draft from what the target itself ranked highest the last time it read a token.

An adjacency matrix holds, for each vocabulary token, the ids of the ``matrix_width`` tokens the target ranked
highest after it, most recent observation only. Drafting follows the best successor from the root; every row
the target verifies, accepted or not, overwrites its token's entry. No weights, no training, one table for all
requests.

Source: "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling",
arXiv 2408.08696, section 3.

Deviations: a chain of best successors instead of the paper's 80-node tree (vLLM verifies chains); entries
never observed are marked empty and end the draft, where the paper's code starts from token 0; prompts seed
the empty entries with the successors they contain, so that a fresh server drafts from its first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from vllm_ext.proposers.base import Draft, Int32, MethodOptions, Proposer, Request, VerifiedRows

EMPTY = -1


class TokenRecyclingOptions(MethodOptions):
    """Options of ``token_recycling``."""

    matrix_width: int = Field(
        default=8,
        ge=1,
        le=32,
        description="successors kept for each vocabulary token (memory: vocabulary * width * 4 bytes)",
    )


class TokenRecycling(Proposer):
    """Chains along the best recorded successor.

    Args:
        vocab_size: number of token ids of the target.
        matrix_width: successors kept for each token.
    """

    summary: ClassVar[str] = "successors the target ranked highest the last time it read a token"
    paper: ClassVar[str] = "arXiv 2408.08696"
    Options: ClassVar[type[MethodOptions]] = TokenRecyclingOptions

    def __init__(self, vocab_size: int, matrix_width: int = 8) -> None:
        self.verified_top_k = matrix_width
        self.matrix: Int32 = np.full((vocab_size, matrix_width), EMPTY, dtype=np.int32)

    @classmethod
    def from_options(cls, options: TokenRecyclingOptions, vocab_size: int) -> TokenRecycling:
        """See `Proposer.from_options`."""
        return cls(vocab_size, options.matrix_width)

    @property
    def memory_bytes(self) -> int:
        """``vocab_size * matrix_width * 4``."""
        return self.matrix.nbytes

    def start(self, request: Request) -> None:
        """Seed the entries no verified row has filled yet with the prompt's own successors."""
        prompt = request.tokens[: request.num_prompt_tokens]
        head, successor = prompt[:-1], prompt[1:]
        known = self._in_vocabulary(head) & self._in_vocabulary(successor)
        head, successor = head[known], successor[known]
        unseen = self.matrix[head, 0] == EMPTY
        # A token that occurs twice keeps its last successor: numpy assigns in order.
        self.matrix[head[unseen], 0] = successor[unseen]

    def observe(self, rows: VerifiedRows) -> None:
        """Overwrite the entry of every verified token; of two rows with one token the accepted one stays."""
        known = self._in_vocabulary(rows.tokens)
        for kept in (False, True):
            mask = known & (rows.accepted == kept)
            self.matrix[rows.tokens[mask]] = rows.top_ids[mask]

    def _in_vocabulary(self, tokens: Int32) -> npt.NDArray[np.bool_]:
        """False for the placeholder ids of images and prompt embeddings, which have no successor."""
        return (tokens >= 0) & (tokens < len(self.matrix))

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        """Follow the first column from each root until the budget or an empty entry."""
        if not requests:
            return []
        budget = np.array([request.budget_tokens for request in requests])
        depth = max(int(budget.max()), 0)
        # [num_requests, depth + 1]; column 0 is the roots. EMPTY indexes the last matrix row, whose result
        # the cut below discards: everything after the first EMPTY is dropped.
        path = np.empty((len(requests), depth + 1), dtype=np.int32)
        path[:, 0] = [request.tokens[-1] for request in requests]
        for column in range(depth):
            path[:, column + 1] = self.matrix[path[:, column], 0]
        empty = path == EMPTY
        length = np.where(empty.any(axis=1), empty.argmax(axis=1) - 1, depth)
        length = np.minimum(length, budget)
        return [Draft.chain(row[1 : 1 + max(n, 0)]) for row, n in zip(path, length.tolist(), strict=True)]
