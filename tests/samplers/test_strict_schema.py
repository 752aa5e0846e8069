# SPDX-License-Identifier: Apache-2.0
"""Schemas that strict lets through: whatever xgrammar takes for one is JSON, and valid by jsonschema.

What it takes is drawn by random walks through a matcher's masks, a byte a token.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("jsonschema")
pytest.importorskip("xgrammar")

import xgrammar
from jsonschema.validators import validator_for

from vllm_ext.samplers import strict_leaves, strict_schema
from vllm_ext.samplers.strict_schema import first_problem

LONGEST = 120  # bytes after which a walk tries to end
END = 256
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo(
        [*(bytes([byte]) for byte in range(256)), b""], xgrammar.VocabType.RAW, stop_token_ids=[END]
    ),
    cache_enabled=False,
)
LIKELY = frozenset(b'"{}[],:\\u0016abtxile9.-')  # what it is about; others come too
CLOSING = b'}]",:'
INTEGER, STRING = {"type": "integer"}, {"type": "string"}
OLD = "http://json-schema.org/draft-0{}/schema#"


def walks(schema: Any, rng: random.Random, count: int) -> Iterator[str]:
    """Texts that xgrammar takes whole, decoded as vLLM decodes them."""
    compiled = COMPILER.compile_json_schema(json.dumps(schema))
    words = torch.zeros((1, 9), dtype=torch.int32)
    for _ in range(count):
        matcher, text = xgrammar.GrammarMatcher(compiled), b""
        while len(text) < 3 * LONGEST:
            matcher.fill_next_token_bitmask(words)
            allowed = np.flatnonzero(
                np.unpackbits(words.numpy().view(np.uint8), bitorder="little")[: END + 1]
            ).tolist()
            if not allowed:
                break
            token = choose(allowed, rng, ends=len(text) > LONGEST)
            assert matcher.accept_token(token)
            if token == END:
                yield text.decode(errors="replace")
                break
            text += bytes([token])


def choose(allowed: list[int], rng: random.Random, ends: bool) -> int:
    if END in allowed and (ends or rng.random() < 0.5):
        return END
    if ends and (closing := [byte for byte in CLOSING if byte in allowed]):
        return closing[0]
    likely = [byte for byte in allowed if byte in LIKELY]
    return rng.choice(likely if likely and rng.random() < 0.8 else allowed)


def is_valid(text: str, schema: Any) -> bool:
    try:
        return bool(validator_for(schema)(schema).is_valid(json.loads(text)))
    except json.JSONDecodeError:
        return False


def too_much(schema: Any, seed: int = 0, count: int = 30) -> str | None:
    """A text that xgrammar takes and that is not valid."""
    return next(
        (text for text in walks(schema, random.Random(seed), count) if not is_valid(text, schema)), None
    )


def takes(schema: Any, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_json_schema(json.dumps(schema)))
    return bool(matcher.accept_string(text) and matcher.accept_token(END))


def compiles(schema: Any) -> bool:
    try:
        xgrammar.Grammar.from_json_schema(json.dumps(schema))
    except RuntimeError:
        return False
    return True


names = st.sampled_from(["a", "b", "title", "x y"])
small = st.integers(0, 3)
bounds = st.sampled_from(
    [0, 1, -1, 3, 10, -12, 100, 0.5, -1.25, 1e-7, 0.1234567, 0.30000000000000004, -0.1, 1e9, 12.5]
)
regexes = st.sampled_from(
    [
        "^a+$",
        "b",
        "^[a-z]{1,3}$",
        "^(ab|b)?$",
        ".",
        "^[^a]*$",
        r"\d+",
        r"^\S$",
        "^(?:a|a{1,3})$",
        "^x{0,150}$",
        "a$b",
        '"',
        "",
    ]
)
values = st.sampled_from(
    [None, True, 1, 1.0, 0.5, "a", "b", [1], {"title": 1}, {"title": 2}, 12345678901234567890]
)
formats = st.sampled_from(strict_leaves.FORMATS)
kinds = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
leaves = st.one_of(
    st.just({}),
    st.just(True),
    st.fixed_dictionaries({"type": kinds}, optional={"description": st.just("x")}),
    st.fixed_dictionaries({"enum": st.lists(values, min_size=1, max_size=3)}, optional={"type": kinds}),
    st.fixed_dictionaries({"const": values}, optional={"type": kinds}),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={"pattern": regexes, "format": formats, "minLength": small, "maxLength": small},
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number", "number"])},
        optional=dict.fromkeys(strict_leaves.NUMBERS, bounds),
    ),
    st.fixed_dictionaries(
        {"$ref": st.sampled_from(["#", "#/$defs/p", "#/$defs/q", "#x"])}, optional={"type": kinds}
    ),
)


def nodes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas with schemas in them."""
    opened = st.one_of(st.booleans(), inner)
    properties = st.dictionaries(names, inner, max_size=3)
    branches = st.lists(inner, min_size=1, max_size=3)
    objects: dict[str, st.SearchStrategy[Any]] = {
        "required": st.lists(names, max_size=2, unique=True),
        "additionalProperties": opened,
        "unevaluatedProperties": opened,
        # jsonschema takes names that only an empty pattern fits for additional ones.
        "patternProperties": st.dictionaries(regexes.filter(bool), inner, max_size=2),
        "propertyNames": st.one_of(
            st.just({"enum": ["a", "b"]}), st.just({"type": "string", "pattern": "^a+$"}), inner
        ),
        "minProperties": small,
        "maxProperties": small,
        "dependentRequired": st.just({"a": ["b"]}),
        "not": inner,
    }
    return st.one_of(
        st.fixed_dictionaries({"type": st.just("object"), "properties": properties}).flatmap(
            lambda node: st.lists(
                st.sampled_from(sorted(node["properties"]) or ["a"]), max_size=2, unique=True
            ).map(
                lambda required: {
                    **node,
                    "required": [name for name in required if name in node["properties"]],
                }
            )
        ),
        st.fixed_dictionaries({"type": st.just("object"), "properties": properties}, optional=objects),
        st.fixed_dictionaries({"properties": properties, "additionalProperties": opened}),
        st.fixed_dictionaries({"type": st.just("object")}, optional={**objects, "properties": properties}),
        st.fixed_dictionaries(
            {"type": st.just("array")},
            optional={
                "items": opened,
                "prefixItems": st.lists(inner, min_size=1, max_size=2),
                "minItems": small,
                "maxItems": small,
                "unevaluatedItems": opened,
                "uniqueItems": st.booleans(),
                "contains": inner,
            },
        ),
        st.fixed_dictionaries(
            {"items": inner}, optional={"maxItems": small, "type": st.just(["array", "string"])}
        ),
        st.fixed_dictionaries({"anyOf": branches}, optional={"type": kinds, "required": st.just(["a"])}),
        st.fixed_dictionaries({"oneOf": branches}, optional={"type": kinds}),
        st.fixed_dictionaries({"allOf": branches}),
    )


