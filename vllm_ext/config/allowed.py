# SPDX-License-Identifier: Apache-2.0
"""What an option may be, in words, from its JSON schema; and which known name somebody may have meant."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

MOST_EDITS = 2
MOST_OTHERS = 64  # keys of a request that are compared with ours
SHORT = 3  # of names this short every other word is two edits away: one counts


def in_words(schema: Mapping[str, Any]) -> str:
    """The types and bounds of a field, as in "integer or null, 1 to 32".

    Args:
        schema: the field's part of a JSON schema.
    """
    choices = schema.get("anyOf", [schema])
    kinds = dict.fromkeys(kind for choice in choices for kind in _kinds(choice))
    bounds = dict.fromkeys(bound for choice in choices for bound in _bounds(choice))
    return ", ".join([" or ".join(kinds), *bounds])


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    if "enum" in schema:
        return [repr(value) for value in schema["enum"]]
    if "$ref" in schema:  # options of their own
        return ["object"]
    if "const" in schema:
        return [repr(schema["const"])]
    return [schema.get("type", "any")]


def _bounds(schema: Mapping[str, Any]) -> Iterator[str]:
    kind = schema.get("type")
    if kind == "array":
        yield from _range(schema.get("minItems"), schema.get("maxItems"), " long")
        if schema.get("items"):
            yield f"each {in_words(schema['items'])}"
    elif kind == "object":
        yield from _range(schema.get("minProperties"), schema.get("maxProperties"), " entries")
        if isinstance(schema.get("additionalProperties"), Mapping):
            yield f"each {in_words(schema['additionalProperties'])}"
    elif kind == "string" and "enum" not in schema:
        if schema.get("maxLength") is not None:
            yield from _range(schema.get("minLength", 0), schema["maxLength"], " characters")
        elif schema.get("minLength"):
            yield "not empty"
        if schema.get("pattern") == "\\S":
            yield "not blank"
    elif kind in ("integer", "number"):
        if (above := schema.get("exclusiveMinimum")) is not None:
            high = schema.get("maximum")
            yield f"above {above}" + ("" if high is None else f", at most {high}")
        else:
            yield from _range(schema.get("minimum"), schema.get("maximum"), "")


def _range(low: float | None, high: float | None, unit: str) -> Iterator[str]:
    if low is not None and high is not None:
        yield f"{low} to {high}{unit}"
    elif low is not None:
        yield f"at least {low}{unit}"
    elif high is not None:
        yield f"at most {high}{unit}"


def hint(name: object, known: Collection[str]) -> str:
    """ " Did you mean ...?", where a known name is near; else nothing."""
    found = nearest(name, tuple(known)) if isinstance(name, str) else None
    return f" Did you mean {found!r}?" if found else ""


def nearest(name: str, known: tuple[str, ...]) -> str | None:
    """The known name that is at most two edits away, whatever the case and the separators; the nearest one.

    An edit is a letter more, less, another, or two that have changed places. Known names of at most three letters
    allow one.
    """
    plain = _plain(name)
    of_plain, index = _index(known)
    if len(plain) > MOST_EDITS + max(map(len, of_plain), default=0):
        return None
    candidates = {each for shorter in _shorter(plain, MOST_EDITS) for each in index.get(shorter, ())}
    ranked = sorted((_distance(plain, each), each) for each in candidates)
    for distance, each in ranked:
        if distance <= (1 if len(each) <= SHORT else MOST_EDITS):
            return of_plain[each]
    return None


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_").replace(" ", "_")


@functools.lru_cache(64)
def _index(known: tuple[str, ...]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The known names by their plain form; and those forms by what is left of them without up to two letters, so that
    a name is compared with few of them.
    """
    of_plain = {_plain(name): name for name in known}
    index: dict[str, list[str]] = {}
    for each in of_plain:
        for shorter in _shorter(each, MOST_EDITS):
            index.setdefault(shorter, []).append(each)
    return of_plain, index


def _shorter(name: str, most: int) -> set[str]:
    """The name without up to so many of its letters."""
    found, last = {name}, {name}
    for _ in range(most):
        last = {each[:place] + each[place + 1 :] for each in last for place in range(len(each))}
        found |= last
    return found


def _distance(a: str, b: str) -> int:
    """Edits from one to the other: optimal string alignment."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        older, before, row = before, row, [i]
        for j, other in enumerate(b, 1):
            best = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                best = min(best, older[j - 2] + 1)
            row.append(best)
    return row[-1]
