# SPDX-License-Identifier: Apache-2.0
"""Code that repeats its own structure: what would open another copy of a block is made less likely, copy by copy.

The last lines of the output are read as symbols, in which ``elif x == 1: return a`` and ``elif y < 2: return b`` are
alike: Python as the rules of its grammar (`python_rules.py`) where a parser is installed, all else as lexical classes
(`lexer.py`). Where these end with a block several times in a row, tokens that it could begin with lose
``gamma * log(1 + copies)`` of their logit; all other rows, and all other tokens, stay as they are, bit for bit.

Source: "Rethinking Repetition Problems of LLMs in Code Generation" (RPG), arXiv 2505.10402. Two things differ. There
all languages have a parser; here Python has one, and the others' lexical classes need none. And the paper's decay is
its own; here it is the above, with a gamma to choose.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from vllm_ext.kernels import repeats
from vllm_ext.kernels.repeats import Repeat
from vllm_ext.kernels.sparse import Int32
from vllm_ext.samplers import lexer
from vllm_ext.samplers.base import Asked, Row, Rule, RuleOptions, RuleParams, Vocabulary, text_of
from vllm_ext.samplers.lexer import NAME, NEWLINE, WORDS, Code
from vllm_ext.samplers.python_rules import PythonRules

logger = logging.getLogger("vllm.vllm_ext")

# Of these alone no block is made: they close what was opened, or stand between it.
CLOSING = b"\n)]};,"


class RpgOptions(RuleOptions):
    window: int = Field(
        default=1024, ge=16, le=65_536, description="how many of the last tokens are looked at"
    )
    parser: bool | None = Field(
        default=None,
        description="whether Python is read by its grammar, for which parso must be installed, and not by lexical "
        "classes; null: if it is",
    )


class RpgParams(RuleParams):
    rpg: float = Field(gt=0.0, le=100.0, description="gamma, above 0 and up to 100")
    rpg_count: int = Field(
        default=2, ge=2, le=1000, description="copies of a block after which another one costs"
    )


class RpgRule(Rule):
    """A penalty on the next copy of a block of code."""

    summary = "code that repeats its own structure is held back"
    paper = "arXiv 2505.10402"
    Options = RpgOptions
    Params = RpgParams
    example: ClassVar[Mapping[str, Any]] = {"rpg": 2.0}

    def __init__(
        self, vocabulary: Vocabulary, window: int, read: Callable[[bytes], Code] = lexer.lex
    ) -> None:
        """
        Args:
            vocabulary: the target's.
            window: how many of the last tokens are looked at.
            read: a text's symbols.
        """
        self._vocabulary, self._window, self._read = vocabulary, window, read

    @classmethod
    def from_options(cls, options: RpgOptions, vocabulary: Vocabulary) -> RpgRule:
        if options.parser is False:
            return cls(vocabulary, options.window)
        try:
            return cls(vocabulary, options.window, PythonRules().read)
        except ImportError as error:
            logger.info("vllm-ext: rule 'rpg' reads Python by lexical classes, not by its grammar: %s", error)
            return cls(vocabulary, options.window)

    @classmethod
    def check(cls, options: RpgOptions, vocab_size: int, tokenizer_hash: Callable[[], str]) -> None:
        if options.parser:
            try:
                PythonRules()
            except ImportError as error:
                raise ValueError(
                    f"parser=True needs parso ({error}): pip install 'vllm-ext[monitor]', which brings it, or leave "
                    "parser out"
                ) from None

    @classmethod
    def problem(cls, options: RpgOptions, params: RpgParams, asked: Asked) -> str | None:
        """See the base class; it goes with everything."""
        return None

    def warm_up(self) -> None:
        _ = self._openers
        repeat_of(self._read(b"a"), 2)

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        for place, row in enumerate(rows):
            if row.end in row.output:
                continue
            text = self._text(row.output)
            code = self._read(text)
            period, copies = repeat_of(code, row.params.rpg_count)
            if not copies:
                continue
            ids = self._opening(code.classes[-period], lexer.ends_in_word(text))
            penalty = row.params.rpg * float(np.log1p(copies))
            if logits.is_cpu:
                logits.numpy()[place, ids] -= penalty
            else:
                logits[place, torch.from_numpy(ids).to(logits.device)] -= penalty

    def _text(self, output: Sequence[int]) -> bytes:
        """That of the last tokens, from a line's start on if there is one."""
        text = text_of(self._vocabulary, output[-self._window :])
        return text[text.find(b"\n") + 1 :] if len(output) > self._window else text

    def _opening(self, first: int, in_word: bool) -> Int32:
        """Tokens that begin with a class; behind a word, those that do not go on with it."""
        ids, spaced = self._openers.get(first, (np.zeros(0, dtype=np.int32),) * 2)
        return spaced if in_word and first in WORDS else ids

    @functools.cached_property
    def _openers(self) -> dict[int, tuple[Int32, Int32]]:
        """By class, the tokens that begin with it, and those of them that have a space first."""
        tokens: dict[int, list[int]] = {}
        pieces = self._vocabulary.pieces
        for token, piece in enumerate(pieces):
            if (first := lexer.first_class(piece)) is not None:
                tokens.setdefault(first, []).append(token)
        return {
            first: (_array(ids), _array([token for token in ids if pieces[token][:1] in b" \t"]))
            for first, ids in tokens.items()
        }


def repeat_of(code: Code, copies: int) -> Repeat:
    """The block that a text ends with so many times or more.

    A block has more to it than names, which in a row are prose, and than what closes others.
    """
    opens = len(code.classes.rstrip(CLOSING))
    shortest = len(code.classes) - min(opens, len(code.classes.rstrip(bytes([NAME])))) + 1
    return repeats.longest(code.symbols, code.indents, NEWLINE, shortest, copies)


def _array(tokens: Sequence[int]) -> Int32:
    return np.array(tokens, dtype=np.int32)