schemas = st.builds(
    lambda root, p, q, draft: {**root, "$defs": {"p": p, "q": q}, **({"$schema": draft} if draft else {})},
    st.recursive(leaves, nodes, max_leaves=6).filter(lambda node: isinstance(node, dict)),
    leaves,
    st.recursive(leaves, nodes, max_leaves=3),
    st.sampled_from(
        ["", "", OLD.format(4), OLD.format(6), OLD.format(7), "https://json-schema.org/draft/2019-09/schema"]
    ),
)


@settings(
    deadline=None, max_examples=500, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
@given(schemas, st.integers(0, 10**6))
def test_what_passes_is_enforced(schema: Any, seed: int) -> None:
    if first_problem(schema) is None and compiles(schema):
        assert too_much(schema, seed, count=8) is None


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 5), st.text(max_size=2)), st.lists, max_leaves=3
)
KEYWORDS = sorted({*strict_schema.FORMS, *strict_schema.NEVER_READ, *sum(strict_schema.READ.values(), ())})


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(st.sampled_from([*KEYWORDS, "$schema", "$id"]), junk, max_size=4))
def test_what_is_no_schema_raises_nothing(schema: Any) -> None:
    first_problem({"properties": {"a": schema}, "anyOf": [schema]})
    first_problem(schema)


