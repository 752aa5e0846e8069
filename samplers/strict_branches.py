# SPDX-License-Identifier: Apache-2.0
"""References and branches of a JSON schema: where ``$ref`` leads, which types there are, what excludes each other.

xgrammar takes ``oneOf`` for ``anyOf``. That is the same where no value of one branch is valid for another: shown here
by types, by constants, by a property that both require with values that exclude each other, or by one that a branch
requires and the other does not have. What cannot be shown counts as an overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

DRAFTS = {
    **{f"http://json-schema.org/draft-0{number}/schema": number for number in (3, 4, 6, 7)},
    "https://json-schema.org/draft/2019-09/schema": 2019,
}  # what jsonschema does not know it takes for the latest, as it does what says nothing
LATEST = 2020
IN_PLACE = ("anyOf", "oneOf", "allOf")
# Types as sets that do not overlap.
KINDS = {
    **{name: frozenset([name]) for name in ("null", "boolean", "integer", "string", "array", "object")},
    "number": frozenset(("integer", "fraction")),
}
ANY = frozenset[str]().union(*KINDS.values())
FAR = 32  # references and choices that are followed for types
DEEP = 4  # properties of properties that are compared


class Branches:
    """Of one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        named = root.get("$schema") if isinstance(root, dict) else None
        self.draft = DRAFTS.get(named.removesuffix("#"), LATEST) if isinstance(named, str) else LATEST
        self.refs_stand_alone = self.draft <= 7  # what stands beside them is ignored
        self.id_key = "id" if self.draft <= 4 else "$id"
        self._kinds: dict[int, frozenset[str]] = {}  # by id
        self._ending: set[int] = set()  # ids of what `is_circular` has gone through

    def target(self, ref: Any) -> tuple[str, Any]:
        """Where a reference leads: JSON pointer, and what is there; None where xgrammar refuses it.

        Raises:
            ValueError: xgrammar and jsonschema look in different places.
        """
        if ref == "#":
            return "", self._root
        if not isinstance(ref, str) or not ref.startswith("#/"):
            raise ValueError("xgrammar takes a reference that does not begin with '#/' for any value")
        found: Any = self._root
        for part in ref[2:].split("/"):
            if not part or "%" in part or "~" in part:
                raise ValueError("xgrammar looks for names as they are written, and passes over empty ones")
            found = found.get(part) if isinstance(found, dict) else None
            if self.moves(found):
                raise ValueError(
                    f"it leads through {self.id_key}={found[self.id_key]!r}, which xgrammar does not know"
                )
        return ref[1:], found

    def moves(self, node: Any) -> bool:
        """Whether references in a schema that is not the root do not start at the root."""
        name = node.get(self.id_key) if isinstance(node, dict) else None
        return isinstance(name, str) and not name.startswith("#")

    def inside(self, node: Any) -> Iterator[Any]:
        """Schemas that hold for the same value."""
        if not isinstance(node, dict):
            return
        if "$ref" in node:
            try:
                yield self.target(node["$ref"])[1]
            except ValueError:
                return
            if self.refs_stand_alone:
                return
        for keyword in IN_PLACE:
            if isinstance(node.get(keyword), list):
                yield from node[keyword]

    def is_circular(self, node: Any) -> bool:
        """Whether there is no end to the schemas that hold for the same value."""
        path = [(node, self.inside(node))]  # depth first, without recursion
        on_path = {id(node)}
        while path:
            here, rest = path[-1]
            for found in rest:
                if id(found) in on_path:
                    return True
                if isinstance(found, dict) and id(found) not in self._ending:
                    path.append((found, self.inside(found)))
                    on_path.add(id(found))
                    break
            else:
                path.pop()
                on_path.discard(id(here))
                self._ending.add(id(here))
        return False

    def kinds(self, node: Any, steps: int = FAR) -> frozenset[str]:
        """What values a schema may allow; any, where it says so more than so many steps away."""
        if not isinstance(node, dict) or not steps:
            return ANY
        if id(node) not in self._kinds:
            self._kinds[id(node)] = ANY  # of a circle
            self._kinds[id(node)] = self._kinds_of(node, steps - 1)
        return self._kinds[id(node)]

    def _kinds_of(self, node: dict[str, Any], steps: int) -> frozenset[str]:
        found = ANY
        if "$ref" in node:
            found = self.kinds(next(self.inside(node), True), steps)
            if self.refs_stand_alone:
                return found
        if "type" in node:
            found &= kinds_named(node["type"])
        if (values := self._values(node)) is not None:
            found &= kinds_of_values(values)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(node.get(keyword), list):
                found &= frozenset[str]().union(*(self.kinds(each, steps) for each in node[keyword]))
        for each in node.get("allOf") or ():
            found &= self.kinds(each, steps)
        return found

    def overlap(self, branches: Sequence[Any]) -> tuple[int, int] | None:
        """Two branches that a value may be valid for; None where there are none."""
        plain = [self._resolved(branch) for branch in branches]
        for one, other in itertools.combinations(range(len(plain)), 2):
            first, second = plain[one], plain[other]
            if not self._exclude(first, second, DEEP) and not (
                _lacks(first, second) and _lacks(second, first)
            ):
                return one, other
        return None

    def _resolved(self, node: Any) -> Any:
        """Behind references that stand alone."""
        seen = set()
        while isinstance(node, dict) and "$ref" in node and (self.refs_stand_alone or len(node) == 1):
            if id(node) in seen:
                return True
            seen.add(id(node))
            node = next(self.inside(node), True)
        return node

    def _values(self, node: dict[str, Any]) -> list[Any] | None:
        """All that a schema allows, where it lists them."""
        if isinstance(node.get("enum"), list):
            return list(node["enum"])
        return [node["const"]] if "const" in node and self.draft > 4 else None

    def _exclude(self, one: Any, other: Any, deep: int) -> bool:
        """Whether no value is valid for both."""
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        kinds = self.kinds(one), self.kinds(other)
        if not kinds[0] & kinds[1]:
            return True
        values = self._values(one), self._values(other)
        if values[0] is not None and values[1] is not None:
            return not any(_same(first, second) for first in values[0] for second in values[1])
        if KINDS["object"] not in kinds:
            return False
        if _forbids_all_but_properties(one) and _lacks(one, other):
            return True
        if _forbids_all_but_properties(other) and _lacks(other, one):
            return True
        shared = {*_required(one)} & {*_required(other)} & _properties(one).keys() & _properties(other).keys()
        return deep > 0 and any(
            self._exclude(
                self._resolved(_properties(one)[name]), self._resolved(_properties(other)[name]), deep - 1
            )
            for name in shared
        )


