# SPDX-License-Identifier: Apache-2.0
"""REST: draft what followed the same words in a corpus.

The longest end of a request's text that occurs in the datastore is looked up, from ``max_match`` down to
``min_match`` tokens. What followed its occurrences is a tree, each node weighted by the number of continuations through
it; the tree is cut to the budget. No weights; the datastore is mapped from disk and shared by all processes of a host.

Source: "REST: Retrieval-Based Speculative Decoding", arXiv 2311.08252, section 3.

Deviations, all ours:

- Nodes are taken by estimated acceptance, not by weight alone: how often a node is right when its parent was, counted
  as the requests go on by its share of its parent's weight, by how large that is, and by the length of the match. So
  a node's probability means the same as other drafters', and budgets of 5 to 16 nodes follow one sure path
  or spread over several unsure ones; the paper keeps the 64 heaviest.
- Continuations end where their document does.
- Of more than ``max_occurrences`` occurrences some are taken, evenly spaced over them in the order of the text before;
  the authors' code takes the first 5000 in that of what follows, which prefers small token ids.
- All lengths are tried in one search, in an array sorted by the text before a position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from vllm_ext.kernels.learned_arrays import Learned, check_names
from vllm_ext.kernels.suffix_array import SORTED_TOKENS, continuations, find, grow_tree
from vllm_ext.kernels.user_paths import UserPath
from vllm_ext.proposers import datastore
from vllm_ext.proposers.base import MethodOptions, Proposer, Request, VerifiedRows, practise
from vllm_ext.proposers.calibration import Calibration, Float64
from vllm_ext.proposers.datastore import Datastore
from vllm_ext.proposers.tree import DraftTree, Float32, Int32

# Bounds between the classes of an estimate: length of the match, weight of the parent, share of it.
LENGTHS = (2, 3, 4, 6, 10)
EVIDENCE: Int32 = np.array([1, 7], np.int32)
SHARES: Float32 = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 0.95], np.float32)

# Prior acceptance: a share's middle, times the trust in matches of that length (rows) with that evidence (columns).
# Rounded from Python files and a store of others of the same packages, by scripts/bench_datastore.py's walk.
TRUST: Float64 = np.array(
    [
        [0.2, 0.4, 0.6],
        [0.3, 0.45, 0.6],
        [0.4, 0.5, 0.6],
        [0.5, 0.6, 0.65],
        [0.6, 0.7, 0.7],
        [0.85, 0.85, 0.85],
    ]
)


class RestOptions(MethodOptions):
    """Options of ``rest``."""

    datastore: UserPath = Field(description="folder of the store, made by `vllm-ext datastore build`")
    max_match: int = Field(
        default=16, ge=1, le=SORTED_TOKENS, description="longest context looked up, in tokens"
    )
    min_match: int = Field(
        default=2,
        ge=1,
        le=SORTED_TOKENS,
        validate_default=True,
        description="shortest context worth a draft; at most max_match",
    )
    max_occurrences: int = Field(
        default=64, ge=1, le=4096, description="most occurrences whose continuations make the tree"
    )
    max_continuation: int = Field(default=12, ge=1, le=32, description="most tokens of a continuation")

    @field_validator("min_match")
    @classmethod
    def _at_most_max_match(cls, min_match: int, info: ValidationInfo) -> int:
        if min_match > info.data.get("max_match", min_match):
            raise ValueError(f"it must be at most max_match={info.data['max_match']}")
        return min_match


class Rest(Proposer):
    """Trees of what followed the longest match.

    Args:
        store: what to search.
        max_match: longest context looked up, 1 to `SORTED_TOKENS`.
        min_match: shortest context worth a draft.
        max_occurrences: most occurrences whose continuations make the tree.
        max_continuation: most tokens of a continuation.
    """

    summary: ClassVar[str] = "what followed the same words in a corpus on disk"
    paper: ClassVar[str] = "arXiv 2311.08252"
    Options: ClassVar[type[MethodOptions]] = RestOptions

    def __init__(
        self,
        store: Datastore,
        max_match: int = 16,
        min_match: int = 2,
        max_occurrences: int = 64,
        max_continuation: int = 12,
    ) -> None:
        self.store = store
        self._arguments = (max_match, min_match, max_occurrences, max_continuation)
        self.calibration = Calibration(self._prior())

    @classmethod
    def from_options(cls, options: RestOptions, vocab_size: int) -> Rest:
        """See `Proposer.from_options`.

        Raises:
            DatastoreError: the store cannot be used. Its checksums are not looked at, see `check`.
        """
        return cls(
            datastore.open_for(options.datastore, vocab_size),
            options.max_match,
            options.min_match,
            options.max_occurrences,
            options.max_continuation,
        )

    @classmethod
    def check(cls, options: RestOptions, vocab_size: int, tokenizer_hash: Callable[[], str]) -> None:
        """See `Proposer.check`; reads the whole store, which also brings it into memory.

        Raises:
            DatastoreError: the store is damaged, or another tokenizer's.
        """
        datastore.check(options.datastore, vocab_size, tokenizer_hash())

    @property
    def memory_bytes(self) -> int:
        """The estimates; the store is the page cache's, one copy for all processes of the host."""
        return self.calibration.nbytes

    @staticmethod
    def _prior() -> Float64:
        """``[groups]`` chance of acceptance before anything was counted; groups as `grow_tree` has them."""
        middle = (np.array([0.01, *SHARES]) + np.array([*SHARES, 1.0])) / 2
        prior: Float64 = np.multiply.outer(TRUST, middle).reshape(-1)
        return prior

    def observe(self, rows: VerifiedRows) -> None:
        """Judge the trees of the last `propose`."""
        self.calibration.judge(rows.request_ids, rows.emitted)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Look up each request's last tokens."""
        estimates = self.calibration.estimates
        return [self._draft(request, estimates) for request in requests]

    def _draft(self, request: Request, estimates: Float32) -> DraftTree:
        max_match, min_match, _, max_continuation = self._arguments
        self.calibration.forget(request.request_id)
        if request.budget_tokens <= 0 or request.max_depth <= 0:
            return DraftTree.empty()
        # Of exactly this type, or numba would compile once more, in the middle of a step.
        context = np.ascontiguousarray(request.tokens[-max_match:], np.int32)
        separator = self.store.header.separator
        found = [find(text.tokens, text.suffixes, separator, context) for text in self.store.segments]
        length = max((longest for longest, _, _ in found), default=0)
        if length < min_match:
            return DraftTree.empty()
        grown = grow_tree(
            self._continuations(found, length, min(max_continuation, request.max_depth)),
            sum(length > bound for bound in LENGTHS),
            estimates,
            SHARES,
            EVIDENCE,
            request.budget_tokens,
            request.max_depth,
            request.chain,
        )
        self.calibration.drafted(request.request_id, grown)
        return DraftTree(*grown[:3])

    def _continuations(self, found: list[tuple[int, int, int]], length: int, width: int) -> Int32:
        """int32 ``[num_rows, width]``: what followed the matches of that length, in all segments."""
        total = sum(last - first for longest, first, last in found if longest == length)
        rows = np.empty((min(total, self._arguments[2]), width), np.int32)
        before, written = 0, 0
        for text, (longest, first, last) in zip(self.store.segments, found, strict=True):
            if longest == length:
                written = continuations(
                    text.tokens,
                    text.suffixes,
                    self.store.header.separator,
                    first,
                    last,
                    before,
                    total,
                    rows,
                    written,
                )
                before += last - first
        return rows

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        self.calibration.forget(request_id)

    def state_dict(self) -> dict[str, Learned]:
        """See `Proposer.state_dict`: the calibration."""
        return self.calibration.state_dict()

    def load_state_dict(self, arrays: Mapping[str, Learned]) -> None:
        """See `Proposer.load_state_dict`."""
        check_names(arrays, ("hits", "trials"))
        self.calibration.load_state_dict(arrays)

    def warm_up(self) -> None:
        """Compile what would else stall the first request."""
        tokens = self.store.segments[0].tokens[:2].astype(np.int32)  # a separator, and a token that is found
        practise(type(self)(self.store, max_match=1, min_match=1), tokens)
