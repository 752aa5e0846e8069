# SPDX-License-Identifier: Apache-2.0
"""The token spans of a text: which tokens begin one, and which go on behind an output that is the beginning of some.

A text counts as the tokens that the tokenizer makes of it alone. Where such a token begins with a space a span may also
begin with what the tokenizer makes of the rest, all of it: answers seldom begin with a space. What is kept of an output
is where in the text it may go on, which is little after a token or two.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vllm_ext.kernels.trie import Int32
from vllm_ext.samplers.base import Vocabulary, text_of
from vllm_ext.samplers.kept import Kept, digest

NOTHING = -1  # instead of a token through which no span goes
KEPT_BYTES = 64 << 20  # of passages, of some ten to thirty bytes a token


class Passage:
    """One text. Places are int32 indices of tokens: where an output may go on; None stands for the empty output.

    Behind the text's tokens, and one that is `NOTHING`, stand those that spans may begin with instead of another.
    """

    def __init__(self, tokens: Int32, openings: Mapping[int, Sequence[int]]) -> None:
        """
        Args:
            tokens: int32 ``[num_tokens]``, or `NOTHING`.
            openings: by token, what a span may begin with in its place.
        """
        self._end = len(tokens)
        breaks = np.append(np.flatnonzero(tokens == NOTHING), self._end)
        places = np.arange(self._end + 1)
        rooms: list[int] = (breaks[np.searchsorted(breaks, places)] - places).tolist()
        every: list[int] = [*tokens.tolist(), NOTHING]
        following = list(range(1, self._end + 2))
        needs = [0] * (self._end + 1)
        starts = list(range(self._end))
        for place in starts[:]:
            opening = openings.get(every[place], ())
            if opening:
                starts.append(len(every))
                every += opening
                following += range(len(following) + 1, len(every))
                following.append(place + 1)
                rooms += range(rooms[place + 1] + len(opening), rooms[place + 1], -1)
                needs += range(len(opening), 0, -1)
        self._tokens, self._following, self._rooms, self._needs, self._starts = (
            np.array(values, dtype=np.int32) for values in (every, following, rooms, needs, starts)
        )
        self._most_needed = max(needs)
        first = np.unique(self._tokens[self._starts])
        self._first: Int32 = first[first != NOTHING]

    @property
    def num_bytes(self) -> int:
        """What it takes, nearly."""
        arrays = self._tokens, self._following, self._rooms, self._needs, self._starts, self._first
        return sum(array.nbytes for array in arrays)

    def after(self, places: Int32 | None, token: int) -> Int32:
        """The places behind one token more; none where it may not come."""
        here = self._starts if places is None else places
        behind: Int32 = self._following[here[self._tokens[here] == token]]
        return behind

    def behind(self, output: Sequence[int]) -> Int32 | None:
        """The places behind an output."""
        places: Int32 | None = None
        for done, token in enumerate(output):
            places = self.after(places, token)
            if len(places) == 1 and places[0] <= self._end:
                place, rest = int(places[0]), output[done + 1 :]
                last = place + len(rest)
                is_same = np.array_equal(self._tokens[place:last], rest)
                return np.array([last] if is_same else [], dtype=np.int32)
        return places

    def next_tokens(self, places: Int32 | None, left: int) -> Int32:
        """The tokens of the text that may come, ascending, so that a span of so many tokens more at most can be had."""
        if places is None and left >= max(self._most_needed, 1):
            return self._first
        here = self._starts if places is None else places
        found: Int32 = self._tokens[here[self._needs[here] <= left]] if left else here[:0]
        if len(found) > 1:
            found = np.unique(found)
        return found[1:] if len(found) and found[0] == NOTHING else found

    def may_end(self, places: Int32 | None) -> bool:
        """Whether an output is a whole span."""
        return places is not None and bool((places <= self._end).any())

    def allowed(self, places: Int32 | None, left: int, end: int) -> Int32:
        """`next_tokens`, and the end token last where an output is a whole span."""
        tokens = self.next_tokens(places, left)
        return np.append(tokens, np.int32(end)) if self.may_end(places) else tokens

    def room(self, places: Int32 | None) -> int:
        """Most tokens that may come."""
        here = self._starts if places is None else places
        return int(self._rooms[here].max()) if len(here) else 0


class Passages:
    """The passages of a vocabulary; those asked for last are kept."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._kept: Kept[Passage] = Kept(KEPT_BYTES, lambda passage: passage.num_bytes)
        self._opening = functools.cache(self._without_space)

    def of(self, text: str, end: int) -> Passage:
        """A text's."""
        return self._kept.of(digest(text, end), lambda: self._read(text, end))

    def _read(self, text: str, end: int) -> Passage:
        """A text's; no span goes through the end token, nor through special ones, which a text may spell."""
        tokens = np.array(self.vocabulary.encode(text), dtype=np.int32)
        tokens[(tokens == end) | ~self._is_text[tokens]] = NOTHING
        openings = {token: self._opening(token) for token in {*tokens.tolist()} - {NOTHING}}
        return Passage(tokens, {token: opening for token, opening in openings.items() if end not in opening})

    def warm_up(self) -> None:
        """Make the tables."""
        _ = self._is_text, self._ids

    @functools.cached_property
    def _is_text(self) -> npt.NDArray[np.bool_]:
        return np.array([bool(piece) for piece in self.vocabulary.pieces])

    @functools.cached_property
    def _ids(self) -> dict[bytes, int]:
        """By piece; tokens of single bytes come before those that are words."""
        return {piece: number for number, piece in enumerate(self.vocabulary.pieces)}

    def _without_space(self, token: int) -> tuple[int, ...]:
        """What spells a token without its first space; nothing where it has none, or is nothing else."""
        piece = self.vocabulary.pieces[token]
        try:
            rest = piece[1:].decode()
        except UnicodeDecodeError:  # a part of a character
            return ()
        if piece[:1] != b" " or not rest:
            return ()
        spelled = tuple(self.vocabulary.encode(rest))
        if text_of(self.vocabulary, spelled) == piece[1:]:
            return spelled
        # Some tokenizers put a space before any text.
        return (self._ids[piece[1:]],) if piece[1:] in self._ids else ()