def kinds_named(types: Any) -> frozenset[str]:
    """What ``type`` allows."""
    names = [types] if isinstance(types, str) else types if isinstance(types, list) else []
    return frozenset[str]().union(*(KINDS.get(name, frozenset()) for name in names if isinstance(name, str)))


def kinds_of_values(values: Sequence[Any]) -> frozenset[str]:
    """What types some values have; a float may count as an integer or not."""
    names = {
        type(None): "null",
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        list: "array",
    }
    return frozenset[str]().union(*(KINDS[names.get(type(value), "object")] for value in values))


def _same(one: Any, other: Any) -> bool:
    """Whether two values may be the same as JSON; true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return bool(one == other)


def _properties(node: dict[str, Any]) -> dict[str, Any]:
    found = node.get("properties")
    return found if isinstance(found, dict) else {}


def _required(node: dict[str, Any]) -> list[str]:
    found = node.get("required")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _forbids_all_but_properties(node: dict[str, Any]) -> bool:
    return node.get("additionalProperties") is False and not node.get("patternProperties")


def _lacks(one: Any, other: Any) -> bool:
    """Whether xgrammar's objects of one schema never have a property that another requires."""
    if not isinstance(one, dict) or not isinstance(other, dict) or "$ref" in other:
        return False
    plain = one.get("type", "object") == "object" and "properties" in one
    closed = not any(
        one.get(name, False) is not False for name in ("additionalProperties", "unevaluatedProperties")
    )
    alone = not any(
        name in one for name in ("$ref", "const", "enum", *IN_PLACE, "patternProperties", "propertyNames")
    )
    return plain and closed and alone and bool({*_required(other)} - _properties(one).keys())
