# SPDX-License-Identifier: Apache-2.0
r"""Regular expressions that xgrammar 0.2.8 reads no wider than Python's ``re``, which decides what is valid.

xgrammar makes an automaton of a pattern. It matches whole strings, of characters that JSON writes as they are: less
than the pattern allows, and right, but for what is refused here.

- Assertions, which it leaves out; ``\S``, ``\D`` and ``\W``, which stand for ASCII alone.
- Counts where its ways of joining automata let more through: behind groups that have counts themselves, within
  alternatives, and above 128.
- A number of characters that may be beyond ASCII: some of what it takes for one is no UTF-8, and decoded it is
  several.
- What the automaton cannot be made of: a grammar does that then, which lets quotes and control characters through.

Read off its fsm.cc, fsm_builder.cc and regex_converter.cc, and held by tests/samplers/test_strict_pattern.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

COUNTED = 128  # repetitions above which xgrammar makes a rule of what is repeated
STATES = 50_000  # of an automaton; it gives up at twice as many
CHARACTER = 12  # states of any character beyond ASCII, at most
COUNT = re.compile(r"\{(\d{1,9})(?:(,)(\d{0,9}))?\}")
HEX = re.compile(r"x([0-7][0-9A-Fa-f])|u00([0-7][0-9A-Fa-f])")
CONTROL = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11}
CLASSES = {"d": (0x30, 0x39), "w": (0x30, 0x39), "s": (0x09, 0x20)}  # what is to be known of them
SETS = ("--", "&&", "~~", "||")  # what a later Python may read as operations on classes
ESCAPED = "it demands a quote, a backslash or a control character, which JSON escapes"


@dataclass(frozen=True)
class Part:
    """What is to be known of a part of a pattern."""

    states: int  # at most
    is_plain: bool = True  # JSON writes all its characters as they are
    is_wide: bool = False  # one character, that may be beyond ASCII
    loops: bool = False  # ``*`` or ``+`` is in it
    varies: bool = False  # another count is in it that leaves a choice
    is_group: bool = False

    def __or__(self, other: Part) -> Part:
        """Both, one after the other or one of them."""
        return Part(
            self.states + other.states,
            self.is_plain and other.is_plain,
            loops=self.loops or other.loops,
            varies=self.varies or other.varies,
        )


def pattern_problem(pattern: str) -> str | None:
    """Why what xgrammar takes for a pattern may not match it; None where it always does."""
    try:
        _Reader(pattern).read()
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"Python cannot read the pattern: {error}"
    except ValueError as error:
        return str(error)
    return None


def _is_plain(code: int) -> bool:
    """Whether JSON has a character as it is."""
    return code >= 0x20 and chr(code) not in '"\\'


class _Reader:
    """One pattern."""

    def __init__(self, pattern: str) -> None:
        self._text, self._at = pattern, 0
        self._num_atoms, self._counts_far = 0, False

    def read(self) -> None:
        """Go through it.

        Raises:
            ValueError: what is not as Python has it.
        """
        if not all(" " <= character <= "~" for character in self._text):
            raise ValueError("xgrammar makes automata of patterns in printable ASCII alone")
        self._choices(0)
        if self._at < len(self._text):
            raise ValueError("a parenthesis is closed that was not opened")
        if self._counts_far and self._num_atoms > 1:
            raise ValueError(f"xgrammar goes astray where anything stands beside a count above {COUNTED}")

    def _next(self, text: str | tuple[str, ...]) -> bool:
        return self._text.startswith(text, self._at)

    def _choices(self, depth: int) -> Part:
        """Of ``a|b``, up to the parenthesis that closes it."""
        parts = [self._sequence(depth)]
        while self._next("|"):
            self._at += 1
            parts.append(self._sequence(depth))
        whole = parts[0]
        for part in parts[1:]:
            whole |= part
        if len(parts) > 1 and (whole.varies or any(part.states == 1 for part in parts)):
            raise ValueError(
                "xgrammar goes astray in alternatives that are empty, or have counts other than '*', '+' and '{n}'"
            )
        return whole

    def _sequence(self, depth: int) -> Part:
        whole, start = Part(1), self._at
        while self._at < len(self._text) and not self._next(("|", ")")):
            starts = self._next("^") and self._at == start
            ends = self._next("$") and self._text[self._at + 1 : self._at + 2] in ("", "|")
            if depth == 0 and (starts or ends):
                self._at += 1
            else:
                whole |= self._counted(depth)
        return whole

    def _counted(self, depth: int) -> Part:
        """An atom, as often as it says."""
        part = self._atom(depth)
        sign = self._text[self._at : self._at + 1]
        least, most = 1, 1
        found = COUNT.match(self._text, self._at)
        if found:
            least = int(found[1])
            most = int(found[3] or 0) if found[2] else least  # 0: as often as it likes
        if found or sign in ("*", "+", "?"):
            self._at = found.end() if found else self._at + 1
            self._at += self._next("?")
            if self._next(("*", "+", "?", "{")):
                raise ValueError("one count stands behind another")
        loops, varies = sign in ("*", "+"), sign == "?" or least != most
        if part.is_wide and not loops and not (found and found[2] and not found[3]):
            raise ValueError(
                "xgrammar takes some bytes that are no UTF-8 for one character where any beyond ASCII is allowed; "
                "count '.' and '[^...]' by '*', '+' or '{n,}' alone"
            )
        if part.is_group and (part.loops or part.varies) and not loops and (varies or most > 1):
            raise ValueError(
                "xgrammar goes astray where '?' or '{...}' counts a group that has counts itself"
            )
        copies = max(least, most)
        if copies > COUNTED:
            self._counts_far = True
            if not part.is_plain:
                raise ValueError(
                    f"a count above {COUNTED} lets quotes, backslashes and control characters through"
                )
        if part.states * copies > STATES:
            raise ValueError(
                f"its counts multiply to {part.states * copies} states, and xgrammar gives up at so many"
            )
        return Part(
            part.states * copies, part.is_plain, loops=part.loops or loops, varies=part.varies or varies
        )

    def _atom(self, depth: int) -> Part:
        self._num_atoms += 1
        character = self._text[self._at]
        if self._next("(?") and not self._next("(?:"):
            raise ValueError(f"xgrammar does not have {self._text[self._at :][:4]!r} as Python has")
        if character in "^$":
            raise ValueError(f"xgrammar leaves out a {character!r} that is not at an end")
        if character == "(":
            self._at += 3 if self._next("(?:") else 1
            part = self._choices(depth + 1)
            if not self._next(")"):
                raise ValueError("a parenthesis is not closed")
            self._at += 1
            return Part(part.states, part.is_plain, loops=part.loops, varies=part.varies, is_group=True)
        if character == "[":
            return self._class()
        if character == "{":
            raise ValueError("a '{' counts nothing; write '\\{'")
        if character == ".":
            self._at += 1
            return Part(CHARACTER, is_plain=False, is_wide=True)
        low, high = self._unit(is_negated=False)
        if low == high and not _is_plain(low):
            raise ValueError(ESCAPED)
        return Part(2, _is_plain(low))

    def _class(self) -> Part:
        """Of ``[a-z]``."""
        self._at += 1
        is_negated = self._next("^")
        self._at += is_negated
        has_plain, is_plain, start = False, True, self._at
        while self._at == start or not self._next("]"):
            if self._at >= len(self._text) or self._next(("[", "]", *SETS)):
                raise ValueError("it has a class that not all read alike; escape its signs")
            low, high = self._unit(is_negated)
            if low == high and self._next("-") and not self._next("-]"):
                self._at += 1
                high = self._unit(is_negated)[1]
            if high < low:
                raise ValueError("it has a class with a range that ends before it begins")
            characters = range(low, high + 1)
            has_plain |= any(map(_is_plain, characters))
            is_plain &= all(map(_is_plain, characters))
        self._at += 1
        if is_negated:
            return Part(CHARACTER, is_plain=False, is_wide=True)
        if not has_plain:
            raise ValueError(ESCAPED)
        return Part(2, is_plain)

    def _unit(self, is_negated: bool) -> tuple[int, int]:
        """The first and the last character that a literal or an escape stands for."""
        character = self._text[self._at : self._at + 1]
        self._at += 1
        if character != "\\":
            return ord(character or "]"), ord(character or "]")
        character = self._text[self._at : self._at + 1]
        self._at += 1
        if character in CLASSES and not is_negated:
            return CLASSES[character]
        if character in CONTROL:
            return CONTROL[character], CONTROL[character]
        if found := HEX.match(self._text, self._at - 1):
            self._at = found.end()
            code = int(found[1] or found[2], 16)
            return code, code
        if not character or character.isalnum():
            raise ValueError(f"xgrammar does not have '\\{character}' here as Python has")
        return ord(character), ord(character)
