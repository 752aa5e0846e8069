# SPDX-License-Identifier: Apache-2.0
"""Aggressive Decoding: draft the rest of the prompt from where the output has come to in copying it.

A pointer into the prompt moves on while the output agrees with it, and what stands there is drafted. Where the output
goes another way the longest end of the text that occurs in the prompt sets it again. For answers that rewrite
their input: corrections, edits of code, quotations. No weights.

Source: "Lossless Acceleration for Seq2seq Generation with Aggressive Decoding", arXiv 2205.10350, section 3; for
language models "Inference with Reference", arXiv 2304.04487 (LLMA).

Deviations, all ours:

- The source is the whole prompt, and a first match, which may begin before the output, starts the copy; the papers know
  the source and begin with its first token.
- After a token that differs two further branches go on behind the token it replaced and before it, as if it had
  been inserted, until one of them is right (``edits``).
- The draft has no fixed length: how often a copied token is right, by how the pointer was set and how many tokens
  agreed before, is counted as requests go on, and the budget cuts the chain by that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from vllm_ext.kernels.copy_tree import copy_tree
from vllm_ext.kernels.learned_arrays import Learned, check_names
from vllm_ext.kernels.suffix_index import SuffixIndex, append, find
from vllm_ext.proposers.base import MethodOptions, Proposer, Request, VerifiedRows, practise
from vllm_ext.proposers.calibration import Calibration, Float64
from vllm_ext.proposers.tree import DraftTree, Int32

LONGEST_MATCH = 32  # most last tokens that are compared
# Bounds between the classes of how many tokens agreed.
LENGTHS: npt.NDArray[np.int64] = np.array([1, 2, 3, 4, 6, 9, 14, 24], np.int64)
UNIQUE, AMBIGUOUS, SKIP, INSERT = range(4)  # how a pointer was set

# Prior acceptance by how the pointer was set and class of length. From outputs of SmolLM2-135M.
TRUST: Float64 = np.array(
    [
        [0.2, 0.4, 0.65, 0.7, 0.75, 0.75, 0.9, 0.9, 0.97],
        [0.12, 0.4, 0.6, 0.65, 0.65, 0.75, 0.8, 0.9, 0.95],
        [0.02, 0.05, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4],
        [0.01, 0.02, 0.05, 0.05, 0.05, 0.1, 0.1, 0.1, 0.1],
    ]
)


class InputCopyOptions(MethodOptions):
    """Options of ``input_copy``."""

    min_match: int = Field(
        default=1,
        ge=1,
        le=8,
        description="fewest last tokens that must occur in the prompt to copy from there",
    )
    resync: Literal["latest", "unique"] = Field(
        default="latest",
        description="of several longest matches take the latest, or, as the paper, none",
    )
    edits: bool = Field(
        default=True, description="after a token that differs also try to skip one of the prompt's, and none"
    )


class _Pointer(NamedTuple):
    """A copy under way."""

    at: int  # index in the prompt of the token to come
    length: int  # tokens before it that agree with the text, but for edits
    kind: int

    def follow(self, prompt: Int32, new: Int32) -> int:
        """How many of some new tokens agree with the prompt."""
        there = prompt[self.at : self.at + len(new)]
        differs = there != new[: len(there)]
        return int(differs.argmax()) if differs.any() else len(there)

    def moved(self, count: int) -> _Pointer:
        """Behind ``count`` more tokens that agreed: what was a guess at an edit is a copy then."""
        kind = UNIQUE if count and self.kind in (SKIP, INSERT) else self.kind
        return _Pointer(self.at + count, self.length + count, kind)


@dataclass(slots=True)
class _Request:
    """What is remembered of a request from step to step."""

    prompt: SuffixIndex
    num_tokens: int = 0  # tokens that the pointers know
    # The first that agrees with the next tokens goes on.
    pointers: list[_Pointer] = field(default_factory=list)


class InputCopy(Proposer):
    """Chains of what the prompt says next.

    Args:
        vocab_size: number of token ids of the target.
        min_match: fewest tokens that set a pointer.
        resync: "latest" or "unique".
        edits: whether to branch after a difference.
    """

    summary: ClassVar[str] = "the rest of the prompt, where the output copies it"
    paper: ClassVar[str] = "arXiv 2205.10350"
    Options: ClassVar[type[MethodOptions]] = InputCopyOptions

    def __init__(
        self, vocab_size: int, min_match: int = 1, resync: str = "latest", edits: bool = True
    ) -> None:
        self.vocab_size = vocab_size
        self._arguments = (min_match, resync, edits)
        self._min_match, self._unique, self._edits = min_match, resync == "unique", edits
        self._tail = SuffixIndex.empty(2 * LONGEST_MATCH)  # a text's last tokens, for `find`
        self.calibration = Calibration(TRUST)
        self._requests: dict[str, _Request] = {}

    @classmethod
    def from_options(cls, options: InputCopyOptions, vocab_size: int) -> InputCopy:
        """See `Proposer.from_options`."""
        return cls(vocab_size, options.min_match, options.resync, options.edits)

    @property
    def memory_bytes(self) -> int:
        """The counts. A request adds 52 to 104 bytes per token of its prompt."""
        return sum(part.nbytes for part in self._tail) + self.calibration.nbytes

    def start(self, request: Request) -> None:
        """Index the prompt."""
        prompt = np.array(request.tokens[: request.num_prompt_tokens], np.int32)
        index = SuffixIndex.empty(max(1 << len(prompt).bit_length(), 16))
        append(index, prompt, 0, self.vocab_size)
        self._requests[request.request_id] = _Request(index)

    def observe(self, rows: VerifiedRows) -> None:
        """Judge the chains of the last `propose`."""
        self.calibration.judge(rows.request_ids, rows.emitted)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Move each request's pointers, and copy from there."""
        estimates = self.calibration.estimates
        trees = []
        for request in requests:
            state = self._requests[request.request_id]
            self._move(state, request)
            tree = copy_tree(
                np.array(request.tokens[: request.num_prompt_tokens], np.int32),
                np.array(state.pointers, np.int64).reshape(-1, len(_Pointer._fields)),
                estimates,
                LENGTHS,
                self.vocab_size,
                request.budget_tokens,
                request.max_depth,
                request.chain,
            )
            self.calibration.drafted(request.request_id, tree)
            trees.append(DraftTree(*tree[:3]))
        return trees

    def _move(self, state: _Request, request: Request) -> None:
        """Follow the new tokens, or set the pointers again."""
        prompt = request.tokens[: request.num_prompt_tokens]
        new = request.tokens[state.num_tokens :]
        if not len(new):
            return
        lost, state.num_tokens = state.pointers, len(request.tokens)
        agreed = [pointer.follow(prompt, new) for pointer in lost]
        for pointer, count in zip(lost, agreed, strict=True):
            if count == len(new):
                state.pointers = [pointer.moved(count)]
                return
        state.pointers = self._resync(state, request.tokens)
        if lost and self._edits:
            differs, length = lost[0].at + agreed[0], lost[0].length + agreed[0]
            since = new[agreed[0] + 1 :]  # what came after the token that differs
            for at, kind in ((differs + 1, SKIP), (differs, INSERT)):
                pointer = _Pointer(at, length, kind)
                if pointer.follow(prompt, since) == len(since):
                    state.pointers.append(pointer.moved(len(since)))

    def _resync(self, state: _Request, tokens: Int32) -> list[_Pointer]:
        """Where the longest end of the text occurs in the prompt, if it does."""
        last = tokens[-LONGEST_MATCH:]
        self._tail.log[1 : len(last) + 1] = last  # position 0 is a separator
        self._tail.end[0] = len(last) + 1
        positions, lengths = find(state.prompt, self._tail, self._min_match, LONGEST_MATCH)
        if not len(positions):
            return []
        longest = positions[lengths == lengths.max()]
        if len(longest) > 1 and self._unique:
            return []
        # Positions count from 1: that of a match's last token is the index of the next.
        return [_Pointer(int(longest.max()), int(lengths.max()), AMBIGUOUS if len(longest) > 1 else UNIQUE)]

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)
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
        practise(type(self)(2, 1, *self._arguments[1:]), np.zeros(3, np.int32))
