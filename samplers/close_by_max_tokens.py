# SPDX-License-Identifier: Apache-2.0
"""Rule close_by_max_tokens: structured output is whole when its tokens are used up.

A grammar says what may come, and not that anything ends: at its limit an answer is cut wherever it is, and JSON that is
cut is no JSON. Near the limit this rule lets only those tokens pass behind which the answer can still be brought to an
end in the tokens that are left: each is tried, the likeliest first, by looking for the shortest ending behind it
(`shortest_ending`). Where none of those tried can, the shortest ending itself comes.

Far from the limit nothing is tried: a token makes an answer's shortest ending longer by what it opens, and that is not
longer than the grammar's own text, unless that counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from vllm_ext.samplers import grammar
from vllm_ext.samplers.base import Asked, Row, Rule, RuleOptions, RuleParams, Vocabulary, text_of
from vllm_ext.samplers.grammar import Behind
from vllm_ext.samplers.json_place import Place
from vllm_ext.samplers.kept import Kept, digest
from vllm_ext.samplers.shortest_ending import Endings

NEAR = 8  # tokens beyond an ending and what one token may add to it
FAR = 256  # tokens before the limit behind which something may be tried
KEPT_BYTES = 4 << 20  # of endings
JSON = ("json", "structural_tag")  # kinds of grammars
WHITESPACE = re.compile(r'"max_whitespace_cnt": \d+')  # of a structural tag: makes no ending longer


class CloseOptions(RuleOptions):
    compile_seconds: float = grammar.COMPILE_SECONDS
    memory_mb: int = Field(default=64, ge=1, le=1 << 20, description="most memory for compiled grammars")
    always: bool = Field(
        default=False, description="whether all structured requests are under it that do not switch it off"
    )
    tried: int = Field(
        default=16,
        ge=1,
        le=256,
        description="most tokens of a row that are tried near the limit; of those behind them none passes there",
    )


class CloseParams(RuleParams):
    close_by_max_tokens: bool = Field(
        default=True, description="whether structured output is brought to its end within max_tokens"
    )


class CloseByMaxTokens(Rule):
    """Tries tokens near the limit."""

    waits = shares_grammars = True
    summary = "structured output is whole when max_tokens are used up"
    paper = "none"
    Options = CloseOptions
    Params = CloseParams
    example: ClassVar[Mapping[str, Any]] = {"close_by_max_tokens": True}

    def __init__(self, options: CloseOptions, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._tried = vocabulary, options.tried
        self._grammars = grammar.Grammars(vocabulary, options.memory_mb << 20, options.compile_seconds)
        self._endings = Endings(vocabulary)
        self._kept: Kept[list[int] | None] = Kept(KEPT_BYTES, lambda ending: 100 + 8 * len(ending or ()))

    @classmethod
    def from_options(cls, options: CloseOptions, vocabulary: Vocabulary) -> CloseByMaxTokens:
        return cls(options, vocabulary)

    def warm_up(self) -> None:
        self._grammars.warm_up()

    @classmethod
    def problem(cls, options: CloseOptions, params: CloseParams, asked: Asked) -> str | None:
        if asked.grammar is not None:
            return None
        if asked.structured:
            return (
                "close_by_max_tokens knows endings of json, json_object, regex, choice and grammar, as xgrammar has "
                "them, and not of what this request has in structured_outputs (response_format). Leave one of them out"
            )
        if params.model_fields_set:
            return (
                "close_by_max_tokens is for structured output, which this request does not ask for. Give it "
                "response_format or structured_outputs, or leave it out"
            )
        return None

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """See the base class.

        Raises:
            ValueError: no ending fits.
        """
        self.waiting = waiting = []
        patience = self.patience
        for place, row in enumerate(rows):
            if row.asked.grammar is None or row.asked.max_tokens is None or row.end in row.output:
                continue
            left = row.asked.max_tokens - len(row.output)
            if row.output and left > FAR:
                continue
            found = self._grammars.of_source(row, *row.asked.grammar, patience)
            if found is None:
                waiting.append(place)
                patience = 0.0
            elif left > 0 and (behind := found.behind(row.output)) is not None:
                self._close(logits[place], row, behind, left)

    def _close(self, logits: torch.Tensor, row: Row, behind: Behind, left: int) -> None:
        """Leave of a row what can still end; ``left``: tokens of the request, the row's own one among them."""
        assert row.asked.grammar is not None
        ending = self._ending(row, row.output, behind)
        if ending is None or len(ending) > left:
            if row.output:
                return
            what = (
                "none was found"
                if ending is None
                else f"the shortest that was found has {len(ending)} tokens"
            )
            raise ValueError(
                f"no ending of this grammar fits in max_tokens={row.asked.max_tokens}: {what}; allow more tokens, or "
                "leave close_by_max_tokens out"
            )
        source = WHITESPACE.sub("", row.asked.grammar[1])
        opened = FAR if any(map(str.isdigit, source)) else NEAR + len(source)
        if left > min(len(ending) + opened, FAR):
            return
        values, ids = logits.topk(min(self._tried, logits.shape[-1]))
        passes: list[int] = []
        for value, token in zip(values.tolist(), ids.tolist(), strict=True):
            if value == -torch.inf:
                break
            if self._closes(row, behind, token, left - 1):
                passes.append(token)
                if row.asked.temperature == 0.0 and not row.asked.penalizes:
                    break  # no other comes
        if not passes:
            passes = ending[:1] or [row.end]
        kept = logits[passes]
        logits.fill_(-torch.inf)
        logits[passes] = torch.where(kept == -torch.inf, 0.0, kept)

    def _closes(self, row: Row, behind: Behind, token: int, left: int) -> bool:
        """Whether an answer can be whole within so many tokens behind a token."""
        if token == row.end:
            return behind.ends()
        after = behind.fork()
        if not after.accept(token):
            return False
        ending = self._ending(row, [*row.output, token], after)
        return ending is not None and len(ending) <= left

    def _ending(self, row: Row, output: Sequence[int], behind: Behind) -> list[int] | None:
        assert row.asked.grammar is not None
        kind, source = row.asked.grammar

        def find() -> list[int] | None:
            place = Place().behind(text_of(self._vocabulary, output)) if kind in JSON else None
            return self._endings.shortest(behind, place)

        key = digest(kind, source, np.array(output, np.int32).tobytes())
        return self._kept.of(key, find)
