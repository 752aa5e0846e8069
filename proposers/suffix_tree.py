# SPDX-License-Identifier: Apache-2.0
"""SuffixDecoding: draft what followed the same text before, here or in other requests' answers.

The request's last tokens are looked up in its own prompt and output, and in the outputs of finished requests. What
followed the occurrences is a tree of continuations with counts; its most probable part is drafted. No weights.

Source: "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", arXiv 2411.04975, section 4.

Deviations, all ours:

- Hash chains over a log instead of suffix trees (see `kernels/suffix_index.py`): of each of the two texts at most 64
  occurrences count, the longest matches' first and then the latest, and the log is as large as it is told to be.
- The paper drafts from one match length, chosen by the sum of its count ratios, and from one of the two texts. Here
  each occurrence weighs the square of its match length, both texts vote in one tree, and the ratio is only a class:
  how often a class is right is counted as requests go on.
- The number of nodes is not a multiple of the match length: the budget cuts the tree by the estimated chances.
- Only finished outputs are shared, and of a prompt no more than the last tokens, as context of the first ones. Aborted
  requests' outputs too: the target wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from vllm_ext.kernels.learned_arrays import Learned, check_array, check_names
from vllm_ext.kernels.suffix_index import (
    BYTES_PER_TOKEN,
    LONGEST_ORDER,
    SEPARATOR,
    Estimates,
    SuffixIndex,
    append,
    contents,
    grow_tree,
    rebuild,
)
from vllm_ext.proposers.base import MethodOptions, Proposer, Request, VerifiedRows, practise
from vllm_ext.proposers.calibration import Calibration, Float64
from vllm_ext.proposers.tree import DraftTree, Int32

# Bounds between the classes of a match's length in tokens, and of a child's share.
LENGTHS: npt.NDArray[np.int64] = np.array([1, 2, 3, 4, 6, 9, 14], np.int64)
SHARES: Float64 = np.array([0.05, 0.12, 0.2, 0.28, 0.4, 0.55, 0.7, 0.82, 0.92])

# Prior odds of a lone occurrence by source (own, shared, both) and class of length. From outputs of SmolLM2-135M.
TRUST = (
    (0.8, 1.5, 2.0, 3.0, 3.5, 5.0, 6.0, 10.0),
    (0.15, 0.35, 0.5, 0.8, 0.9, 1.0, 1.2, 2.0),
    (0.8, 1.5, 2.5, 3.0, 4.0, 6.0, 10.0, 10.0),
)


class SuffixOptions(MethodOptions):
    """Options of ``suffix_tree``."""

    memory_mb: int = Field(
        default=64,
        ge=1,
        le=8192,
        description="most memory for the outputs of finished requests, in 10^6 bytes; the oldest make room",
    )
    min_match: int = Field(
        default=1, ge=1, le=8, description="fewest last tokens an occurrence has in common with the request"
    )
    max_match: int = Field(
        default=32, ge=8, le=128, description="most last tokens that are compared: longer matches count alike"
    )


@dataclass(slots=True)
class _Request:
    """What is remembered of a request from step to step."""

    number: int  # requests are counted as they start
    num_prompt_tokens: int
    index: SuffixIndex  # prompt and output

    def extend(self, tokens: Int32, vocab_size: int) -> None:
        """Append what is not in the index yet: each position once, whatever the scheduler did meanwhile."""
        if len(tokens) >= len(self.index.log):
            self.index = SuffixIndex.empty(_power_of_two(len(tokens) * 5 // 4))
        new = np.array(tokens[self.index.end[0] - 1 :], np.int32)
        append(self.index, new, 0, vocab_size)


class SuffixDecoding(Proposer):
    """Trees of what followed the same text before.

    Args:
        vocab_size: number of token ids of the target.
        memory_mb: bound of the shared index, in 10^6 bytes.
        min_match: fewest tokens in common.
        max_match: most tokens compared.
    """

    summary: ClassVar[str] = "what followed the same text in this request or past answers"
    paper: ClassVar[str] = "arXiv 2411.04975"
    Options: ClassVar[type[MethodOptions]] = SuffixOptions

    def __init__(self, vocab_size: int, memory_mb: int = 64, min_match: int = 1, max_match: int = 32) -> None:
        self.vocab_size = vocab_size
        self._matches = min_match, max_match
        self.shared = SuffixIndex.empty(1 << (memory_mb * 10**6 // BYTES_PER_TOKEN).bit_length() - 1)
        self.calibration = Calibration(_prior(), num_depths=1)
        self._requests: dict[str, _Request] = {}
        self._num_started = 0
        self._finished: list[_Request] = []

    @classmethod
    def from_options(cls, options: SuffixOptions, vocab_size: int) -> SuffixDecoding:
        """See `Proposer.from_options`."""
        return cls(vocab_size, options.memory_mb, options.min_match, options.max_match)

    @property
    def memory_bytes(self) -> int:
        """The shared index, ``memory_mb`` rounded down to a power of two of tokens. A request adds its own."""
        return sum(part.nbytes for part in self.shared) + self.calibration.nbytes

    @property
    def estimates(self) -> Estimates:
        """How often a child was accepted when its parent was, by source, match length and share."""
        return Estimates(self.calibration.estimates[..., 0], LENGTHS, SHARES)

    def start(self, request: Request) -> None:
        """Index the prompt."""
        state = _Request(self._num_started, request.num_prompt_tokens, SuffixIndex.empty(256))
        state.extend(request.tokens, self.vocab_size)
        self._requests[request.request_id] = state
        self._num_started += 1

    def observe(self, rows: VerifiedRows) -> None:
        """Judge the trees of the last `propose`."""
        self.calibration.judge(rows.request_ids, rows.emitted)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Grow each request's tree from its root, always the most probable node next."""
        self._share_finished()
        estimates = self.estimates
        trees = []
        for request in requests:
            state = self._requests[request.request_id]
            state.extend(request.tokens, self.vocab_size)
            tree = grow_tree(
                state.index,
                self.shared,
                estimates,
                *self._matches,
                request.budget_tokens,
                request.max_depth,
                request.chain,
            )
            self.calibration.drafted(request.request_id, tree)
            trees.append(DraftTree(*tree[:3]))
        return trees

    def finish(self, request_id: str) -> None:
        """Forget a request; its output is shared from the next `propose` on."""
        self.calibration.forget(request_id)
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._finished.append(state)

    def _share_finished(self) -> None:
        """Append the finished outputs, in the order their requests started.

        vLLM's worker finishes requests in the order of a set, which differs between tensor-parallel ranks; their
        drafts must not.
        """
        for text, first in self._finished_texts():
            append(self.shared, text, first, self.vocab_size)
        self._finished.clear()

    def _finished_texts(self) -> Iterator[tuple[Int32, int]]:
        """What is to be shared, and how many tokens of it are context only."""
        for state in sorted(self._finished, key=lambda finished: finished.number):
            root = state.num_prompt_tokens  # position of the prompt's last token: they count from 1
            start = max(root - LONGEST_ORDER + 1, 1)
            yield np.append(state.index.log[start : state.index.end[0]], np.int32(SEPARATOR)), root - start

    def state_dict(self) -> dict[str, Learned]:
        """See `Proposer.state_dict`: the outputs of finished requests and the calibration.

        Of the shared index only the text: 5 bytes a token instead of 52, and nothing in it that could be wrong.
        """
        parts = [contents(self.shared)]
        for text, first in self._finished_texts():
            parts.append((text, np.arange(len(text)) >= first))
        tokens, findable = (
            np.concatenate(arrays)[-len(self.shared.log) :] for arrays in zip(*parts, strict=True)
        )
        return {"tokens": tokens, "findable": findable, **self.calibration.state_dict()}

    def load_state_dict(self, arrays: Mapping[str, Learned]) -> None:
        """See `Proposer.load_state_dict`; of a text longer than the index its end."""
        check_names(arrays, ("tokens", "findable", "hits", "trials"))
        tokens, findable = arrays["tokens"], arrays["findable"]
        check_array("tokens", tokens, (None,), np.int32, SEPARATOR, self.vocab_size - 1)
        check_array("findable", findable, (len(tokens),), np.bool_, 0, 1)
        self.calibration.load_state_dict(arrays)
        self.shared = rebuild(len(self.shared.log), tokens, findable, self.vocab_size)

    def warm_up(self) -> None:
        """Compile what would else stall the first request."""
        # A small one of the same types; numba's compiled code is shared by all.
        practise(type(self)(2, 1, *self._matches), np.zeros(3, np.int32))


def _power_of_two(least: int) -> int:
    """The smallest power of two that is at least ``least``."""
    return 1 << (least - 1).bit_length()


def _prior() -> Float64:
    """``[3, lengths, shares]`` chance of acceptance before anything was counted: odds of the share times trust."""
    share = (np.array([0.0, *SHARES]) + np.array([*SHARES, 1.0])) / 2  # a class's middle
    odds = np.array(TRUST)[:, :, None] * share / (1 - share)
    chances: Float64 = odds / (1 + odds)
    return chances
