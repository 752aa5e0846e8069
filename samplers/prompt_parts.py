# SPDX-License-Identifier: Apache-2.0
"""Prompts with a part of them left out or replaced: what pairs of requests read."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple


class Prompt(NamedTuple):
    """A request's prompt, and how texts become tokens."""

    tokens: Sequence[int]
    pieces: Sequence[bytes]  # what each token adds to the text; nothing for special tokens and images
    encode: Callable[[str], list[int]]  # of a part: the tokens of a text alone, without special ones
    encode_prompt: Callable[[str], list[int]]  # of a whole prompt, as the server does it


class PairedPrompt(NamedTuple):
    """What a request's pair reads."""

    tokens: list[int]
    places: list[int]  # of each token of the request's own prompt, where it stands in this one; -1: nowhere
    field: str  # the parameter that its length is due to


def without(
    prompt: Prompt, part: str, field: str, instead: str = "", instead_field: str = ""
) -> PairedPrompt:
    """A prompt without all tokens that have something of a part of it, wherever it stands.

    Args:
        prompt: the request's; tokens that add nothing to its text stay.
        part: word for word; space around it does not count.
        field: what to call it.
        instead: what stands there then; space around it does not count either. What the first and the last token of
            the part have of the text around it is encoded with it, so that nothing else of the text changes.
        instead_field: what to call that.

    Raises:
        ValueError: the part is not in the prompt, or nothing else is.
    """
    pieces, old, new = prompt.pieces, part.strip().encode(), instead.strip().encode()
    text, ends = b"".join(pieces), list(accumulate(map(len, pieces)))
    runs: list[tuple[int, int]] = []  # first and last tokens
    begin = text.find(old) if old else -1
    while begin >= 0:
        end = begin + len(old)
        first, last = bisect_right(ends, begin), bisect_left(ends, end)
        while new and first and _within_character(text, ends[first] - len(pieces[first])):
            first -= 1
        while new and _within_character(text, ends[last]):
            last += 1
        if runs and first <= runs[-1][1]:
            first = runs.pop()[0]
        runs.append((first, last))
        begin = text.find(old, end)
    short = shortened(part)
    if not runs:
        raise ValueError(
            f"{field}={short} is not in the prompt; give a part of it word for word, or leave {field} out"
        )
    gone = {place for first, last in runs for place in range(first, last + 1) if pieces[place]}
    put = {
        first: text[ends[first] - len(pieces[first]) : ends[last]].replace(old, new)
        for first, last in (runs if new else ())
    }
    tokens: list[int] = []
    places: list[int] = []
    for place, token in enumerate(prompt.tokens):
        if place in put:
            tokens += prompt.encode(put[place].decode(errors="ignore"))
        places.append(-1 if place in gone else len(tokens))
        if place not in gone:
            tokens.append(token)
    if not tokens:
        raise ValueError(f"{field}={short} is all of the prompt; there must be something beside it")
    return PairedPrompt(tokens, places, instead_field if new else field)


def another(prompt: Prompt, text: str, field: str) -> PairedPrompt:
    """Another prompt, of which the request's own has nothing; of an empty text the last token of the own one.

    Raises:
        ValueError: the text has no tokens.
    """
    if not text:
        return PairedPrompt(list(prompt.tokens[-1:]), [-1] * (len(prompt.tokens) - 1) + [0], field)
    if not (tokens := prompt.encode_prompt(text)):
        raise ValueError(
            f"{field}={shortened(text)} has no tokens; give other text, or '' for the prompt's last token alone"
        )
    return PairedPrompt(tokens, [-1] * len(prompt.tokens), field)


def shortened(text: str) -> str:
    """A text as messages about a prompt quote it."""
    return repr(text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)")


def _within_character(text: bytes, place: int) -> bool:
    """Whether a place in UTF-8 is between two bytes of one character."""
    return place < len(text) and text[place] & 0xC0 == 0x80
