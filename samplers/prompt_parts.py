# SPDX-License-Identifier: Apache-2.0
"""Prompts without a part of them: what twins of requests read."""

from __future__ import annotations

from collections.abc import Sequence


def without(prompt: Sequence[int], pieces: Sequence[bytes], part: str, field: str) -> list[int]:
    """A prompt without all tokens that have something of a part of it, wherever it stands.

    Args:
        prompt: token ids.
        pieces: by token id, what it adds to the text; nothing for special tokens, which stay.
        part: word for word; space around it does not count.
        field: what to call it.

    Raises:
        ValueError: the part is not in the prompt, or nothing else is.
    """
    own = [pieces[token] for token in prompt]
    spans = _places(b"".join(own), part.strip().encode())
    short = repr(part if len(part) <= 60 else f"{part[:40]}... ({len(part)} characters)")
    if not spans:
        raise ValueError(
            f"{field}={short} is not in the prompt; give a part of it word for word, or leave {field} out"
        )
    rest, begin = [], 0
    for token, piece in zip(prompt, own, strict=True):
        end = begin + len(piece)
        if not (piece and any(begin < last and end > first for first, last in spans)):
            rest.append(token)
        begin = end
    if not rest:
        raise ValueError(f"{field}={short} is all of the prompt; there must be something beside it")
    return rest


def _places(text: bytes, part: bytes) -> list[tuple[int, int]]:
    """Where a part begins and ends in a text, each time it is there."""
    found, begin = [], text.find(part)
    while begin >= 0:
        found.append((begin, begin + len(part)))
        begin = text.find(part, begin + len(part))
    return found
