# SPDX-License-Identifier: Apache-2.0
"""ADED: draft from statistics of three tokens in a row, corrected by the text as it comes.

For each pair of tokens a table weighs what followed it in prompts and outputs. A draft is the tree of the most
probable continuations of the last pair by the product of their shares. No weights; one table for all requests.

Source: "Adaptix: Improving LLM Decoding Efficiency via Adaptive Draft-Verification", first called ADED,
arXiv 2407.12021, section 3.

Deviations, all ours:

- The table starts empty, or as the paper's does with a corpus (``datastore``): of a pair the shares of the 12 tokens
  that followed it most often. Each occurrence of a triple adds the paper's 0.04, up to 3.0, once, when its last token
  comes; the paper adds it in every step in which it is among the last 16 tokens. So all that the corpus says of a pair
  weighs as one occurrence; with the paper's weight, 1, it displaces what the text itself says.
- Best-first expansion replaces 150 rounds of Monte Carlo tree search and their random numbers: the same candidates in
  some microseconds. Of the search's rule (PUCT) the bonus is left: with ``exploration`` a node goes up as more nodes
  are taken beside it and below its siblings, by no more than ``1 + exploration * sqrt(nodes)``. It gains nothing
  that can be measured, and is off.
- Nodes are taken by estimated acceptance: how often a child was right by its share, counted as requests go on.
- The table is a fixed array: of four places for a pair the one not recorded for longest makes room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

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
    record_text,
)
from vllm_ext.kernels.user_paths import UserPath
from vllm_ext.proposers import datastore
from vllm_ext.proposers.base import MethodOptions, Proposer, Request, VerifiedRows, practise
from vllm_ext.proposers.calibration import Calibration
from vllm_ext.proposers.datastore import Datastore
from vllm_ext.proposers.learned import restore_table
from vllm_ext.proposers.tree import DraftTree, Float32

PAIR = 2  # tokens of a context
WIDTH = 12  # successors kept for each pair
STEP, CAP = 0.04, 3.0  # what an occurrence adds to a weight, and the most it can be
CHUNK = 1 << 20  # tokens of a corpus read at once
MOST_OCCURRENCES = float(1 << 24)  # of a triple in a corpus that are counted: float32 tells no more apart

# Bounds between the classes of a child's share.
SHARES: Float32 = np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 0.98], np.float32)

TRUST = 0.75  # prior acceptance per share; from outputs of SmolLM2-135M


class AdedOptions(MethodOptions):
    """Options of ``aded``."""

    memory_mb: int = Field(
        default=64, ge=1, le=8192, description="most memory for the table, in 10^6 bytes; old pairs make room"
    )
    exploration: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="bonus of what is little drafted so far; 0: by probability alone",
    )
    datastore: UserPath | None = Field(
        default=None,
        min_length=1,
        description="folder of a store made by `vllm-ext datastore build`, whose texts the table begins with; "
        "none: it begins empty",
    )


class Aded(Proposer):
    """Trees of tri-grams.

    Args:
        vocab_size: number of token ids of the target.
        memory_mb: bound of the table, in 10^6 bytes.
        exploration: the bonus's factor.
    """

    summary: ClassVar[str] = "what most often followed the same two tokens so far"
    paper: ClassVar[str] = "arXiv 2407.12021"
    Options: ClassVar[type[MethodOptions]] = AdedOptions

    def __init__(self, vocab_size: int, memory_mb: int = 64, exploration: float = 0.0) -> None:
        self.vocab_size = vocab_size
        self._growing = Growing(WIDTH, 1.0, float(exploration))
        self.table = NgramTable.of_size(memory_mb * 10**6, WIDTH)
        middle = (np.array([0.0, *SHARES]) + np.array([*SHARES, 1.0])) / 2
        self.calibration = Calibration(TRUST * middle)
        self._requests: dict[str, int] = {}  # tokens whose text is in the table

    @classmethod
    def from_options(cls, options: AdedOptions, vocab_size: int) -> Aded:
        """See `Proposer.from_options`."""
        aded = cls(vocab_size, options.memory_mb, options.exploration)
        if options.datastore is not None:
            aded.read(datastore.open_for(options.datastore, vocab_size))
        return aded

    @classmethod
    def check(cls, options: AdedOptions, vocab_size: int, tokenizer_hash: Callable[[], str]) -> None:
        """See `Proposer.check`.

        Raises:
            DatastoreError: the store is damaged, or another tokenizer's.
        """
        if options.datastore is not None:
            datastore.check(options.datastore, vocab_size, tokenizer_hash())

    def read(self, store: Datastore) -> None:
        """Begin with a corpus: a pair's weights are the shares of what followed it there, of one `STEP`.

        Args:
            store: of ids in the vocabulary; not used afterwards.
        """
        for segment in store.segments:
            for start in range(0, len(segment.tokens), CHUNK):
                tokens = segment.tokens[max(start - PAIR, 0) : start + CHUNK].astype(np.int32)
                tokens[tokens == store.header.separator] = EMPTY  # no triple crosses the end of a document
                record_text(self.table, tokens, PAIR, 1.0, MOST_OCCURRENCES, self.vocab_size)
        totals = self.table.weights.sum(axis=1, keepdims=True)
        np.divide(STEP * self.table.weights, totals, out=self.table.weights, where=totals > 0.0)

    @property
    def memory_bytes(self) -> int:
        """The table, ``memory_mb`` rounded down to a power of two of pairs, and the counts."""
        return sum(part.nbytes for part in self.table) + self.calibration.nbytes

    def start(self, request: Request) -> None:
        """Record the prompt."""
        self._requests[request.request_id] = 0
        self._record(request)

    def _record(self, request: Request) -> None:
        """Record what is new of the text: each position once, whatever the scheduler did meanwhile."""
        recorded = self._requests[request.request_id]
        new = np.array(request.tokens[max(recorded - PAIR, 0) :], np.int32)
        record_text(self.table, new, PAIR, STEP, CAP, self.vocab_size)
        self._requests[request.request_id] = len(request.tokens)

    def observe(self, rows: VerifiedRows) -> None:
        """Judge the trees of the last `propose`."""
        self.calibration.judge(rows.request_ids, rows.emitted)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Record what has come, and expand each request's last pair."""
        for request in requests:
            self._record(request)
        classes = Classes(self.calibration.estimates[None], SHARES)
        trees = []
        for request in requests:
            context = np.full(PAIR, EMPTY, np.int32)
            last = request.tokens[-PAIR:]
            context[PAIR - len(last) :] = last
            grown = grow_tree(
                self.table,
                context,
                PAIR,
                classes,
                self._growing,
                request.budget_tokens,
                request.max_depth,
                request.chain,
            )
            self.calibration.drafted(request.request_id, grown)
            # With exploration the nodes stand in the order they were taken.
            make = DraftTree.from_nodes if self._growing.exploration > 0.0 else DraftTree
            trees.append(make(*grown[:3]))
        return trees

    def finish(self, request_id: str) -> None:
        """Forget a request; what it taught stays."""
        self._requests.pop(request_id, None)
        self.calibration.forget(request_id)

    def state_dict(self) -> dict[str, Learned]:
        """See `Proposer.state_dict`: the table, without its free slots, and the calibration."""
        return contents(self.table)._asdict() | self.calibration.state_dict()

    def load_state_dict(self, arrays: Mapping[str, Learned]) -> None:
        """See `Proposer.load_state_dict`."""
        check_names(arrays, (*Entries._fields, "hits", "trials"))
        self.calibration.load_state_dict(arrays)
        if self.table.clock[0]:  # the corpus is in what was saved
            self.table = NgramTable.empty(len(self.table.keys), WIDTH)
        restore_table(arrays, self.table, self.vocab_size, CAP)

    def warm_up(self) -> None:
        """Compile what would else stall the first request."""
        # A small one of the same types; numba's compiled code is shared by all.
        practise(type(self)(2, 1), np.zeros(3, np.int32))
