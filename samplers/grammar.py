# SPDX-License-Identifier: Apache-2.0
"""Grammars that a rule knows by itself, because a mask alone would not do: by xgrammar, behind any prefix.

A rule sees rows of many requests, and of many paths down a tree. A matcher goes on from token to token and copies
cheaply, so those behind the last rows are kept; where none is, one reads the prefix from its start, and says the same.
"""

from __future__ import annotations

import functools
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import Field

from vllm_ext.kernels.sparse import Int32
from vllm_ext.samplers import shared_grammars
from vllm_ext.samplers.background import Making, Process
from vllm_ext.samplers.base import Asked, Kind, Row, RuleParams, Vocabulary
from vllm_ext.samplers.kept import Kept, digest
from vllm_ext.samplers.messages import quoted

P = TypeVar("P", bound=RuleParams)
KINDS: dict[Kind, str] = {
    "json": "JSON schema, as text, that the answer obeys",
    "regex": "regular expression that the answer matches",
    "grammar": "grammar of the answer, in EBNF or, where no line has ::=, Lark",
}
SYNTAX = {"json": "a JSON schema", "regex": "a regular expression", "grammar": "EBNF or Lark"}
KEPT = 128  # matchers of a grammar
MATCHER_BYTES = 5_000  # for JSON
MASK_BYTES = 8 << 20  # of the masks that are kept of a grammar whose masks take long
SLOW = 0.02  # seconds of a mask, of the processor's time
COMPILE_SECONDS = Field(
    default=10.0,
    gt=0.0,
    le=600.0,
    description="longest time to compile a request's grammar, beside the engine",
)
MOST_COMPILING = 4 << 30  # bytes that compiling one may take
PINNED = -1  # the place of a request's grammar in what its rows keep


def grammar_of(params: RuleParams, rule: str) -> tuple[Kind, str] | None:
    """What is given of a rule's parameters ``RULE_json``, ``RULE_regex`` and ``RULE_grammar``; the first."""
    given = [(kind, getattr(params, f"{rule}_{kind}")) for kind in KINDS]
    return next(((kind, source) for kind, source in given if source is not None), None)


def is_lark(source: str) -> bool:
    """Whether a grammar is Lark's, which has no ``::=``; as vLLM tells them apart."""
    return not any("::=" in re.sub(r"(#|//).*$", "", line) for line in source.split("\n"))


def compiled(compiler: Any, kind: Kind, source: str) -> Any:
    """An xgrammar CompiledGrammar.

    Args:
        compiler: an xgrammar GrammarCompiler.
        kind: how ``source`` is written.
        source: see `KINDS`.
    """
    if kind == "json":
        return compiler.compile_json_schema(source)
    if kind == "regex":
        return compiler.compile_regex(source)
    if kind == "structural_tag":
        return compiler.compile_structural_tag(source)
    return compiler.compile_lark(source) if is_lark(source) else compiler.compile_grammar(source)


def check(kind: Kind, source: str) -> None:
    """Refuse what cannot be parsed as `compiled` parses it.

    Raises:
        ValueError: what the parser says.
    """
    import xgrammar

    parsers: dict[Kind, Any] = {
        "json": xgrammar.Grammar.from_json_schema,
        "regex": xgrammar.Grammar.from_regex,
        "grammar": xgrammar.Grammar.from_lark if is_lark(source) else xgrammar.Grammar.from_ebnf,
    }
    try:
        parsers[kind](source)
    except Exception as error:  # its classes are many, and differ between versions
        raise ValueError(f"{quoted(source)} is not {SYNTAX[kind]} ({quoted(error)})") from None


def only_one(params: P) -> P:
    """Refuse more than one of a rule's parameters, each of which says all that an answer obeys.

    Raises:
        ValueError: naming those that are given.
    """
    if len(params.model_fields_set) != 1:
        raise ValueError(f"{', '.join(sorted(params.model_fields_set))} are too many: give one")
    return params


def problem(asked: Asked, what: str) -> str | None:
    """Why a rule that samples from the model's own law cannot serve a request; None where it can."""
    given = asked.contradictions
    given += ["top_k, top_p or min_p"] * asked.truncates + ["penalties or logit_bias"] * asked.penalizes
    if given:
        return f"{what} does not go with {' nor '.join(given)}: it samples from the model's own distribution"
    return None


