# SPDX-License-Identifier: Apache-2.0
"""Rule awrs: an answer that a grammar or a check of one's own allows, with the weight that makes it the model's.

The rule draws the token itself, of all that the model could say, by asking about few of them: `awrs.py` has the paper.
A request's weights multiply to one whose mean, over answers, is the model's chance to obey; with it answers stand for
the model's own law under the constraint. Greedily it is the likeliest token that is allowed, and there are no weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field, model_validator

from vllm_ext.kernels.chance import RandomChance
from vllm_ext.kernels.sparse import Float64, Int32
from vllm_ext.samplers import awrs, grammar
from vllm_ext.samplers.base import (
    Asked,
    Constraint,
    Kind,
    Row,
    Rule,
    RuleOptions,
    RuleParams,
    Vocabulary,
    allows,
    load_function,
    text_of,
)
from vllm_ext.samplers.grammar import Grammar
from vllm_ext.samplers.messages import quoted

NOISE = 0xA3F5  # in the seeds of draws: apart from those of other rules, and of vLLM's
# Whether a text can still become an answer; with True, whether it is one.
Check = Callable[[str, bool], bool]


class AwrsOptions(RuleOptions):
    compile_seconds: float = grammar.COMPILE_SECONDS
    memory_mb: int = Field(default=64, ge=1, le=1 << 20, description="most memory for compiled grammars")
    checks: dict[str, str] = Field(
        default={},
        description="checks that requests can name, and the Python function of each, as package.module:function; it "
        "is given the text so far and whether it ends there, and says whether that can still become an answer",
    )


class AwrsParams(RuleParams):
    """Of a request; one of them."""

    awrs_json: str | None = Field(default=None, min_length=1, description=grammar.KINDS["json"])
    awrs_regex: str | None = Field(default=None, min_length=1, description=grammar.KINDS["regex"])
    awrs_grammar: str | None = Field(default=None, min_length=1, description=grammar.KINDS["grammar"])
    awrs_check: str | None = Field(default=None, description="name of a check that the answer passes")

    _only_one = model_validator(mode="after")(grammar.only_one)


class AwrsRule(Rule):
    """Draws until a token is allowed."""

    alone = True
    waits = True
    summary = "answers obey a grammar or a check, and have a weight"
    paper = "arXiv 2504.05410"
    Options = AwrsOptions
    Params = AwrsParams
    example: ClassVar[Mapping[str, Any]] = {"awrs_json": '{"type": "integer"}'}
    reports = "awrs_log_weight"

    def __init__(
        self, checks: Mapping[str, Check], vocabulary: Vocabulary, grammars: grammar.Grammars | None = None
    ) -> None:
        self._checks, self._vocabulary = checks, vocabulary
        self._grammars = grammar.Grammars(vocabulary) if grammars is None else grammars
        # The same in all ranks of a model, each of which draws for itself.
        self._unseeded = RandomChance(np.random.default_rng(NOISE))

    @classmethod
    def from_options(cls, options: AwrsOptions, vocabulary: Vocabulary) -> AwrsRule:
        """See the base class; imports the checks."""
        return cls(
            {name: load_function(f"checks.{name}", where) for name, where in options.checks.items()},
            vocabulary,
            grammar.Grammars(vocabulary, options.memory_mb << 20, options.compile_seconds),
        )

    @classmethod
    def check(cls, options: AwrsOptions, vocab_size: int, tokenizer_hash: Callable[[], str]) -> None:
        """See the base class; imports the checks."""
        for name, where in options.checks.items():
            load_function(f"checks.{name}", where)

    def warm_up(self) -> None:
        self._grammars.warm_up()

    @classmethod
    def problem(cls, options: AwrsOptions, params: AwrsParams, asked: Asked) -> str | None:
        if params.awrs_check is not None and params.awrs_check not in options.checks:
            known = (
                ", ".join(map(repr, options.checks))
                or "none; start the server with checks, see `vllm-ext rules`"
            )
            return f"awrs_check={quoted(params.awrs_check)} is not allowed; allowed: {known}"
        if asked.num_answers > 1:
            return f"n={asked.num_answers} does not go with awrs: each answer has a weight of its own; ask as often"
        return grammar.problem(asked, "awrs")

    @classmethod
    def grammar(cls, params: AwrsParams) -> tuple[Kind, str] | None:
        return grammar.grammar_of(params, "awrs")

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """See the base class; leaves one token."""
        self.waiting = waiting = []
        patience = self.patience
        for place, row in enumerate(rows):
            if row.end in row.output:
                continue
            found = None
            if row.params.awrs_check is None:
                found = self._grammars.of_row(row, "awrs", patience)
                # The mask may be asked for: where it takes long it has to be there.
                if found is None or (found.is_slow and found.mask(row.output, patience) is None):
                    waiting.append(place)
                    patience = 0.0
                    continue
            token = self._token(logits[place], row, found)
            value = float(logits[place, token])
            logits[place] = -torch.inf
            logits[place, token] = value if math.isfinite(value) else 0.0

    def _token(self, logits: torch.Tensor, row: Row, found: Grammar | None) -> int:
        """One token; ``found``: the row's grammar, None where it has a check."""
        behind = self._checked(row) if found is None else found.behind(row.output)
        if behind is None:  # what was put out so far is not allowed
            row.notes[len(row.output)] = -math.inf
            return row.end

        allowed = functools.partial(allows, behind)
        all_allowed = None if found is None else functools.partial(found.allowed, row.output)
        if row.asked.temperature == 0.0:
            return _likeliest(logits, allowed, all_allowed, row.end)
        p = _softmax(logits, row.asked.temperature)
        chance = self._unseeded
        if row.asked.seed is not None:
            # A function of the place in the output: the same on a tree, and after a request was preempted.
            chance = RandomChance(np.random.default_rng([NOISE, row.asked.seed % (1 << 63), len(row.output)]))
        draw = awrs.draw(p, allowed, chance, all_allowed)
        row.notes[len(row.output)] = math.log(draw.weight) if draw.weight > 0.0 else -math.inf
        # Where nothing is allowed the answer ends, and its weight says that it counts for nothing.
        return row.end if draw.token is None else draw.token

    def _checked(self, row: Row) -> Checked:
        return Checked(self._checks[row.params.awrs_check], row, self._vocabulary)

    def constraint(self, row: Row) -> Constraint | None:
        if row.params.awrs_check is not None:
            return self._checked(row)
        return self._grammars.constraint(row, "awrs", self.patience)