# By what is said of it: a schema that is refused, and a text that xgrammar takes all the same. Where it takes it no
# more, the refusal can go.
REFUSED: list[tuple[str, Any, str]] = [
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1"),
    ("oneOf", {"oneOf": [{"const": 1}, {"const": 2}], "$schema": OLD.format(4)}, "1"),
    ("oneOf", {"oneOf": [{"type": "object"}, {"type": "object", "properties": {"a": STRING}}]}, "{}"),
    ("required", {"type": "object", "properties": {"a": {}}, "required": ["a", "b"]}, '{"a":1}'),
    ("required", {"type": "object", "required": ["b"]}, "{}"),
    ("required", {"required": ["a"]}, "{}"),
    ("required", {"type": "object", "patternProperties": {"x": INTEGER}, "required": ["x"]}, "{}"),
    (
        "additionalProperties",
        {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": True},
        r'{"\u0061":""}',
    ),
    (
        "additionalProperties",
        {
            "type": "object",
            "propertyNames": {"type": "string", "pattern": "^a$"},
            "additionalProperties": False,
        },
        '{"a":1}',
    ),
    ("propertyNames", {"type": "object", "propertyNames": {}}, "{1:2}"),
    ("propertyNames", {"type": "object", "propertyNames": {"enum": [1, "a"]}}, "{1:2}"),
    (
        "propertyNames",
        {"propertyNames": {"pattern": "^a$"}, "additionalProperties": INTEGER, "properties": {"b": INTEGER}},
        '{"b":1}',
    ),
    (
        "patternProperties",
        {"patternProperties": {"^a": INTEGER}, "additionalProperties": STRING, "properties": {"ab": STRING}},
        '{"ab":""}',
    ),
    ("patternProperties", {"patternProperties": {"^a": INTEGER}}, '{"a":""}'),
    ("minProperties", {"type": "object", "minProperties": 2, "additionalProperties": {}}, '{"a":1,"a":1}'),
    (
        "properties",
        {"type": "object", "properties": {"a": INTEGER}, "oneOf": [{"type": "object"}]},
        '{"a":""}',
    ),
    (
        "properties",
        {
            "type": "object",
            "properties": {
                "a": {"type": "object", "properties": {"title": STRING}},
                "b": {"type": "object", "properties": {"title": INTEGER}},
            },
            "required": ["a", "b"],
        },
        '{"a":{},"b":{"title":""}}',
    ),
    (
        "const",
        {"type": "array", "prefixItems": [{"const": {"title": 1}}, {"const": {"title": 2}}]},
        '[{"title":1},{"title":1}]',
    ),
    ("const", {"const": 12345678901234567890}, "1.2345678901234567e+19"),
    ("type", {"type": "string", "enum": ["x", 1]}, "1"),
    ("type", {"type": "string", "anyOf": [STRING, INTEGER]}, "1"),
    ("type", {"type": []}, "1"),
    ("not", {"not": STRING}, '""'),
    ("if", {"if": STRING, "then": {"minLength": 3}}, '""'),
    ("minLength", {"minLength": 3}, '""'),
    ("minLength", {"type": "string", "minLength": 1}, '"\t"'),
    ("maxLength", {"type": "string", "maxLength": 3}, '"\x01"'),
    ("pattern", {"type": "string", "format": "date", "pattern": "^2"}, '"1999-01-01"'),
    ("pattern", {"type": "string", "pattern": r"\S"}, '"\u00a0"'),
    ("format", {"type": "string", "format": "email"}, r'"\"\q\"@a"'),
    ("format", {"type": "string", "format": "json-pointer"}, '"/""'),
    ("minimum", {"minimum": 3}, "1"),
    ("minimum", {"type": "number", "minimum": 9007199254740993}, "9007199254740992"),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0, "maximum": 1e-9}, ""),
    (
        "exclusiveMaximum",
        {"type": "number", "maximum": 1, "exclusiveMaximum": 3, "$schema": OLD.format(4)},
        "1",
    ),
    ("multipleOf", {"type": "number", "multipleOf": 2}, "1"),
    ("uniqueItems", {"items": INTEGER, "uniqueItems": True}, "[1,1]"),
    ("contains", {"items": INTEGER, "contains": {"const": 1}}, "[2]"),
    (
        "items",
        {"type": "array", "prefixItems": [INTEGER], "items": STRING, "$schema": OLD.format(7)},
        '[1,"a"]',
    ),
    ("maxItems", {"maxItems": 1}, "[1,2]"),
    ("minLength", {"$ref": "#/$defs/a", "minLength": 3, "$defs": {"a": STRING}}, '""'),
    ("$ref", {"$ref": "foo"}, "1"),
    ("$ref", {"$ref": "#/$defs//x", "$defs": {"x": INTEGER, "": {"x": STRING}}}, "1"),
    ("$ref", {"$ref": "#/$defs/x%20y", "$defs": {"x y": INTEGER, "x%20y": STRING}}, '""'),
    # The schema that additional properties would have is read, and another is then taken for it.
    (
        "properties",
        {
            "type": "array",
            "prefixItems": [
                {
                    "type": "object",
                    "patternProperties": {"^a$": INTEGER},
                    "additionalProperties": {"type": "object", "properties": {"title": STRING}},
                },
                {"type": "object", "properties": {"title": INTEGER}},
            ],
        },
        '[{},{"title":""}]',
    ),
    ("allOf", {"allOf": [STRING, {"enum": ["yes"]}]}, "1"),
    ("required", {"allOf": [{"type": "object", "properties": {"a": INTEGER}}], "required": ["a"]}, "{}"),
]