class Behind:
    """One grammar behind some tokens. A `vllm_ext.samplers.base.Constraint`, less what is certain."""

    def __init__(self, matcher: Any, end: int, vocabulary: Vocabulary) -> None:
        self._matcher, self._end, self._vocabulary = matcher, end, vocabulary

    def fork(self) -> Behind:
        """A copy, which goes its own way."""
        return Behind(self._matcher.fork(), self._end, self._vocabulary)

    def accept(self, token: int) -> bool:
        """See `Constraint`; the end token where an answer is whole. Nothing is allowed behind it."""
        if self._matcher.is_terminated():
            return False
        # xgrammar takes tokens without text anywhere, though its masks have none of them.
        if token != self._end and not self._vocabulary.pieces[token]:
            return False
        return bool(self._matcher.accept_token(token))

    def rollback(self, num_tokens: int) -> None:
        """See `Constraint`."""
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def allowed(self) -> Int32:
        """All tokens that may come next, ascending; none behind the end, or where the vocabulary cannot go on."""
        if self._matcher.is_terminated():
            return np.empty(0, dtype=np.int32)
        words = torch.empty((1, -(-self._vocabulary.size // 32)), dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(words)
        bits = np.unpackbits(words.numpy().view(np.uint8), bitorder="little")[: self._vocabulary.size]
        return np.flatnonzero(bits).astype(np.int32)

    def ends(self) -> bool:
        """Whether an answer is whole here."""
        whole: bool = self._matcher.is_terminated() or self._matcher.is_completed()
        return whole

    def read(self, text: bytes) -> bool:
        """Take some text, whatever tokens it may come in; False, and nothing changes, where it may not come."""
        return bool(self._matcher.accept_string(text))

    def demanded(self) -> bytes:
        """The text that comes next whatever comes behind it."""
        try:
            text: str = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError as error:
            # It tells bytes: those that all alternatives begin with may end inside a character.
            return error.object[: error.start]
        return text.encode()

    def forced(self, most: int) -> list[int]:
        """See `Constraint`."""
        tokens: list[int] = []
        while len(tokens) < most:
            allowed = self.allowed()
            if len(allowed) != 1:
                break
            tokens.append(int(allowed[0]))
            self.accept(tokens[-1])
        self.rollback(len(tokens))
        return tokens


class Grammar:
    """One that is compiled, behind the prefixes that were asked for last."""

    def __init__(self, compiled: Any, end: int, vocabulary: Vocabulary) -> None:
        self._compiled, self._end, self._vocabulary = compiled, end, vocabulary
        self._kept: OrderedDict[bytes, Behind] = OrderedDict()
        self._masks: Making[Int32] = Making(Kept(MASK_BYTES, lambda ids: int(ids.nbytes)))
        # Whether masks take long: then they are made beside the engine, and nothing is drafted by them.
        self.is_slow = False

    @property
    def num_bytes(self) -> int:
        """What it takes at most, nearly."""
        return int(self._compiled.memory_size_bytes) + MATCHER_BYTES * KEPT

    def behind(self, prefix: Sequence[int]) -> Behind | None:
        """It behind a prefix, for reading: what is taken must be rolled back. None where it forbids one.

        Args:
            prefix: tokens since the prompt's end.
        """
        key = _key(prefix)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        shorter = self._kept.get(_key(prefix[:-1])) if prefix else None
        if shorter is not None:
            found, rest = shorter.fork(), prefix[-1:]
        else:
            found, rest = Behind(self._matcher(), self._end, self._vocabulary), prefix
        if not all(map(found.accept, rest)):
            return None
        self._kept[key] = found
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return found

    def constraint(self, prefix: Sequence[int], patience: float | None) -> Behind | None:
        """It behind a prefix, to draft by; None: nothing is drafted. Ranks, which have no patience, draft alike."""
        if self.is_slow and patience is not None:
            return None
        behind = self.behind(prefix)
        return None if behind is None else behind.fork()

    def mask(self, prefix: Sequence[int], patience: float | None) -> Int32 | None:
        """Tokens that may come behind a prefix, ascending; None where they are not there in time.

        Args:
            prefix: tokens since the prompt's end.
            patience: see `vllm_ext.samplers.background.Making.get`.
        """
        behind = self.behind(prefix)
        if behind is None:
            return np.empty(0, dtype=np.int32)
        if self.is_slow:
            return self._masks.get(_key(prefix), behind.fork().allowed, patience)
        started = time.thread_time()
        ids = behind.allowed()
        self.is_slow = time.thread_time() - started > SLOW
        return ids

    def allowed(self, prefix: Sequence[int]) -> Int32:
        """`mask`, however long it takes."""
        ids = self.mask(prefix, None)
        assert ids is not None
        return ids

    def _matcher(self) -> Any:
        import xgrammar

        return xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=[self._end])


def _key(prefix: Sequence[int]) -> bytes:
    return digest(np.array(prefix, dtype=np.int32).tobytes())


class Grammars:
    """Those that requests are under, compiled beside the engine as they come: by then they are known to be right.

    Args:
        vocabulary: the target's.
        max_bytes: most of those that are kept; the last one is in any case, and those of running requests.
        seconds: longest time to compile one; None: as long as it takes, and in no process of its own.
    """

    def __init__(
        self, vocabulary: Vocabulary, max_bytes: int = 64 << 20, seconds: float | None = None
    ) -> None:
        self._vocabulary, self._seconds = vocabulary, seconds
        self._making: Making[Grammar] = Making(Kept(max_bytes, lambda grammar: grammar.num_bytes))
        self._process = Process(lambda: (f"{__name__}:take_vocabulary", [self._info.serialize_json()]))

    def warm_up(self) -> None:
        """Read the vocabulary, which takes a second or two; start the process that compiles first."""
        _ = self._compiler
        if self._seconds is not None:
            self._making.get(digest("warm up"), lambda: self._make("regex", "a", 0, apart=True), 0.0)

    def get(self, kind: Kind, source: str, end: int, patience: float | None) -> Grammar | None:
        """One that is compiled; None where it is not in time.

        Args:
            kind: how ``source`` is written.
            source: a JSON schema, a regular expression, EBNF or Lark.
            end: the token that ends an answer.
            patience: see `vllm_ext.samplers.background.Making.get`.

        Raises:
            TimeoutError: it takes longer than ``seconds``.
            RuntimeError: it cannot be compiled.
        """
        key = digest(kind, source, end)
        if key not in self._making.kept and (shared := shared_grammars.find(self._vocabulary, kind, source)):
            return self._making.get(key, lambda: Grammar(shared, end, self._vocabulary), None)
        apart = patience is not None
        return self._making.get(key, lambda: self._make(kind, source, end, apart), patience)

    def of_row(self, row: Row, rule: str, patience: float | None) -> Grammar | None:
        """A row's, which its request keeps; see `get`."""
        given = grammar_of(row.params, rule)
        assert given is not None
        return self.of_source(row, *given, patience)

    def of_source(self, row: Row, kind: Kind, source: str, patience: float | None) -> Grammar | None:
        """The one that a row's request has by another parameter, likewise."""
        if PINNED not in row.kept:
            found = self.get(kind, source, row.end, patience)
            if found is None:
                return None
            row.kept[PINNED] = found
        grammar: Grammar = row.kept[PINNED]
        return grammar

    def behind(self, kind: Kind, source: str, end: int, prefix: Sequence[int]) -> Behind | None:
        """A grammar behind a prefix, however long it takes; see `get` and `Grammar.behind`."""
        grammar = self.get(kind, source, end, None)
        assert grammar is not None
        return grammar.behind(prefix)

    def constraint(self, row: Row, rule: str, patience: float | None) -> Behind | None:
        """What a row's drafts go by; None where its grammar is not there yet, or nothing is drafted under it."""
        found = self.of_row(row, rule, None if patience is None else 0.0)
        return None if found is None else found.constraint(row.output, patience)

    @property
    def num_bytes(self) -> int:
        """Of all that are kept."""
        return self._making.kept.num_bytes

    def _make(self, kind: Kind, source: str, end: int, apart: bool) -> Grammar:
        if apart and self._seconds is not None:
            try:
                self._process.call(f"{__name__}:try_to_compile", [kind, source], self._seconds)
            except TimeoutError:
                raise TimeoutError(
                    f"the grammar takes more than {self._seconds:g} s to compile, which is compile_seconds of the "
                    "server's rule; give a simpler one"
                ) from None
        grammar = Grammar(compiled(self._compiler, kind, source), end, self._vocabulary)
        grammar.mask([], None)  # here, and not in a step, it is seen whether that takes long
        return grammar

    @functools.cached_property
    def _info(self) -> Any:
        import xgrammar

        return xgrammar.TokenizerInfo(
            list(self._vocabulary.pieces),
            xgrammar.VocabType.RAW,
            vocab_size=self._vocabulary.size,
            stop_token_ids=[],
        )

    @functools.cached_property
    def _compiler(self) -> Any:
        import xgrammar

        return xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)


_compilers: list[Any] = []  # of the process that compiles first


def take_vocabulary(info: str) -> None:
    """In that process, before any grammar."""
    import resource

    import xgrammar

    _compilers.append(
        xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo.deserialize_json(info), max_threads=1, cache_enabled=False
        )
    )
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_COMPILING, used + MOST_COMPILING))


def try_to_compile(kind: Kind, source: str) -> None:
    """In that process: whether it can be done at all."""
    compiled(_compilers[-1], kind, source)
