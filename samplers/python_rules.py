# SPDX-License-Identifier: Apache-2.0
"""Python code as the rules of its grammar that derive it, token by token, for rule `rpg`.

A pushdown automaton (parso's LL(1) tables) reads the code. A token's symbols are the rules that it opens, and where it
leaves the innermost one, so ``elif a == 1:`` and ``elif b < 2:`` are alike, and so are ``+`` and ``-``; names, numbers
and strings differ. What Python's grammar does not derive is read by lexical classes (`lexer.py`): prose, other
languages, ``match``, the text between two fences (```) as a whole.

A line depends on the rules that are open before it, and is kept with them: of a text that grows only the last line is
read again.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from vllm_ext.kernels.repeats import NO_LINE
from vllm_ext.samplers import lexer
from vllm_ext.samplers.lexer import NEWLINE, Code, Line

VERSION = "3.12"  # of the grammar
FIRST_SYMBOL = 256  # above all lexical classes
_PYTHON = re.compile(rb"\s*```\s*(?:py|python|python3)?\s*$", re.IGNORECASE)
# What goes on with a statement that the window has cut off.
_REST = re.compile(rb"\s*(?:elif|else|except|finally)\b")


class Place(NamedTuple):
    """Where the automaton is between two lines."""

    stack: tuple[int, ...]  # states, the innermost rule's last
    indents: tuple[int, ...]  # of the blocks that are open


class Step(NamedTuple):
    """What a state does with a token."""

    state: int
    opened: tuple[int, ...]  # states behind it of the rules that begin with it


class PythonRules:
    """The automaton."""

    def __init__(self) -> None:
        """
        Raises:
            ImportError: parso is not installed, or has no such grammar.
        """
        import parso.grammar
        from parso.python import tokenize
        from parso.utils import parse_version_string

        try:
            tables = parso.grammar.load_grammar(version=VERSION)._pgen_grammar
        except (NotImplementedError, AttributeError) as error:
            raise ImportError(f"parso {parso.__version__} is not known here: {error}") from None
        self._tokenize = functools.partial(tokenize.tokenize, version_info=parse_version_string(VERSION))
        self._reserved = frozenset(tables.reserved_syntax_strings)
        states = [state for of_rule in tables.nonterminal_to_dfas.values() for state in of_rule]
        number = {id(state): place for place, state in enumerate(states)}
        self._final = [bool(state.is_final) for state in states]
        self._steps = [
            {
                getattr(key, "value", None)
                if isinstance(getattr(key, "value", None), str)
                else key.name: Step(
                    number[id(plan.next_dfa)], tuple(number[id(push)] for push in plan.dfa_pushes)
                )
                for key, plan in state.transitions.items()
            }
            for state in states
        ]
        self._start = (number[id(tables.nonterminal_to_dfas["file_input"][0])],)
        self._symbols: dict[Any, int] = {}
        self._kept = functools.lru_cache(1 << 14)(self._line)

    def read(self, text: bytes) -> Code:
        """The symbols of a text. The end of its last line is none, and of a word that it ends with more may come."""
        lines = lexer.lines_of(text)
        fences = [place for place, line in enumerate(lines) if line.text.lstrip().startswith(b"```")]
        found: list[Line] = []
        begin, may_be = 0, True
        for end in [*fences, len(lines)]:
            region = lines[begin:end]
            found += (self._region(region, end == len(lines)) if may_be else None) or region
            if end < len(lines):
                found.append(lines[end])
                # What stands behind a fence that closes is tried as any text is.
                may_be = _PYTHON.match(lines[end].text) is not None
            begin = end + 1
        return lexer.joined(found)

    def _region(self, lines: list[Line], to_the_end: bool) -> list[Line] | None:
        """Lines as the grammar derives them; None where it does not."""
        found: list[Line] = []
        where: Place | None = None
        for statement in _statements(lines):
            first, last = statement[0], statement[-1]
            ends = not (to_the_end and last is lines[-1])
            if not any(line.classes for line in statement) or (not ends and (last.inside or last.is_open)):
                found += statement  # nothing but comments; or nothing begins behind it
                continue
            text = b"\n".join([line.text for line in statement])
            indent = lexer.indent_of(text)
            here = where or Place(self._start, (indent,))
            read = (self._kept if ends else self._line)(text, indent, here, ends)
            if read is not None:
                symbols, classes, where = read
                starts = indent if classes else NO_LINE
                found.append(first._replace(symbols=symbols, classes=classes, indent=starts))
            elif where is None and _REST.match(text):
                found += statement
            else:
                return None
        return found

    def _line(self, text: bytes, indent: int, where: Place, ends: bool) -> tuple[bytes, bytes, Place] | None:
        """A statement's symbols, their lexical classes, and where the automaton is behind it; None where it fails."""
        stack, indents = list(where.stack), list(where.indents)
        if indent > indents[-1]:
            if self._take(stack, "INDENT") is None:
                return None
            indents.append(indent)
        while indent < indents[-1]:
            if len(indents) == 1:  # the text began further in
                indents[0] = indent
            elif self._take(stack, "DEDENT") is None:
                return None
            else:
                indents.pop()
        symbols: list[int] = []
        classes = bytearray()
        for kind, value, _, _ in self._tokenize(text.strip().decode(errors="replace") + "\n"):
            name = kind.name
            if name == "ENDMARKER":
                break
            if name == "NEWLINE":
                if ends:
                    if self._take(stack, name) is None:
                        return None
                    symbols.append(NEWLINE)
                    classes.append(NEWLINE)
                break
            reserved = kind.value.contains_syntax and value in self._reserved
            taken = self._take(stack, value if reserved else name)
            if taken is None:
                return None
            # A rule each: the first element of a list opens the list too, and is a copy of the others all the same.
            keys = [*(taken.opened or [(taken.state,)]), "" if reserved else name]
            symbols += [self._symbols.setdefault(key, FIRST_SYMBOL + len(self._symbols)) for key in keys]
            classes += bytes([lexer.first_class(value.encode()) or lexer.STRING]) * len(keys)
        return (
            np.array(symbols, dtype=np.uint16).tobytes(),
            bytes(classes),
            Place(tuple(stack), tuple(indents)),
        )

    def _take(self, stack: list[int], token: str) -> Step | None:
        """Go on by a token; None, with the stack in any state, where none may come."""
        while stack:
            step = self._steps[stack[-1]].get(token)
            if step is not None:
                stack[-1] = step.state
                stack += step.opened
                return step
            if not self._final[stack[-1]]:
                return None
            stack.pop()
        return None


def _statements(lines: list[Line]) -> Iterator[list[Line]]:
    """Lines that are read as one: those behind an open bracket, an open string or a backslash go on with it."""
    statement: list[Line] = []
    depth = 0
    for line in lines:
        statement.append(line)
        depth += sum(map(line.classes.count, b"([{")) - sum(map(line.classes.count, b")]}"))
        if depth <= 0 and not line.inside and not line.text.endswith(b"\\"):
            yield statement
            statement, depth = [], 0
    if statement:
        yield statement