class Checked:
    """A `Constraint`: what a check allows. A token whose last character goes on in the next one is not.

    Args:
        check: see `AwrsOptions`.
        row: what is there so far.
        vocabulary: the target's.
    """

    def __init__(self, check: Check, row: Row, vocabulary: Vocabulary) -> None:
        self._check, self._pieces, self._end = check, vocabulary.pieces, row.end
        self._texts = [text_of(vocabulary, row.output).decode(errors="replace")]
        self._ended = row.end in row.output

    def accept(self, token: int) -> bool:
        """See `Constraint`."""
        text = self._texts[-1]
        if self._ended:
            return False
        if token == self._end:
            self._ended = taken = bool(self._check(text, True))
        else:
            try:
                added = self._pieces[token].decode()
            except UnicodeDecodeError:
                return False
            text += added
            taken = bool(added) and bool(self._check(text, False))
        if taken:
            self._texts.append(text)
        return taken

    def rollback(self, num_tokens: int) -> None:
        """See `Constraint`."""
        if num_tokens:
            del self._texts[-num_tokens:]
            self._ended = False

    def forced(self, most: int) -> list[int]:
        """See `Constraint`; a check does not tell."""
        return []


def _likeliest(
    logits: torch.Tensor, allowed: Callable[[int], bool], all_allowed: Callable[[], Int32] | None, end: int
) -> int:
    """The first token that is allowed, from the likeliest down; the end token where none is."""
    for token in logits.topk(min(awrs.PATIENCE, len(logits))).indices.tolist():
        if allowed(token):
            return int(token)
    if all_allowed is not None:
        ids = torch.from_numpy(all_allowed()).long().to(logits.device)
        return int(ids[logits[ids].argmax()]) if len(ids) else end
    for token in logits.argsort(descending=True)[awrs.PATIENCE :].tolist():
        if allowed(token):
            return int(token)
    return end


def _softmax(logits: torch.Tensor, temperature: float) -> Float64:
    p: Float64 = (logits.double() / temperature).softmax(0).cpu().numpy()
    return p
