# SPDX-License-Identifier: Apache-2.0
"""STAND: draft from the distributions the target had after the same last tokens, with randomness where it samples.

For each context of 1 to ``max_order`` tokens a table keeps the mean of the distributions that the target had after it,
as far as its largest logits tell them. A node's children are the most probable ones of its longest known context, or
drawn from that without replacement. No weights; one table for all requests.

Source: "Accelerated Test-Time Scaling with Model-Free Speculative Sampling", arXiv 2506.04708, section 3.

Deviations, all ours:

- ``branches="probable"`` is the default: the most probable children at every temperature, verified by the
  sample-then-match walk. ``"drawn"`` is the paper's, of requests that sample without a seed: children drawn at the
  request's temperature, top-p, top-k and min-p, verified by recursive rejection (`stand_drawn`). Both are lossless; on
  our prompts the first is accepted more often (docs/methods.md).
- Best-first growth under the budget replaces the fixed shape found on a calibration set. The estimates by which it goes
  are counted as requests go on: how often a child was right by the length of its context and by its share at the
  temperature, apart for greedy requests.
- The table is a fixed array: of four places for a context the one not recorded for longest makes room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from vllm_ext.kernels.learned_arrays import Learned, check_names
from vllm_ext.kernels.ngram_table import (
    EMPTY,
    Classes,
    Entries,
    Growing,
    NgramTable,
    contents,
    grow_tree,
    record_rows,
)
from vllm_ext.proposers.base import MethodOptions, Proposer, Request, VerifiedRows, practise
from vllm_ext.proposers.calibration import Calibration, Float64
from vllm_ext.proposers.draft_model import is_drawn
from vllm_ext.proposers.learned import restore_table
from vllm_ext.proposers.stand_drawn import DrawnTrees
from vllm_ext.proposers.tree import DraftTree, Float32, Int32

# Bounds between the classes of a child's share.
SHARES: Float32 = np.array([0.005, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97], np.float32)
MOST_WEIGHT = 1.01  # of a mean of shares, with room for rounding
BRANCHES = 5  # most children of a node, as in the paper's first tree

# Prior acceptance per share, by tokens of the context: of greedy requests, and of those that sample. From outputs of
# SmolLM2-135M.
TRUST: Float64 = np.array([[0.4, 0.6, 0.8, 0.95], [0.33, 0.5, 0.65, 0.75]])
# That the first of drawn children is accepted, likewise.
TRUST_DRAWN = (0.4, 0.55, 0.7, 0.8)


class StandOptions(MethodOptions):
    """Options of ``stand``."""

    memory_mb: int = Field(
        default=64,
        ge=1,
        le=8192,
        description="most memory for the table, in 10^6 bytes; old contexts make room",
    )
    max_order: int = Field(default=4, ge=1, le=TRUST.shape[1], description="longest context, in tokens")
    table_width: int = Field(default=8, ge=1, le=32, description="successors kept for each context")
    branches: Literal["drawn", "probable"] = Field(
        default="probable",
        description="probable: the most probable children, verified by the target's own draws; drawn: of requests that "
        "sample without a seed, on V1, children drawn at random, verified by recursive rejection",
    )


@dataclass(slots=True)
class _Request:
    """What is remembered of a request from step to step."""

    mode: int  # which estimates are its own
    context: Int32 | None = None  # [max_order] the last tokens of the next verification, the root last


class Stand(Proposer):
    """Trees of recorded distributions.

    Args:
        vocab_size: number of token ids of the target.
        memory_mb: bound of the table, in 10^6 bytes.
        max_order: longest context, in tokens.
        table_width: successors kept for each context.
        branches: "probable" or "drawn".
    """

    summary: ClassVar[str] = "the distributions the target had after the same last tokens"
    paper: ClassVar[str] = "arXiv 2506.04708"
    Options: ClassVar[type[MethodOptions]] = StandOptions

    def __init__(
        self,
        vocab_size: int,
        memory_mb: int = 64,
        max_order: int = 4,
        table_width: int = 8,
        branches: str = "probable",
    ) -> None:
        self.verified_top_k = table_width
        self.vocab_size = vocab_size
        self._arguments = (max_order, table_width, branches)
        self._longest = max_order
        self.table = NgramTable.of_size(memory_mb * 10**6, table_width)
        middle = (np.array([0.0, *SHARES]) + np.array([*SHARES, 1.0])) / 2
        # [2 (0: greedy requests, 1: those that sample), orders, shares]
        prior = TRUST[:, :max_order, None] * middle
        self.calibration = Calibration(prior)
        self._drawn: DrawnTrees | None = None
        if branches == "drawn":
            self._drawn = DrawnTrees(DrawnTrees.prior(TRUST_DRAWN[:max_order], BRANCHES, middle), SHARES)
        self._requests: dict[str, _Request] = {}

    @classmethod
    def from_options(cls, options: StandOptions, vocab_size: int) -> Stand:
        """See `Proposer.from_options`."""
        return cls(vocab_size, options.memory_mb, options.max_order, options.table_width, options.branches)

    @property
    def memory_bytes(self) -> int:
        """The table, ``memory_mb`` rounded down to a power of two of contexts, and the counts."""
        counts = self.calibration.nbytes + (self._drawn.calibration.nbytes if self._drawn else 0)
        return sum(part.nbytes for part in self.table) + counts

    def start(self, request: Request) -> None:
        """Remember which estimates are the request's."""
        self._requests[request.request_id] = _Request(int(request.sampling.temperature > 0))

    def observe(self, rows: VerifiedRows) -> None:
        """Judge the trees of the last `propose`, and record the distributions along the accepted paths."""
        self.calibration.judge(rows.request_ids, rows.emitted)
        if self._drawn:
            self._drawn.judge(rows)
        before = np.full((len(rows.request_ids), self._longest - 1), EMPTY, np.int32)
        for i, (request_id, emitted) in enumerate(zip(rows.request_ids, rows.emitted, strict=True)):
            state = self._requests.get(request_id)
            if state is None or state.context is None or not emitted:
                continue
            start = rows.row_start[i]
            if start < rows.row_start[i + 1] and rows.tokens[start] == state.context[-1]:
                before[i] = state.context[:-1]
        # Of exactly these types, or numba would compile once more, in the middle of a step.
        record_rows(
            self.table,
            np.ascontiguousarray(rows.row_start, np.int32),
            np.ascontiguousarray(rows.tokens, np.int32),
            np.ascontiguousarray(rows.parents, np.int32),
            np.ascontiguousarray(rows.accepted, np.bool_),
            before,
            np.ascontiguousarray(rows.top_ids, np.int32),
            np.ascontiguousarray(rows.top_logits, np.float32),
            self.vocab_size,
        )

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Grow each request's tree from its root."""
        estimates = self.calibration.estimates
        groups_of_a_mode = estimates[0, ..., 0].size
        trees = []
        for request in requests:
            state = self._requests[request.request_id]
            state.context = np.full(self._longest, EMPTY, np.int32)
            last = request.tokens[-self._longest :]
            state.context[self._longest - len(last) :] = last
            if self._drawn and self.draws and request.may_draw and is_drawn(request):
                trees.append(self._drawn.draw(self.table, request, state.context))
                continue
            tree = grow_tree(
                self.table,
                state.context,
                1,
                Classes(estimates[state.mode], SHARES),
                Growing(BRANCHES, float(request.sampling.temperature or 1.0), 0.0),
                request.budget_tokens,
                request.max_depth,
                request.chain,
            )
            groups = tree.groups + np.uint8(state.mode * groups_of_a_mode)
            self.calibration.drafted(request.request_id, tree._replace(groups=groups))
            trees.append(DraftTree(*tree[:3]))
        return trees

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)
        self.calibration.forget(request_id)
        if self._drawn:
            self._drawn.forget(request_id)

    def state_dict(self) -> dict[str, Learned]:
        """See `Proposer.state_dict`: the table, without its free slots, and the calibrations."""
        arrays = contents(self.table)._asdict() | self.calibration.state_dict()
        if self._drawn:
            arrays |= {f"drawn_{name}": array for name, array in self._drawn.calibration.state_dict().items()}
        return arrays

    def load_state_dict(self, arrays: Mapping[str, Learned]) -> None:
        """See `Proposer.load_state_dict`."""
        drawn = ("drawn_hits", "drawn_trials") if self._drawn else ()
        check_names(arrays, (*Entries._fields, "hits", "trials", *drawn))
        self.calibration.load_state_dict(arrays)
        if self._drawn:
            counts = {name.removeprefix("drawn_"): arrays[name] for name in drawn}
            self._drawn.calibration.load_state_dict(counts)
        restore_table(arrays, self.table, self.vocab_size, MOST_WEIGHT)

    def warm_up(self) -> None:
        """Compile what would else stall the first request."""
        # A small one of the same types; numba's compiled code is shared by all.
        practise(type(self)(2, 1, *self._arguments), np.zeros(3, np.int32))
