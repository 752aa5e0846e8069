# SPDX-License-Identifier: Apache-2.0
"""Which blocks before its own a row behind the prompt reads: the one interface of methods that forget, or read less.

A prompt reads all of itself. When its last token is read, and maybe later too, blocks are chosen by how much the
last tokens have attended to them, in all layers and heads together, as a block is the same one in all of them; the
others are read no more, and freed. The moment and the tokens asked depend on the request's own text alone: not on how
the prompt came in parts, on drafts, or on who else was there. What was chosen stands: a request that is preempted and
read again finds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from pydantic import Field

from vllm_ext.codecs.base import CodecOptions
from vllm_ext.codecs.halves import HalvesCodec

Float32 = npt.NDArray[np.float32]

ALL, RETRIEVED = (
    -1,
    -2,
)  # instead of a list of blocks: those before a row's own; what the row's queries choose


class EvictionPolicy(ABC):
    """Of one request.

    Args:
        prompt_len: tokens of its prompt.
    """

    def __init__(self, prompt_len: int) -> None:
        self.prompt_len = prompt_len
        self.evicted: list[tuple[int, list[int]]] = []  # all that `settle` has returned

    @abstractmethod
    def read_at(self, position: int) -> Sequence[int] | int:
        """Blocks before its own that the row at ``position`` reads, in their order; or ALL, or RETRIEVED."""

    def watched(self, begin: int, end: int) -> range:
        """Of the positions ``begin`` to ``end``, those whose attention is to be told to `take`."""
        return range(0)

    def take(self, position: int, mass: Float32) -> None:
        """What the settled row at ``position`` attends to: float32 ``[blocks before its own, or more]``."""

    def settle(self, end: int) -> list[tuple[int, list[int]]]:
        """All tokens before ``end`` are settled, and those watched were taken.

        Returns:
            What is forgotten from now on: the position of the first row that does not read some blocks, and these.
        """
        return []


class SelectionOptions(CodecOptions):
    budget: int = Field(
        default=1024,
        ge=1,
        description="how many tokens before its own block are kept, rounded up to whole blocks",
    )
    window: int = Field(
        default=64,
        ge=1,
        description="how many of the last tokens before its own block are kept whatever they weigh, rounded up to "
        "whole blocks",
    )
    watched: int = Field(
        default=32, ge=1, le=256, description="how many of the last tokens are asked what they attend to"
    )


class SelectingCodec(HalvesCodec):
    """Keys and values as they are, of blocks that are chosen; see `ScoredPolicy`."""

    ANSWERS_READ_LESS = True
    KERNELS = "streaming_llm"
    WHY_V1 = ""  # vLLM's own blocks, and one choice for all layers

    def __init__(self, options: SelectionOptions, block_size: int, head_size: int) -> None:
        super().__init__(options, block_size, head_size)
        self.budget_blocks = -(-options.budget // block_size)
        self.recent_blocks = -(-options.window // block_size)
        least = self.sink_blocks + self.recent_blocks
        if self.budget_blocks < least:
            raise ValueError(
                f"budget={options.budget} is not allowed with sinks={options.sinks}, window={options.window} and "
                f"blocks of {block_size}; allowed: {least * block_size} or more"
            )

    @property
    def window_blocks(self) -> int | None:
        """See the base class: no window is all that is read."""
        return None

    @property
    def watched_tokens(self) -> int:
        return int(self.options.watched)

    def choice(self, prompt_len: int) -> ScoredPolicy:
        return ScoredPolicy(self, prompt_len)

    def next_moment(self, after: int, prompt_len: int) -> int | None:
        """The least number of settled tokens above ``after`` at which is chosen; None: there is none."""
        return prompt_len if after < prompt_len else None

    def scores(self, before: Float32, mass: Float32) -> Float32:
        """Of blocks.

        Args:
            before: float32 ``[blocks of then]``, what this returned the last time.
            mass: float32 ``[blocks]``, the mean of what the watched rows attend to.
        """
        return mass


class ScoredPolicy(EvictionPolicy):
    """Of the blocks before the one that fills up the first and the last are kept, and those of the highest scores.

    Args:
        codec: of the cache.
        prompt_len: see the base class.
    """

    def __init__(self, codec: SelectingCodec, prompt_len: int) -> None:
        super().__init__(prompt_len)
        self._codec = codec
        self._chosen = 0  # settled tokens at the last moment
        self._scores: Float32 = np.zeros(0, np.float32)
        self._masses: dict[int, Float32] = {}  # by position, of rows behind the last moment's
        self._lists: dict[int, list[int]] = {}  # by block of a row behind the prompt

    def read_at(self, position: int) -> Sequence[int] | int:
        if position < self.prompt_len:
            return ALL
        block = position // self._codec.block_size
        if block not in self._lists:
            gone = {i for first, blocks in self.evicted if first <= position for i in blocks}
            self._lists[block] = [i for i in range(block) if i not in gone]
        return self._lists[block]

    def watched(self, begin: int, end: int) -> range:
        moment = self._codec.next_moment(self._chosen, self.prompt_len)
        if moment is None:
            return range(0)
        return range(max(begin, self._first_watched(moment)), min(end, moment))

    def take(self, position: int, mass: Float32) -> None:
        self._masses[position] = mass

    def settle(self, end: int) -> list[tuple[int, list[int]]]:
        found = []
        while (
            moment := self._codec.next_moment(self._chosen, self.prompt_len)
        ) is not None and moment <= end:
            if evicted := self._choose(moment):
                self.evicted.append((moment, evicted))
                found.append((moment, evicted))
        return found

    def _first_watched(self, moment: int) -> int:
        return max(moment - self._codec.watched_tokens, self._chosen)

    def _choose(self, moment: int) -> list[int]:
        """Returns what is not kept."""
        codec, block = self._codec, moment // self._codec.block_size
        mass = np.zeros(block, np.float32)
        rows = range(self._first_watched(moment), moment)
        for position in rows:  # in their order: sums of floats depend on it
            of_row = self._masses.pop(position)[:block]
            mass[: len(of_row)] += of_row
        self._scores = codec.scores(self._scores, mass / np.float32(len(rows)))
        self._chosen = moment
        kept = self.read_at(moment)
        # Made before something was forgotten: of a prompt's last block, maybe.
        self._lists.clear()
        there = range(block) if isinstance(kept, int) else kept
        safe = {i for i in there if i < codec.sink_blocks or i >= block - codec.recent_blocks}
        others = sorted((i for i in there if i not in safe), key=lambda i: (-self._scores[i], i))
        return sorted(others[max(codec.budget_blocks - len(safe), 0) :])


def lists_of(rows: Sequence[Sequence[int] | int]) -> tuple[npt.NDArray[np.int32], ...]:
    """What `read_at` said of some rows, as `Reading` has it.

    Returns:
        int32 ``[num_lists, most]``, ``[num_lists]`` lengths, and ``[num_rows]`` places among the lists.
    """
    places: dict[int, int] = {}  # by identity: rows of one block share theirs
    lists: list[Sequence[int]] = []
    of_row = np.empty(len(rows), np.int32)
    for i, read in enumerate(rows):
        if isinstance(read, int):
            of_row[i] = read
        else:
            if id(read) not in places:
                places[id(read)] = len(lists)
                lists.append(read)
            of_row[i] = places[id(read)]
    flat = np.zeros((max(len(lists), 1), max([1, *map(len, lists)])), np.int32)
    for i, read in enumerate(lists):
        flat[i, : len(read)] = read
    return flat, np.array([*map(len, lists)] or [0], np.int32), of_row
