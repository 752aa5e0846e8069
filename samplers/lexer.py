# SPDX-License-Identifier: Apache-2.0
"""Lexical classes of code in any language: what is left of a text when names, numbers and strings lose their wording.

A class is a byte. Names, numbers and strings have one each, every keyword and operator its own, and so have lines'
ends; comments, spaces and empty lines have none. It is one lexer for all languages, so that it is right about most of
each: a ``//`` of Python counts as a comment, as does ``#include``. It never fails, also on text that stops anywhere.

A line's classes depend on it alone and on what is open before it, and are kept: of a text that grows only the last line
is read again.
"""

from __future__ import annotations

import functools
import keyword
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_ext.kernels.repeats import NO_LINE, Symbols
from vllm_ext.kernels.sparse import Int32

# Other single characters are their own class.
NEWLINE, NAME, NUMBER, STRING = 10, 1, 2, 3
OPEN = 4  # at the end of a text that stops in a string or comment: nothing begins behind it
KEYWORDS = sorted(
    {word.encode() for word in keyword.kwlist}
    | set(
        b"bool boolean case catch char const default do double enum export extends final float fn func function "
        b"implements int interface let long mut namespace new private protected pub public short static string struct "
        b"super switch template this throw typedef typeof unsigned use using var virtual void".split()
    )
)
OPERATORS = (
    b"``` === !== ... **= //= <<= >>= -> => == != <= >= := += -= *= /= %= &= |= ^= && || ++ -- ** << >> :: ?? ?."
).split()
_CLASSES = {word: 128 + number for number, word in enumerate([*KEYWORDS, *OPERATORS])}
WORDS = frozenset([NAME, NUMBER, *(_CLASSES[word] for word in KEYWORDS)])

_LEXEME = re.compile(
    rb"""
    (?P<space> [ \t\r\f\v]+ )
  | (?P<comment> (?:\#|//).* )
  | (?P<block> /\* )
  | (?P<long> [rRbBfFuU]{0,2}(?:'''|\"\"\") )
  | (?P<fence> ``` )
  | (?P<string> [rRbBfFuU]{0,2}(?: "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' | `[^`]*` ) )
  | (?P<name> [A-Za-z_\x80-\xff][\w\x80-\xff]* )
  | (?P<number> (?:\d[\d_]*(?:\.\d[\d_]*)?|\.\d[\d_]*)(?:[eE][+-]?\d+)?\w* )
  | (?P<loose> ["'`] )
  | (?P<operator> %s | . )
    """
    % b"|".join(re.escape(operator) for operator in sorted(OPERATORS, key=len, reverse=True)),
    re.VERBOSE,
)
_QUOTE = re.compile(rb"[rRbBfFuU]{0,2}(?:[\"']|`(?!``))")
_KINDS = {"string": STRING, "number": NUMBER}


class Line(NamedTuple):
    """A line of a text, or of code several that are one statement."""

    text: bytes  # without its end
    symbols: bytes  # uint16 [num_symbols], with its end's where it has one
    classes: bytes  # uint8 [num_symbols]
    indent: int  # how many spaces and tabs it begins with; NO_LINE: it begins in a string, or has nothing
    inside: bytes  # what would close the string or comment that is open behind it
    is_open: bool  # whether it ends in a comment, or behind a quotation mark that nothing closes


class Code(NamedTuple):
    """A text by its classes, or by symbols that say more."""

    symbols: Symbols  # uint16 [num_symbols]
    classes: bytes  # uint8 [num_symbols] of each symbol's first character
    indents: Int32  # int32 [num_symbols] how many spaces and tabs the line has that starts there, or NO_LINE


def lex(text: bytes) -> Code:
    """The classes of a text. The end of its last line is none, and of a word that it ends with more may come."""
    return joined(lines_of(text))


def lines_of(text: bytes) -> list[Line]:
    """A text's lines; the last one has no end."""
    found = []
    inside, fresh = b"", True
    *lines, last = text.split(b"\n")
    for line in lines:
        classes, inside, is_open = _line(line, inside)
        starts = fresh and classes
        if classes:
            fresh = False
        if not fresh and not inside:
            classes += b"\n"
            fresh = True
        found.append(
            Line(line, wide(classes), classes, indent_of(line) if starts else NO_LINE, inside, is_open)
        )
    classes, inside, is_open = _line.__wrapped__(last, inside)  # no other text will have it
    classes += bytes([OPEN] if inside or is_open else [])
    found.append(
        Line(last, wide(classes), classes, indent_of(last) if fresh and classes else NO_LINE, inside, is_open)
    )
    return found


def joined(lines: Sequence[Line]) -> Code:
    """Lines as one text."""
    symbols = np.frombuffer(b"".join([line.symbols for line in lines]), dtype=np.uint16)
    indents = np.full(len(symbols), NO_LINE, dtype=np.int32)
    length = 0
    for line in lines:
        if line.indent != NO_LINE:
            indents[length] = line.indent
        length += len(line.classes)
    return Code(symbols, b"".join([line.classes for line in lines]), indents)


@functools.lru_cache(1 << 14)
def wide(classes: bytes) -> bytes:
    """uint8 as uint16."""
    return np.frombuffer(classes, dtype=np.uint8).astype(np.uint16).tobytes()


def first_class(piece: bytes) -> int | None:
    """The class of what a token opens; None where that is nothing, or a comment."""
    piece = piece.lstrip(b" \t")
    if _QUOTE.match(piece):
        return STRING
    match = _LEXEME.match(piece)
    return None if match is None else _class_of(match.lastgroup, match[0])


def ends_in_word(text: bytes) -> bool:
    """Whether a token without a space before it would go on with the last word."""
    return re.match(rb"[\w\x80-\xff]", text[-1:]) is not None


def _class_of(kind: str | None, lexeme: bytes) -> int | None:
    """None of what has no class. Quotation marks that nothing closes are characters like others."""
    if kind in ("space", "comment", "block"):
        return None
    if kind in _KINDS:
        return _KINDS[kind]
    return _CLASSES.get(lexeme, NAME if kind == "name" else lexeme[0])


@functools.lru_cache(1 << 14)
def _line(line: bytes, inside: bytes) -> tuple[bytes, bytes, bool]:
    """The classes of a line; what is open behind it, as it was before; and whether it ends in a comment or string."""
    classes = bytearray()
    place, is_open = 0, False
    while True:
        if inside:
            close = line.find(inside, place)
            if close < 0:
                return bytes(classes), inside, False
            place = close + len(inside)
            if inside != b"*/":
                classes.append(STRING)
            inside = b""
        for match in _LEXEME.finditer(line, place):
            kind = match.lastgroup
            if kind in ("long", "block"):
                inside = b"*/" if kind == "block" else match[0][-3:]
                place = match.end()
                break
            is_open = is_open or kind in ("comment", "loose")
            if (symbol := _class_of(kind, match[0])) is not None:
                classes.append(symbol)
        else:
            return bytes(classes), b"", is_open


def indent_of(line: bytes) -> int:
    """How many spaces and tabs it begins with."""
    return len(line) - len(line.lstrip())
