# SPDX-License-Identifier: Apache-2.0
"""The shortest way to an end: what a grammar still has to hear before an answer is whole.

A search over texts, the shortest first: what is demanded anyway is taken at once, and where there is a choice one
character is, by a few rules of which none can make an answer wrong. Every ending that is found is one, as xgrammar has
read it; that none is shorter holds as far as these rules go: what closes is taken where it may come, of a string's
characters that are all alike one stands for the others, and the search ends after a number of steps.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm_ext.samplers.base import Vocabulary
from vllm_ext.samplers.grammar import Behind
from vllm_ext.samplers.json_place import Place

CLOSING = "}]"
ENDING = "}],"  # what may stand behind a value
MANY = 12  # characters that may come: a class, of which one stands for the others
LONGEST = 32  # bytes of a token that is of use: few are longer
STEPS = 300  # texts that are looked at
# The first ones come first.
CHARACTERS = [*'"}],:0-1', *"atfne", *string.ascii_lowercase, *string.ascii_uppercase, *string.digits]
CHARACTERS = list(dict.fromkeys([*CHARACTERS, *string.punctuation, " ", "\n", "\t"]))


class Endings:
    """Finds them in the tokens of one vocabulary.

    Args:
        vocabulary: the target's.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def shortest(self, behind: Behind, place: Place | None = None) -> list[int] | None:
        """The tokens of the shortest ending that is found; without the end token, so that a whole answer has none.

        Args:
            behind: a grammar behind what there is of an answer; left as it is.
            place: of an answer in JSON, where it is; None: it is something else.

        Returns:
            None where none is found.
        """
        text = self._text(behind, place)
        return None if text is None else self.spelled(text)

    def spelled(self, text: bytes) -> list[int] | None:
        """The fewest tokens that are a text; None where the vocabulary has none."""
        # By place, how few tokens lead there, and the last of them.
        fewest: list[tuple[int, int, int]] = [(0, -1, -1)]
        for end in range(1, len(text) + 1):
            ways = [
                (1 + fewest[start][0], start, token)
                for start in range(max(0, end - LONGEST), end)
                if fewest[start][0] < len(text) + 1 and (token := self._ids.get(text[start:end])) is not None
            ]
            fewest.append(min(ways, default=(len(text) + 1, -1, -1)))
        if fewest[-1][0] > len(text):
            return None
        tokens: list[int] = []
        place = len(text)
        while place:
            _, place, token = fewest[place]
            tokens.append(token)
        return tokens[::-1]

    def _text(self, behind: Behind, place: Place | None) -> bytes | None:
        """The shortest text behind which an answer is whole, in UTF-8."""
        number = itertools.count()
        waiting: list[tuple[int, int, bytes, Place | None, Behind]] = [
            (0, next(number), b"", place, behind.fork())
        ]
        seen: set[Any] = set()
        for _ in range(STEPS):
            if not waiting:
                return None
            length, _, text, there, reached = heapq.heappop(waiting)
            if reached.ends():
                return text
            choices = self._choices(reached, there)
            if there is not None:
                # Of two texts of one place, behind which the same may come, the shorter one will do.
                key = *there.kind, *choices
                if key in seen:
                    continue
                seen.add(key)
            for more in choices:
                after = reached.fork()
                if after.read(more):
                    new = None if there is None else there.behind(more)
                    heapq.heappush(waiting, (length + len(more), next(number), text + more, new, after))
        return None

    def _choices(self, reached: Behind, place: Place | None) -> list[bytes]:
        """What the search goes on with."""
        if demanded := reached.demanded():
            return [demanded]
        allowed = reached.allowed()
        if not len(allowed):
            return []
        at = np.minimum(np.searchsorted(allowed, self._single), len(allowed) - 1)
        there = (allowed[at] == self._single).tolist()
        found = [character for character, may_come in zip(CHARACTERS, there, strict=True) if may_come]
        if place is not None and not place.in_string:
            found = self._of_json(reached, found)
        elif place is not None and '"' in found:
            found = ['"']
        else:
            words = [each for each in found if each.isalnum()]
            signs = [each for each in found if not each.isalnum()]
            words.sort(key=str.isdigit)  # a letter stands for all, if there is one
            found = [each for kind in (words, signs) for each in (kind if len(kind) <= MANY else kind[:1])]
        return [each.encode() for each in found]

    def _of_json(self, reached: Behind, found: list[str]) -> list[str]:
        """Of what may come outside of strings, what has to be looked at."""
        dark = [each for each in found if not each.isspace()]
        if ends := [each for each in ENDING if each in dark]:
            # A number may go on where it may end, and nothing that is shorter comes of that.
            return [each for each in CLOSING if each in ends] or ends
        digits = [each for each in dark if each.isdigit()]
        others = [each for each in dark if not each.isdigit() and not (each == "-" and digits)]
        return ([*others, self._last_digit(reached, digits)] if digits else others) or found[:1]

    def _last_digit(self, reached: Behind, digits: Sequence[str]) -> str:
        """One behind which a number may end, if there is any."""
        for digit in digits:
            after = reached.fork()
            if after.read(digit.encode()) and (
                after.ends() or after.read(b",") or after.read(b"}") or after.read(b"]")
            ):
                return digit
        return digits[0]

    @functools.cached_property
    def _ids(self) -> Mapping[bytes, int]:
        """By what a token adds to the text; of several the first."""
        found: dict[bytes, int] = {}
        for token, piece in enumerate(self._vocabulary.pieces):
            if piece:
                found.setdefault(piece, token)
        return found

    @functools.cached_property
    def _single(self) -> Any:
        """int32 ``[characters]`` their tokens; one behind the vocabulary where there is none."""
        return np.array(
            [self._ids.get(each.encode(), self._vocabulary.size) for each in CHARACTERS], np.int32
        )
