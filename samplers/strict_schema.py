# SPDX-License-Identifier: Apache-2.0
"""JSON schemas that xgrammar 0.2.8 enforces whole: what its grammar takes is JSON, and valid.

xgrammar reads one thing of a schema: the first there is of ``$ref``, ``const``, ``enum``, ``anyOf``, ``oneOf``,
``allOf`` and ``type``, and with the last what goes with that type. The rest is left out without a word, and some of
what is read is read too widely. So a schema is followed here as xgrammar follows it, and whatever else in it may make
a value invalid is a problem, unless it can be shown that it does not. Read off its json_schema_converter.cc, and held
by tests/samplers/test_strict_schema.py.

Valid is what the library jsonschema says by the schema's own ``$schema``: ``format`` is an annotation, a pattern is
Python's. Schemas that xgrammar or vLLM refuse anyway may pass here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm_ext.samplers.messages import quoted
from vllm_ext.samplers.strict_branches import Branches, kinds_named, kinds_of_values
from vllm_ext.samplers.strict_leaves import (
    NUMBERS,
    Found,
    check_counts,
    check_number,
    check_string,
    check_values,
)
from vllm_ext.samplers.strict_pattern import pattern_problem

# What xgrammar reads, by type.
READ = {
    "string": ("pattern", "minLength", "maxLength"),
    "integer": NUMBERS,
    "number": NUMBERS,
    "array": ("prefixItems", "items", "unevaluatedItems", "minItems", "maxItems"),
    "object": (
        *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
        *("propertyNames", "required", "minProperties", "maxProperties"),
    ),
}
# What it does not.
UNREAD = {
    "integer": ("multipleOf",),
    "number": ("multipleOf",),
    "array": ("uniqueItems", "contains"),
    "object": ("dependentRequired", "dependentSchemas", "dependencies"),
}
NEVER_READ = ("not", "if", "$dynamicRef", "$recursiveRef")
FORMS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf", "type")
IMPLIED = {
    "object": ("properties", "additionalProperties", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "unevaluatedItems"),
}
# Keywords that say nothing where they are empty, 0 or false; where they are true or empty.
EMPTY = (
    *("properties", "patternProperties", "required", "minProperties", *UNREAD["object"]),
    *("prefixItems", "minItems", "uniqueItems", "minLength", "allOf"),
)
OPEN = ("additionalProperties", "unevaluatedProperties", "propertyNames", "items", "unevaluatedItems")
# Names that xgrammar takes for annotations where it compares schemas, even those of properties.
ANNOTATIONS = {
    *("title", "description", "$comment", "default", "examples"),
    *("deprecated", "readOnly", "writeOnly", "$schema"),
}
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
OF_VALUES = ("const", "enum", "required", "dependentRequired")  # no schemas


@dataclass(frozen=True)
class Problem:
    """What of a schema is not enforced."""

    pointer: str  # JSON pointer of the schema that says it
    keyword: str
    value: Any
    why: str
    instead: str = ""  # how the schema may say it

    def __str__(self) -> str:
        value = json.dumps(self.value)
        shown = value if len(value) <= 100 else f"{value[:97]}..."
        return f"{self.pointer or 'at the root'}: {self.keyword}={shown}: {self.why}"


def first_problem(schema: Any) -> Problem | None:
    """What of a JSON schema xgrammar would not enforce; None where there is nothing."""
    return _Reader(schema).read()


class _Reader:
    """One schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._branches = Branches(root)
        self._has_refs = '"$ref"' in json.dumps(root)
        self._by_key: dict[str, tuple[str, dict[str, Any]]] = {}  # pointer and schema, by xgrammar's key

    def read(self) -> Problem | None:
        """See `first_problem`."""
        seen: set[int] = set()
        todo = [("", self._root)]
        while todo:  # no recursion: a chain of references is as long as it likes
            pointer, node = todo.pop()
            if not isinstance(node, dict) or id(node) in seen:
                continue  # true allows everything; false and all else xgrammar refuses
            seen.add(id(node))
            try:
                inner = list(self._read(pointer, node))
            except Found as found:
                return Problem(pointer, *found.problem)
            except (TypeError, AttributeError) as error:
                return Problem(
                    pointer, _form(node), node.get(_form(node)), f"this is no JSON schema: {error}"
                )
            todo += [
                (path if absolute else f"{pointer}/{path}", child)
                for path, child, absolute in reversed(inner)
            ]
        return None

    def _read(self, pointer: str, node: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
        """The schemas inside one that xgrammar reads: where, what, and whether the pointer is from the root."""
        self._check_key(pointer, node)
        if not pointer and self._branches.draft == 3:
            raise Found("$schema", node["$schema"], "xgrammar reads it as a later draft")
        if pointer and self._has_refs and self._branches.moves(node):
            key = self._branches.id_key
            raise Found(
                key, node[key], "xgrammar looks up references from the root all the same", "Leave it out"
            )
        if self._branches.is_circular(node):
            form = _form(node)
            raise Found(form, node.get(form), "it refers to itself, for the same value")
        if "$ref" in node and self._branches.refs_stand_alone:
            yield from self._reference(node)
            return
        form = _form(node)
        items, draft = node.get("items"), self._branches.draft
        if isinstance(items, bool) and (draft <= 4 or (draft == 2019 and "unevaluatedItems" in node)):
            raise Found("items", items, "jsonschema cannot read it there, as the $schema says")
        self._check_unread(node, form)
        if form == "$ref":
            yield from self._reference(node)
        elif form in ("const", "enum"):
            check_values(form, node[form])
        elif form in ("anyOf", "oneOf", "allOf"):
            yield from self._choices(form, node[form])
        else:
            for name in _types(node) if form == "type" else (form,):
                if name == "string":
                    check_string(node)
                elif name in ("integer", "number"):
                    check_number(node, name, self._branches.draft)
                elif name == "array":
                    yield from self._array(node)
                elif name == "object":
                    yield from self._object(node)

    def _check_key(self, pointer: str, node: dict[str, Any]) -> None:
        """xgrammar keeps what it made of a schema, by its text without all that is called as an annotation is."""
        before, other = self._by_key.setdefault(_key(node), (pointer, node))
        if other is not node and _meaning(other) != _meaning(node):
            ours, theirs = _meaning(node), _meaning(other)
            keyword = next(keyword for keyword in ours if theirs.get(keyword) != ours[keyword])
            raise Found(
                keyword,
                node[keyword],
                f"xgrammar takes it for what stands at {before or 'the root'}: where it compares schemas it leaves out "
                f"what is called {', '.join(sorted(ANNOTATIONS))}, properties of these names too",
                "Name these properties otherwise",
            )

    def _check_unread(self, node: dict[str, Any], form: str) -> None:
        """What stands beside what xgrammar reads of a schema."""
        types = _types(node) if form == "type" else (form,) if form in IMPLIED else tuple(READ)
        read = {
            form,
            *(keyword for name in types for keyword in READ.get(name, ()) if form in ("type", *IMPLIED)),
        }
        unread = {keyword for name in types for keyword in UNREAD.get(name, ())}
        known = {*FORMS, *NEVER_READ, *unread, *(keyword for name in types for keyword in READ.get(name, ()))}
        for keyword, value in node.items():
            if keyword not in known or keyword in read or _says_nothing(keyword, value, node):
                continue
            if keyword == "type" and self._made(form, node) <= kinds_named(value):
                continue
            if keyword in unread or keyword in NEVER_READ:
                raise Found(keyword, value, "xgrammar leaves it out")
            if form == "any":
                raise Found(
                    keyword, value, "xgrammar reads nothing of a schema without a type", 'Give it a "type"'
                )
            raise Found(
                keyword, value, f"xgrammar reads {form} of this schema, and nothing that stands beside it"
            )

    def _made(self, form: str, node: dict[str, Any]) -> frozenset[str]:
        """Types of what xgrammar makes of a schema that says more than a type."""
        if form in ("const", "enum"):
            return kinds_of_values([node["const"]] if form == "const" else node["enum"])
        if form == "$ref":
            return self._branches.kinds(next(self._branches.inside({"$ref": node["$ref"]}), True))
        return frozenset[str]().union(*map(self._branches.kinds, node[form]))

    def _reference(self, node: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
        try:
            yield (*self._branches.target(node["$ref"]), True)
        except ValueError as error:
            raise Found("$ref", node["$ref"], str(error)) from None

    def _choices(self, form: str, options: Any) -> Iterator[tuple[str, Any, bool]]:
        if not isinstance(options, list):
            return
        if form == "allOf" and len(options) != 1:
            raise Found("allOf", options, "xgrammar takes several schemas at once for any value", "Join them")
        if form == "oneOf" and (both := self._branches.overlap(options)) is not None:
            raise Found(
                "oneOf",
                options,
                f"xgrammar takes it for anyOf, and a value may be valid for both {both[0]} and {both[1]} of it, as far "
                "as types, constants and required properties tell",
                "Say anyOf, or give each branch a required property with a constant of its own",
            )
        for number, option in enumerate(options):
            yield f"{form}/{number}", option, False

    def _array(self, node: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
        check_counts(node, "minItems", "maxItems")
        first, rest = node.get("prefixItems"), node.get("items", True)
        if "items" in node and not _says_nothing(
            "unevaluatedItems", later := node.get("unevaluatedItems", True), node
        ):
            raise Found("unevaluatedItems", later, "xgrammar reads `items` of this schema, and not this")
        if first and self._branches.draft < 2020 and not _says_nothing("items", rest, node):
            raise Found(
                "items", rest, "xgrammar reads it as 2020-12 has it, for what stands behind prefixItems"
            )
        for number, item in enumerate(first if isinstance(first, list) else ()):
            yield f"prefixItems/{number}", item, False
        keyword = "items" if "items" in node else "unevaluatedItems"
        yield keyword, node.get(keyword), False

    def _object(self, node: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
        check_counts(node, "minProperties", "maxProperties")
        properties = node.get("properties") or {}
        patterns = node.get("patternProperties") or {}
        if not isinstance(properties, dict) or not isinstance(patterns, dict):
            return
        for name in node.get("required") or ():
            if name not in properties:
                raise Found(
                    "required",
                    node["required"],
                    f"xgrammar does not demand {quoted(name)}, which is not among `properties`",
                    f'Add it to them, as "{name}": {{}} at least',
                )
        opened = next((name for name in IMPLIED["object"][1:] if name in node), None)
        rest = node[opened] if opened else False
        later = node.get("unevaluatedProperties", True)
        if opened == "additionalProperties" and not _says_nothing("unevaluatedProperties", later, node):
            raise Found(
                "unevaluatedProperties", later, f"xgrammar reads {opened} of this schema, and not this"
            )
        self._check_patterns(patterns, properties, node)
        if "propertyNames" in node:
            self._check_names(node["propertyNames"], properties, rest is False and opened)
        elif opened and rest is not False and not patterns:
            for name, property in properties.items():
                if (
                    json.dumps(property) != json.dumps(rest)
                    and property is not True
                    and _meaning(property) != {}
                ):
                    raise Found(
                        opened,
                        rest,
                        f"xgrammar allows it for property {quoted(name)} too, where the name is written with an escape",
                        "Say false",
                    )
        if node.get("minProperties", 0) > 1 and (patterns or rest is not False or "propertyNames" in node):
            raise Found("minProperties", node["minProperties"], "xgrammar counts a name as often as it comes")
        for name, property in properties.items():
            yield f"properties/{_escaped(name)}", property, False
        for name, property in patterns.items():
            yield f"patternProperties/{_escaped(name)}", property, False
        if opened:
            yield opened, rest, False
        yield "propertyNames", node.get("propertyNames"), False

    def _check_patterns(
        self, patterns: dict[str, Any], properties: dict[str, Any], node: dict[str, Any]
    ) -> None:
        if not patterns:
            return
        if properties or len(patterns) > 1 or "propertyNames" in node:
            raise Found(
                "patternProperties",
                patterns,
                "xgrammar holds a name that several things are said of to one of them",
            )
        if problem := pattern_problem(next(iter(patterns))):
            raise Found("patternProperties", patterns, problem)

    def _check_names(self, names: Any, properties: dict[str, Any], closed: Any) -> None:
        if properties:
            raise Found("propertyNames", names, "xgrammar does not hold `properties` to it")
        if closed:
            raise Found(closed, False, "xgrammar allows what propertyNames allows all the same")
        if isinstance(names, dict) and not (
            names.get("type") == "string"
            or ("type" not in names and self._branches.kinds(names) <= {"string"})
        ):
            raise Found("propertyNames", names, "xgrammar lets names be no strings", 'Add "type": "string"')


def _form(node: dict[str, Any]) -> str:
    """What xgrammar reads of a schema."""
    found = (keyword for keyword in FORMS if keyword in node)
    implied = (name for name, keywords in IMPLIED.items() if not node.keys().isdisjoint(keywords))
    return next(found, next(implied, "any"))


def _types(node: dict[str, Any]) -> tuple[str, ...]:
    """Names of types."""
    types = node.get("type")
    names = types if isinstance(types, list) else [types]
    if types == []:
        raise Found("type", types, "xgrammar takes no type for any")
    return tuple(name for name in names if isinstance(name, str))


def _says_nothing(keyword: str, value: Any, node: dict[str, Any]) -> bool:
    """Whether a keyword allows everything."""
    if keyword == "if":
        return "then" not in node and "else" not in node
    return not value if keyword in EMPTY else keyword in OPEN and (value is True or value == {})


def _key(value: Any) -> str:
    """xgrammar's text of a schema."""
    if isinstance(value, dict):
        rest = sorted(name for name in value if name not in ANNOTATIONS)
        return f"{{{','.join(f'{chr(34)}{name}{chr(34)}:{_key(value[name])}' for name in rest)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_key, value))}]"
    return json.dumps(value)


def _meaning(value: Any) -> Any:
    """A schema without its annotations."""
    if isinstance(value, list):
        return [_meaning(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for keyword, inner in value.items():
        if keyword in OF_NAMES and isinstance(inner, dict):
            found[keyword] = {name: _meaning(item) for name, item in inner.items()}
        elif keyword not in ANNOTATIONS:
            found[keyword] = inner if keyword in OF_VALUES else _meaning(inner)
    return found


def _escaped(name: str) -> str:
    """As JSON pointers have it."""
    return name.replace("~", "~0").replace("/", "~1")
