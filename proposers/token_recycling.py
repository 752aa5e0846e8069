# SPDX-License-Identifier: Apache-2.0
"""Token Recycling: draft from what the target itself ranked highest the last time it read a token.

A matrix holds, for each vocabulary token, the ids of the ``matrix_width`` tokens the target ranked highest
after it, most recent observation only. Every row the target verifies, accepted or not, overwrites its token's
row. The draft is a tree of successors of successors. No weights, no training, one matrix for all requests.

Source: "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling",
arXiv 2408.08696, section 3.

Deviations, all ours, made for budgets of 5 to 16 nodes where the paper verifies 80:

- The tree is grown greedily by estimated acceptance (as in DySpec, arXiv 2410.11744) instead of having one
  shape. ``tree="static"`` stays inside the paper's, and has it with 80 nodes and ``context_tokens=1``.
- An entry keeps its part of the softmax over its row, as a class. How often an entry is right is counted by
  class and depth as the requests go on; so sure entries are followed far, and unsure ones side by side.
- ``context_tokens`` of 2 and more: pairs of tokens have rows too, which precede those of their last tokens.
  And the text of prompts and outputs is indexed by its last 2 to ``context_tokens`` tokens: what followed the
  longest context seen before is one more successor, or the same one with more trust.
- Entries never observed are marked empty and end a path, where the paper's code drafts token 0. Prompts seed
  them with the successors they contain, so that a fresh server drafts from its first step. What a root's row still
  lacks is filled, unless ``context_tokens`` is 1, with what most often followed tokens at their first occurrence (the
  lowest order of a Kneser-Ney back-off): one token in five behind roots never read before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from vllm_ext.kernels.best_first_tree import (
    EMPTY,
    Float64,
    SuccessorTables,
    grow_trees,
    record_rows,
    record_text,
)
from vllm_ext.kernels.learned_arrays import Learned, check_array, check_names
from vllm_ext.proposers import token_recycling_template
from vllm_ext.proposers.base import MethodOptions, Proposer, Request, VerifiedRows, practise
from vllm_ext.proposers.calibration import Calibration
from vllm_ext.proposers.learned import check_distinct
from vllm_ext.proposers.tree import DraftTree, Float32, Int32

PAIR_SLOTS = 1 << 16
TEXT_SLOTS = 1 << 18

# Bounds between the classes of an entry's share.
SHARES: Float32 = np.array(
    [0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.08, 0.12, 0.18, 0.26, 0.36, 0.5, 0.65, 0.8, 0.92], np.float32
)

# Prior acceptance: per share in a token's and in a pair's row; of an entry seeded by a prompt; of a successor
# in text by the length of its context, from 2 on; per that if the row lacks it. From runs of SmolLM2-135M.
ROW_TRUST = 0.5
PAIR_TRUST = 0.65
SEEDED = 0.25
TEXT_TRUST = (0.3, 0.45, 0.6)
ABSENT_TRUST = 0.5
GUESSED = 0.05  # of an entry that only fills a root's row
GUESS_CLASS = 2 * (len(SHARES) + 1) + 1


def prior_chances(longest: int) -> Float64:
    """Acceptance before anything was counted, ``[longest, classes]``; a node's group is its place in this.

    Args:
        longest: tokens of the longest context looked up.
    """
    share = np.sqrt(np.array([0.001, *SHARES]) * np.array([*SHARES, 1.0]))  # a class's middle
    of_row = np.array([SEEDED, *(share * ROW_TRUST), *(share * PAIR_TRUST), GUESSED, 0.0, 0.0])
    levels = [of_row]
    for length in range(2, longest + 1):
        trust = TEXT_TRUST[min(length - 2, len(TEXT_TRUST) - 1)]
        levels.append(1 - (1 - of_row) * (1 - trust))  # as if independent
        levels[-1][[0, -2, -1]] = trust, trust * ABSENT_TRUST, trust * ABSENT_TRUST
    return np.stack(levels)


class TokenRecyclingOptions(MethodOptions):
    """Options of ``token_recycling``."""

    matrix_width: int = Field(
        default=8,
        ge=1,
        le=32,
        description="successors kept per token and pair (memory: width * (vocabulary + 65536) * 5 bytes)",
    )
    context_tokens: int = Field(
        default=4,
        ge=1,
        le=4,
        description="longest context looked up: 1: the paper's matrix alone; more: also pairs and past text",
    )
    tree: Literal["dynamic", "static", "chain"] = Field(
        default="dynamic",
        description="dynamic: any shape, by estimated acceptance; static: inside the paper's 80-node tree; "
        "chain: always the best child alone",
    )


@dataclass(slots=True)
class _Request:
    """What is remembered of a request from step to step."""

    num_recorded: int  # tokens whose text is in the tables
    previous: int = EMPTY  # the token before the root of the next verification; EMPTY if there is none
    root: int = EMPTY
    unread: bool = False  # the target has never read the root


class TokenRecycling(Proposer):
    """Trees of recorded successors.

    Args:
        vocab_size: number of token ids of the target.
        matrix_width: successors kept for each token.
        context_tokens: longest context looked up, 1 to 4.
        tree: "dynamic", "static" or "chain".
    """

    on_v2 = "device"
    summary: ClassVar[str] = "what the target ranked highest the last time it read a token"
    paper: ClassVar[str] = "arXiv 2408.08696"
    Options: ClassVar[type[MethodOptions]] = TokenRecyclingOptions

    def __init__(
        self, vocab_size: int, matrix_width: int = 8, context_tokens: int = 4, tree: str = "dynamic"
    ) -> None:
        self.verified_top_k = matrix_width
        self.vocab_size = vocab_size
        self._arguments = (matrix_width, context_tokens, tree)
        self._longest = context_tokens
        more = context_tokens > 1
        self.tables = SuccessorTables.empty(
            vocab_size, matrix_width, PAIR_SLOTS if more else 0, TEXT_SLOTS if more else 0
        )
        # How often a token followed another's first occurrence, and the most frequent ones, best first.
        self.first_successors: Int32 = np.zeros(vocab_size if more else 0, np.int32)
        self._guesses: Int32 = np.zeros(0, np.int32)
        self._chain = tree == "chain"
        # [positions, width]; no position: any shape.
        self._template = np.empty((0, matrix_width), np.int32)
        if tree == "static":
            self._template = token_recycling_template.positions(matrix_width)
        self.calibration = Calibration(prior_chances(context_tokens))
        self._requests: dict[str, _Request] = {}

    @classmethod
    def from_options(cls, options: TokenRecyclingOptions, vocab_size: int) -> TokenRecycling:
        """See `Proposer.from_options`."""
        return cls(vocab_size, options.matrix_width, options.context_tokens, options.tree)

    @property
    def memory_bytes(self) -> int:
        """``5 * vocab_size * width``; for longer contexts ``2**16 * (5 * width + 8) + 2**18 * 12`` and
        ``4 * vocab_size`` more."""
        return sum(part.nbytes for part in (*self.tables, self.first_successors, self.calibration))

    def start(self, request: Request) -> None:
        """Record the prompt's text, and seed the token rows the target has not filled yet."""
        prompt = request.tokens[: request.num_prompt_tokens]
        head, successor = prompt[:-1], prompt[1:]
        known = (head >= 0) & (head < self.vocab_size) & (successor >= 0) & (successor < self.vocab_size)
        head, successor = head[known], successor[known]
        unseen = self.tables.successors[head, 0] == EMPTY
        # A token that occurs twice keeps its last successor: numpy assigns in order.
        self.tables.successors[head[unseen], 0] = successor[unseen]
        self._count_first(successor[unseen][np.unique(head[unseen], return_index=True)[1]])
        self._requests[request.request_id] = state = _Request(num_recorded=1)
        self._record_text(state, prompt)

    def _count_first(self, successors: Int32) -> None:
        """Count tokens that followed another's first occurrence."""
        if self._longest > 1 and len(successors):
            np.add.at(self.first_successors, successors, 1)
            # Counts only grow: all others are still below these.
            self._guesses = self._most_frequent(np.union1d(self._guesses, successors))

    def _most_frequent(self, tokens: npt.NDArray[Any]) -> Int32:
        """Of these, in ascending order, the most frequent first successors."""
        order = np.argsort(-self.first_successors[tokens], kind="stable")
        return tokens[order[: self.verified_top_k]].astype(np.int32)

    def _fill(self, root: int) -> bool:
        """Fill what the root's row lacks, until the target has read it; returns whether it never has."""
        if not 0 <= root < self.vocab_size or self.tables.successors[root, -1] != EMPTY:
            return False
        row = self.tables.successors[root]
        known = int((row != EMPTY).sum())
        guesses = self._guesses[~np.isin(self._guesses, row[:known])][: len(row) - known]
        row[known : known + len(guesses)] = guesses
        self.tables.bases[root, known : known + len(guesses)] = GUESS_CLASS
        return known == 0

    def _record_text(self, state: _Request, tokens: Int32) -> None:
        if self._longest > 1:
            record_text(
                self.tables, np.ascontiguousarray(tokens, np.int32), state.num_recorded, self._longest
            )
        state.num_recorded = max(len(tokens), 1)

    def observe(self, rows: VerifiedRows) -> None:
        """Judge the trees of the last `propose`, and overwrite the rows of every verified token."""
        root_previous = np.full(len(rows.request_ids), EMPTY, np.int32)
        self.calibration.judge(rows.request_ids, rows.emitted)
        for i, (request_id, emitted) in enumerate(zip(rows.request_ids, rows.emitted, strict=True)):
            state = self._requests.get(request_id)
            if state is None:
                continue
            if emitted and state.unread and 0 <= emitted[0] < self.vocab_size:
                self._count_first(np.array(emitted[:1], np.int32))
            start = rows.row_start[i]
            if start < rows.row_start[i + 1] and rows.tokens[start] == state.root:
                root_previous[i] = state.previous
        # Of exactly these types, or numba would compile once more, in the middle of a step.
        record_rows(
            self.tables,
            np.ascontiguousarray(rows.row_start, np.int32),
            np.ascontiguousarray(rows.tokens, np.int32),
            np.ascontiguousarray(rows.parents, np.int32),
            np.ascontiguousarray(rows.accepted, np.bool_),
            root_previous,
            np.ascontiguousarray(rows.top_ids, np.int32),
            np.ascontiguousarray(rows.top_logits, np.float32),
            SHARES,
        )

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Grow each request's tree from its root, always the most probable node next."""
        contexts = np.full((len(requests), self._longest), EMPTY, np.int32)
        for context, request in zip(contexts, requests, strict=True):
            tokens = request.tokens
            context[max(self._longest - len(tokens), 0) :] = tokens[-self._longest :]
            state = self._requests[request.request_id]
            self._record_text(state, tokens)
            state.root = int(tokens[-1])
            state.previous = int(tokens[-2]) if len(tokens) > 1 else EMPTY
            state.unread = self._fill(state.root)
        grown = grow_trees(
            self.tables,
            self.calibration.estimates,
            contexts,
            np.array([request.budget_tokens for request in requests], np.int64),
            np.array([request.max_depth for request in requests], np.int64),
            np.array([self._chain or request.chain for request in requests], np.bool_),
            self._template,
        )
        trees = []
        for i, request in enumerate(requests):
            tree = grown.tree(i)
            self.calibration.drafted(request.request_id, tree)
            trees.append(DraftTree(*tree[:3]))
        return trees

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)
        self.calibration.forget(request_id)

    def state_dict(self) -> dict[str, Learned]:
        """See `Proposer.state_dict`: the tables and the calibration."""
        tables = {name: table.copy() for name, table in self.tables._asdict().items()}
        tables["first_successors"] = self.first_successors.copy()
        return tables | self.calibration.state_dict()

    def load_state_dict(self, arrays: Mapping[str, Learned]) -> None:
        """See `Proposer.load_state_dict`."""
        tables: dict[str, Learned] = self.tables._asdict()
        check_names(arrays, (*tables, "first_successors", "hits", "trials"))
        keys = np.iinfo(np.int64)  # any number may be one
        tokens = EMPTY, self.vocab_size - 1
        ranges = {
            "successors": tokens,
            "bases": (0, GUESS_CLASS),  # seeded, a share's class in a token's or a pair's row, or guessed
            "pair_keys": (keys.min, keys.max),
            "text_keys": (keys.min, keys.max),
            "text_successors": tokens,
        }
        for name, table in tables.items():
            check_array(name, arrays[name], table.shape, table.dtype, *ranges[name])
        check_distinct("successors", arrays["successors"], EMPTY)
        firsts = arrays["first_successors"]
        check_array(
            "first_successors", firsts, self.first_successors.shape, np.int32, 0, np.iinfo(np.int32).max
        )
        self.calibration.load_state_dict(arrays)
        self.first_successors[...] = firsts
        self._guesses = self._most_frequent(np.flatnonzero(firsts))
        for name, table in tables.items():
            table[...] = arrays[name]

    def warm_up(self) -> None:
        """Compile what would else stall the first request."""
        # A small one of the same types; numba's compiled code is shared by all.
        practise(type(self)(2, *self._arguments), np.zeros(3, np.int32))
