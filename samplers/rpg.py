# SPDX-License-Identifier: Apache-2.0
"""Code that repeats its structure: what would open another copy of a block that was just repeated is made less likely.

Not the same text but the same kinds of words in a row count as a copy: ``elif x == 1: return 2`` and ``elif y == 3:
return 4``. Only the token that would open a copy is touched, so that one that was begun is ended well.

Source: "Rethinking Repetition Problems of LLMs in Code Generation", arXiv 2505.10402 (RPG). Deviations: what is
compared are lexical classes and not a grammar's rules, so that no parser is needed and code may be incomplete; the
penalty is ``rpg * log(1 + copies)``, as the paper's form was not to be had.
"""

from __future__ import annotations

import functools
import keyword
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from pydantic import Field

from vllm_ext.kernels.sparse import Int32
from vllm_ext.samplers.base import Asked, Row, Rule, RuleOptions, RuleParams, Vocabulary, open_code, text_of

OTHERS = "case catch const default do enum extends final function interface let new private protected public static "
OTHERS += "struct switch this throw typedef var void"  # keywords of C, Java and JavaScript that Python lacks
KEYWORDS = frozenset(keyword.kwlist).union(OTHERS.split())
NEWLINE = "\n"
NAMED = frozenset({"word", "string", "number"})
LEXEMES = re.compile(
    r"""(?P<none>\#[^\n]*|//[^\n]*|/\*.*?\*/|[^\S\n]+)
    |(?P<newline>(?:[^\S\n]*\n)+)
    |(?P<string>\"{3}.*?\"{3}|'{3}.*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<number>\d[\w.]*)
    |(?P<word>\w+)
    |(?P<other>[=!<>+*/%&|^-]=|->|=>|\*\*|<<|>>|&&|\|\||\+\+|--|::|.)""",
    re.VERBOSE | re.DOTALL,
)


class RpgOptions(RuleOptions):
    """Of the server."""

    window: int = Field(
        default=1024, ge=16, description="tokens of the output that are looked at, the last ones"
    )


class RpgParams(RuleParams):
    """Of a request."""

    rpg: float = Field(gt=0.0, le=100.0, description="penalty, times log(1 + copies)")
    rpg_count: int = Field(default=3, ge=2, description="copies of a block after which it begins")


class RpgRule(Rule):
    """Lowers the logits of what would open another copy."""

    summary = "code repeats its structure less: a penalty on what would open another copy of a block"
    paper = "arXiv 2505.10402"
    Options = RpgOptions
    Params = RpgParams

    def __init__(self, window: int, vocabulary: Vocabulary) -> None:
        self._window, self._vocabulary = window, vocabulary

    @classmethod
    def from_options(cls, options: RpgOptions, vocabulary: Vocabulary) -> RpgRule:
        """See the base class."""
        return cls(options.window, vocabulary)

    @classmethod
    def problem(cls, options: RpgOptions, params: RpgParams, asked: Asked) -> str | None:
        """See the base class."""
        return None

    def warm_up(self) -> None:
        """See the base class."""
        _ = self._openers

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """See the base class."""
        for place, row in enumerate(rows):
            code = open_code(text_of(self._vocabulary, row.output[-self._window :]).decode(errors="replace"))
            if not code:
                continue
            if len(row.output) > self._window:
                code = code.partition("\n")[2]  # from where a line begins
            block, copies = repeated(list(classes(code)), row.params.rpg_count)
            if not copies:
                continue
            # Behind a word only what a space parts from it opens another.
            ids = [self._openers.get((block[0], True), _NONE)]
            if not (code[-1].isalnum() or code[-1] == "_"):
                ids.append(self._openers.get((block[0], False), _NONE))
            index = torch.from_numpy(np.concatenate(ids)).long().to(logits.device)
            logits[place, index] -= row.params.rpg * math.log1p(copies)

    @functools.cached_property
    def _openers(self) -> dict[tuple[str, bool], Int32]:
        """Tokens by the class of their first lexeme, and by whether a space stands before it."""
        found: dict[tuple[str, bool], list[int]] = {}
        for token, piece in enumerate(self._vocabulary.pieces):
            text = piece.decode(errors="replace")
            first = next(classes(text), None)
            if first is not None:
                found.setdefault((first, text[0] in " \t"), []).append(token)
        return {key: np.array(ids, dtype=np.int32) for key, ids in found.items()}


_NONE = np.empty(0, dtype=np.int32)


def classes(code: str) -> Iterator[str]:
    """Lexical classes of some code: keywords and signs as they are, other words, numbers, strings, ends of lines."""
    for match in LEXEMES.finditer(code):
        match match.lastgroup:
            case "none":
                continue
            case "newline":
                yield NEWLINE
            case "word" if match[0] not in KEYWORDS:
                yield "word"
            case "string" | "number":
                yield match.lastgroup
            case _:
                yield match[0]


def repeated(sequence: Sequence[str], least: int) -> tuple[Sequence[str], int]:
    """The block that a sequence ends with copies of, at a place where the next one would begin; and how many.

    Where blocks have ends of lines they begin behind one. Signs and keywords alone are no block. Of several the one
    whose copies are longest together.

    Args:
        sequence: of `classes`.
        least: copies, at least 2; with fewer there is no block.

    Returns:
        The block and its copies; nothing and 0 where there is none.
    """
    length, best = len(sequence), (0, 0, 0)  # covered, minus the block's length, copies
    for period, agree in enumerate(_z(sequence[::-1])[: length // least + 1]):
        if not period or agree < period * (least - 1):
            continue
        start = length - agree - period
        block = sequence[length - period :]
        if NEWLINE in block:
            while start < length and start and sequence[start - 1] != NEWLINE:
                start += 1
        copies, rest = divmod(length - start, period)
        if not rest and copies >= least and not NAMED.isdisjoint(block):  # brackets that close may be many
            best = max(best, (copies * period, -period, copies))
    return (sequence[length + best[1] :], best[2]) if best[2] else ((), 0)


def _z(sequence: Sequence[str]) -> list[int]:
    """By place, how long what begins there agrees with what begins at 0: the Z-function, in linear time."""
    length = len(sequence)
    agree = [length] * (length > 0) + [0] * (length - 1)
    left = right = 0
    for place in range(1, length):
        if place < right:
            agree[place] = min(right - place, agree[place - left])
        while place + agree[place] < length and sequence[agree[place]] == sequence[place + agree[place]]:
            agree[place] += 1
        if place + agree[place] > right:
            left, right = place, place + agree[place]
    return agree
