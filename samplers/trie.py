# SPDX-License-Identifier: Apache-2.0
"""Answers out of a closed set: the whole output is one of the sequences of a trie, then the end token.

The mask of a row is its state's edges, whatever the number of sequences. Where one sequence is left the rest of it is
certain, which drafts make use of. A token's probability is the model's among those that are allowed, so that
alternatives are weighed step by step, as in any constrained decoding; a string counts as the tokens that the tokenizer
makes of it alone.

Source: STATIC, arXiv 2602.22647, whose masks serve beam search; here they serve sampling and greedy decoding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field, field_validator

from vllm_ext.kernels import trie as kernel
from vllm_ext.kernels.token_mask import mask_rows
from vllm_ext.kernels.trie import DEAD, Int32, Trie
from vllm_ext.kernels.user_paths import expand
from vllm_ext.samplers import trie_file
from vllm_ext.samplers.base import (
    Asked,
    Row,
    Rule,
    RuleOptions,
    RuleParams,
    Vocabulary,
    contradiction,
    rows_by,
)
from vllm_ext.samplers.messages import quoted

# States with more edges have their masks kept, the first levels' then, where most answers part: copying one of 49,152
# tokens takes as long as setting some hundred bits.
WIDE = 512
WIDE_MASKS = 4096  # 6 kB each


class TrieOptions(RuleOptions):
    files: dict[str, str] = Field(
        min_length=1,
        description="the sets that requests can name, and the file of each, made by `vllm-ext trie build`",
    )

    @field_validator("files")
    @classmethod
    def _absolute(cls, files: dict[str, str]) -> dict[str, str]:
        """A worker may have another working directory."""
        return {name: _absolute(name, file) for name, file in files.items()}


def _absolute(name: str, file: str) -> str:
    try:
        return str(expand(file))
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None


class TrieParams(RuleParams):
    trie: str = Field(description="name of the set that the answer is to be out of")


class TrieRule(Rule):
    """One of many sequences, whole."""

    summary = "the answer is one of a set of thousands or millions"
    paper = "arXiv 2602.22647"
    closed = True
    Options = TrieOptions
    Params = TrieParams
    example: ClassVar[Mapping[str, Any]] = {"trie": "answers"}

    def __init__(self, tries: Mapping[str, Trie], vocab_size: int) -> None:
        self.tries = tries
        self._words = -(-vocab_size // 32)  # of a mask
        self._wide_mask = functools.lru_cache(WIDE_MASKS)(self._fill_one)

    @classmethod
    def from_options(cls, options: TrieOptions, vocabulary: Vocabulary) -> TrieRule:
        """See the base class; maps the files."""
        tries = {name: trie_file.open_trie(file)[0] for name, file in options.files.items()}
        return cls(tries, vocabulary.size)

    @classmethod
    def check(cls, options: TrieOptions, vocab_size: int, tokenizer_hash: Callable[[], str]) -> None:
        """See the base class; reads the files."""
        for name, file in options.files.items():
            trie_file.check(f"files.{name}={file!r}", file, vocab_size, tokenizer_hash)

    @classmethod
    def problem(cls, options: TrieOptions, params: TrieParams, asked: Asked) -> str | None:
        if params.trie not in options.files:
            known = ", ".join(map(repr, options.files))
            return f"trie={quoted(params.trie)} is not allowed; allowed: {known}"
        return contradiction(f"trie={quoted(params.trie)}", "the set", asked)

    def warm_up(self) -> None:
        one = np.zeros(1, dtype=np.int32)
        for trie in self.tries.values():
            kernel.follow(trie, one)
            kernel.advance(trie, one, one)
            kernel.fill_masks(trie, one, 0, np.zeros((1, self._words), dtype=np.int32))

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        for (name, end), places in rows_by(rows, lambda row: (row.params.trie, row.end)).items():
            places = [place for place in places if end not in rows[place].output]
            states = np.array(
                [kernel.follow(self.tries[name], _array(rows[place].output)) for place in places],
                dtype=np.int32,
            )
            masks = np.empty((len(places), self._words), dtype=np.int32)
            wide = self._num_edges(name, states) > WIDE
            kernel.fill_masks(self.tries[name], np.where(wide, np.int32(DEAD), states), end, masks)
            for row in np.flatnonzero(wide).tolist():
                masks[row] = self._wide_mask(name, int(states[row]), end)
            # Never reached by tokens that were drawn from these masks; should it be, the request ends.
            masks.view(np.uint32)[states == DEAD, end >> 5] = 1 << (end & 31)
            if places:
                mask_rows(logits, places, torch.from_numpy(masks))

    def _num_edges(self, name: str, states: Int32) -> Int32:
        first_edge = self.tries[name].first_edge
        edges: Int32 = first_edge[np.maximum(states, 0) + 1] - first_edge[np.maximum(states, 0)]
        return np.where(states == DEAD, 0, edges)

    def _fill_one(self, name: str, state: int, end: int) -> Int32:
        masks = np.empty((1, self._words), dtype=np.int32)
        kernel.fill_masks(self.tries[name], np.array([state], dtype=np.int32), end, masks)
        one: Int32 = masks[0]
        return one

    def constraint(self, row: Row) -> TrieConstraint | None:
        return TrieConstraint(self.tries[row.params.trie], row.output, row.end)


class TrieConstraint:
    """A `Constraint`: the states behind an output, the last one that of all of it."""

    def __init__(self, trie: Trie, output: Sequence[int], end: int) -> None:
        self._trie, self._end = trie, end
        self._states = [DEAD if end in output else kernel.follow(trie, _array(output))]

    def accept(self, token: int) -> bool:
        """See `Constraint`."""
        state = self._states[-1]
        if state != DEAD and token == self._end and self._trie.final[state]:
            behind = DEAD
        else:
            one = np.array([state], dtype=np.int32), np.array([token], dtype=np.int32)
            behind = int(kernel.advance(self._trie, *one)[0])
            if behind == DEAD:
                return False
        self._states.append(behind)
        return True

    def rollback(self, num_tokens: int) -> None:
        """See `Constraint`."""
        if num_tokens:
            del self._states[-num_tokens:]

    def forced(self, most: int) -> list[int]:
        """See `Constraint`; the end token among them."""
        tokens: list[int] = []
        state = self._states[-1]
        while len(tokens) < most and state != DEAD:
            edge, behind = self._trie.first_edge[state : state + 2].tolist()
            if self._trie.final[state]:
                if edge == behind:
                    tokens.append(self._end)
                break
            if behind - edge > 1:
                break
            tokens.append(int(self._trie.tokens[edge]))
            state = edge + 1
        return tokens


def _array(tokens: Sequence[int]) -> Int32:
    return np.array(tokens, dtype=np.int32)