@pytest.mark.parametrize(("keyword", "schema", "text"), REFUSED)
def test_what_is_refused_is_not_enforced(keyword: str, schema: Any, text: str) -> None:
    problem = first_problem(schema)
    assert problem is not None
    assert problem.keyword == keyword
    assert takes(schema, text)
    if schema.get("$ref") != "foo":  # which jsonschema cannot look up
        assert not is_valid(text, schema)


def test_walks_have_the_power_to_find_it() -> None:
    """What `test_what_passes_is_enforced` would see, were there no refusals; escapes in names it does not find."""
    found = [
        schema for _, schema, _ in REFUSED if schema.get("$ref") != "foo" and too_much(schema, count=100)
    ]
    assert len(found) >= 35


@pytest.mark.parametrize(
    ("name", "keyword", "schema"),
    [
        ("UNREAD", "uniqueItems", {"items": INTEGER, "uniqueItems": True}),
        ("UNREAD", "multipleOf", {"type": "number", "multipleOf": 2}),
        ("NEVER_READ", "not", {"not": STRING}),
    ],
)
def test_a_keyword_that_is_forgotten_is_found(
    name: str, keyword: str, schema: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation."""
    assert first_problem(schema) is not None
    table = getattr(strict_schema, name)
    rest: Any = tuple(each for each in table if each != keyword)
    if isinstance(table, dict):
        rest = {kind: tuple(each for each in of_kind if each != keyword) for kind, of_kind in table.items()}
    monkeypatch.setattr(strict_schema, name, rest)
    assert first_problem(schema) is None
    assert too_much(schema, count=100) is not None


CIRCLE = {"anyOf": [{"$ref": "#"}, INTEGER]}  # jsonschema does not come to an end
DISCRIMINATED = {
    "oneOf": [
        {"type": "object", "properties": {"kind": {"const": kind}, "value": value}, "required": ["kind"]}
        for kind, value in (("number", {"type": "number"}), ("text", STRING))
    ]
}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {
            "type": "object",
            "properties": {"a": {"type": "string", "format": "uri"}, "b": INTEGER},
            "required": ["b"],
        },
        {"type": "object", "properties": {"a": STRING, "b": STRING}, "additionalProperties": STRING},
        {"type": "object", "properties": {"a": {"title": "A"}}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
        {"type": "object", "additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 2},
        {"type": "object", "patternProperties": {"^[a-z]+$": INTEGER}, "additionalProperties": False},
        {
            "type": "object",
            "propertyNames": {"type": "string", "pattern": "^a+$"},
            "additionalProperties": INTEGER,
        },
        {"type": ["string", "null"], "enum": ["a", None]},
        {"type": "object", "anyOf": [{"type": "object", "properties": {"a": INTEGER}}, {"type": "object"}]},
        DISCRIMINATED,
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}],
            "$defs": {"a": {"type": "object", "properties": {"a": STRING}}},
        },
        {"oneOf": [{"enum": [1, 2]}, {"const": 3}, {"const": True}]},
        {
            "oneOf": [
                {"type": "object", "properties": {name: INTEGER, "c": INTEGER}, "required": [name]}
                for name in ("a", "b")
            ]
        },  # xgrammar's objects have no other properties
        {
            "$ref": "#/$defs/a",
            "minLength": 3,
            "$defs": {"a": STRING},
            "$schema": OLD.format(7),
        },  # which ignores it too
        {"type": "number", "minimum": 0.1, "exclusiveMaximum": 3},
        {
            "type": "array",
            "prefixItems": [INTEGER, STRING],
            "items": {"type": "null"},
            "minItems": 1,
            "maxItems": 4,
        },
        {"type": "object", "properties": {"next": {"$ref": "#"}, "value": INTEGER}, "required": ["value"]},
        {"type": "array", "items": INTEGER, "uniqueItems": False},
        {"type": "integer", "minLength": 3, "required": ["a"]},  # of other types
        *(
            {"type": "string", "format": name}
            for name in strict_leaves.FORMATS
            if name not in strict_leaves.NO_JSON
        ),
    ],
    ids=str,
)
def test_what_needs_no_refusal(schema: Any) -> None:
    assert first_problem(schema) is None
    assert too_much(schema, count=60) is None


def test_a_problem_says_where_and_what() -> None:
    schema = {
        "type": "object",
        "properties": {"a/b": {"type": "array", "items": {"oneOf": [INTEGER, INTEGER]}}},
    }
    problem = first_problem(schema)
    assert problem is not None
    assert str(problem).startswith(
        '/properties/a~1b/items: oneOf=[{"type": "integer"}, {"type": "integer"}]: xgrammar takes it'
    )
    assert str(first_problem({"not": {}})) == "at the root: not={}: xgrammar leaves it out"
    target = first_problem({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "maxLength": 9}}})
    assert target is not None
    assert (target.pointer, target.instead) == (
        "/$defs/a",
        'Say "pattern": "^[ -~]{0,9}$", which is ASCII alone',
    )
    assert first_problem(CIRCLE) is not None


@pytest.mark.parametrize("least", [0, 2])
@pytest.mark.parametrize("most", [None, 5, 300, 100_000])
def test_what_a_length_may_be_instead_passes(least: int, most: int | None) -> None:
    given = {"type": "string", "minLength": least, **({} if most is None else {"maxLength": most})}
    problem = first_problem(given)
    if problem is None or most == 100_000:
        assert (problem is None) == (given == {"type": "string", "minLength": 0})
        assert problem is None or not problem.instead
        return
    pattern, _ = json.JSONDecoder().raw_decode(problem.instead.removeprefix('Say "pattern": '))
    schema = {"type": "string", "pattern": pattern}
    assert first_problem(schema) is None
    for length in {least, least + 1, most or 400, 0, 1, 301}:
        text = json.dumps("x" * length)
        assert takes(schema, text) == is_valid(text, given)


def test_long_chains_of_references_and_wide_choices_are_followed() -> None:
    chain = {
        f"d{i}": {"type": "object", "properties": {"next": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(5000)
    }
    assert first_problem({"$ref": "#/$defs/d0", "$defs": {**chain, "d5000": INTEGER}}) is None
    assert first_problem({"$ref": "#/$defs/d0", "$defs": {**chain, "d5000": {"not": {}}}}) is not None
    for link in ({"$ref": "NEXT"}, {"anyOf": [{"$ref": "NEXT"}], "type": "integer"}):
        texts = {f"d{i}": json.dumps(link).replace("NEXT", f"#/$defs/d{i + 1}") for i in range(3000)}
        links = {name: json.loads(text) for name, text in texts.items()}
        found = first_problem({"$ref": "#/$defs/d0", "$defs": {**links, "d3000": INTEGER}})
        assert found is None or found.keyword == "type"  # nobody looks that far for types


DATA = Path(os.environ.get("VLLM_EXT_DATA", "../shared/data")) / "json_schema_bench.jsonl"


@pytest.mark.skipif(not DATA.exists(), reason=f"no {DATA}; set VLLM_EXT_DATA to a folder that has it")
def test_no_invalid_instance_of_real_schemas_is_taken() -> None:
    """Of the schemas that pass, walks and the file's own instances; counts so that it cannot pass for nothing."""
    passed = checked = 0
    for number, line in enumerate(DATA.read_text().splitlines()):
        entry = json.loads(line)
        schema = entry["schema"]
        if first_problem(schema) is not None or not compiles(schema):
            continue
        passed += 1
        for test in entry["tests"]:
            if not test["valid"]:
                checked += 1
                text = json.dumps(test["data"], ensure_ascii=False)
                assert not takes(schema, text), (entry["name"], text)
        if len(line) < 4000:
            assert too_much(schema, number, count=3) is None, entry["name"]
    assert passed > 100
    assert checked > 100
