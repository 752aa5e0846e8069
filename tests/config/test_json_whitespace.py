# SPDX-License-Identifier: Apache-2.0
"""Runs of whitespace in JSON: what servers and requests may say of them, and what becomes of a request."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import xgrammar
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from vllm_ext import plugin
from vllm_ext.config import asked, json_whitespace, structured_outputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
PART = {"type": "json_schema", "json_schema": SCHEMA}
TAG = {"type": "structural_tag", "format": {"type": "tag", "begin": "<f>", "content": PART, "end": "</f>"}}
XML = {"type": "qwen_xml_parameter", "json_schema": SCHEMA}
OLD_TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
SERVER = {"max_whitespace": 2}


def prepared(
    server: dict[str, Any] | None = SERVER,
    extra: Any = None,
    backend: str = "xgrammar",
    disabled: bool = False,
    **structured: Any,
) -> Any:
    """What a request's structured_outputs are when it has been taken in."""
    given = StructuredOutputsParams(**structured) if structured else None
    if given is not None:
        given._backend = backend
    params = SamplingParams(structured_outputs=given, extra_args=extra)
    config = SimpleNamespace(
        additional_config={} if server is None else {"vllm_ext": {"structured_outputs": server}},
        structured_outputs_config=SimpleNamespace(backend=backend, disable_any_whitespace=disabled),
    )
    structured_outputs.prepare_request(config, SimpleNamespace(sampling_params=params))
    return params.structured_outputs


def takes(tag: str, text: str) -> bool:
    """Whether xgrammar reads a text to its end."""
    tokens = xgrammar.TokenizerInfo([bytes([code]) for code in range(256)], stop_token_ids=[])
    compiled = xgrammar.GrammarCompiler(tokens, max_threads=1).compile_structural_tag(tag)
    matcher = xgrammar.GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.is_completed()


@pytest.mark.parametrize("space", [" ", "\n", "\t"])
@pytest.mark.parametrize(
    ("structured", "text"),
    [
        ({"json": SCHEMA}, '{%s"a"%s:%s"x      y"%s}'),
        ({"json": json.dumps(SCHEMA)}, '{%s"a"%s:%s"x      y"%s}'),
        ({"json_object": True}, '{%s"b":%s[%s1,%s2]}'),
        ({"structural_tag": json.dumps(TAG)}, '<f>{%s"a"%s:%s"x"%s}</f>'),
        ({"structural_tag": json.dumps(OLD_TAG)}, 'so    long <f>{%s"a"%s:%s"x"%s}</f>'),
    ],
    ids=["object", "text", "json_object", "tag", "old tag"],
)
def test_runs_are_bounded(structured: dict[str, Any], text: str, space: str) -> None:
    new = prepared(**structured)
    assert (new.json, new.json_object, new._backend) == (None, None, "xgrammar")
    for length in (0, 1, 2):
        assert takes(new.structural_tag, text % ((space * length,) * 4))
    for place in range(4):
        runs = [space * 3 if at == place else "" for at in range(4)]
        assert not takes(new.structural_tag, text % tuple(runs))


def test_schemas_in_the_older_xml_style() -> None:
    tag = {"type": "structural_tag", "format": XML}
    new = json.loads(prepared(structural_tag=json.dumps(tag)).structural_tag)
    assert new["format"] == {
        "type": "json_schema",
        "style": "qwen_xml",
        "json_schema": SCHEMA,
        "max_whitespace_cnt": 2,
    }


def test_the_smaller_bound_of_a_tag_counts() -> None:
    for own, counts in ((1, 1), (5, 2)):
        tag = {"type": "structural_tag", "format": {**PART, "max_whitespace_cnt": own}}
        assert f'"max_whitespace_cnt": {counts}' in prepared(structural_tag=json.dumps(tag)).structural_tag


def test_what_counts() -> None:
    """A request's own word, then the server's; neither changes what the user holds."""

    def count(server: Any, extra: Any) -> int | None:
        tag = prepared(server, extra, json=SCHEMA).structural_tag
        return None if tag is None else json.loads(tag)["format"]["max_whitespace_cnt"]

    assert count({"max_whitespace": 2}, None) == 2
    assert count({"max_whitespace": 2}, {"max_whitespace": 5}) == 5
    assert count({"max_whitespace": 2}, {"max_whitespace": -1}) is None
    assert count({"max_whitespace": 2}, {"other": 5}) == 2
    assert count({}, {"max_whitespace": 5}) == 5
    assert count({}, None) is None
    assert count(None, None) is None
    given = StructuredOutputsParams(json=SCHEMA)
    assert json_whitespace.bounded(given, 2) is not given
    assert given == StructuredOutputsParams(json=SCHEMA)


def test_numbers_of_a_schema_stay_as_they_are() -> None:
    schema = '{"type": "number", "maximum": 1e400, "minimum": 12345678901234567890123}'
    assert schema in prepared(json=schema).structural_tag


@pytest.mark.parametrize(
    "structured", [{}, {"regex": "a  *"}, {"choice": ["a"]}, {"grammar": 'root ::= "a"'}]
)
def test_what_is_no_json(structured: dict[str, Any]) -> None:
    """A server's bound lets it be; a request that asks for one is refused."""
    assert prepared(**structured) == prepared(None, **structured)
    with pytest.raises(VLLMValidationError, match=r"max_whitespace is for JSON: .*, or leave it out"):
        prepared({}, {"max_whitespace": 2}, **structured)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (0, r"max_whitespace=0: none at all .* give 1 to 1000, -1 for no bound, or serve with"),
        (-2, r"max_whitespace=-2 is not allowed; allowed: integer, -1 to 1000\."),
        (1001, r"max_whitespace=1001 is not allowed; allowed: integer, -1 to 1000\."),
        ("2", r"max_whitespace='2' is not allowed; allowed: integer"),
        (True, r"max_whitespace=True is not allowed"),
        (2.5, r"max_whitespace=2\.5 is not allowed"),
        (None, r"max_whitespace=None is not allowed"),
    ],
)
def test_wrong_values_of_requests(value: Any, says: str) -> None:
    with pytest.raises(VLLMValidationError, match=f"vllm_xargs: {says}"):
        prepared(extra={"max_whitespace": value}, json=SCHEMA)


def test_requests_to_servers_that_cannot() -> None:
    asks = {"max_whitespace": 2}
    with pytest.raises(VLLMValidationError, match=r"this server takes none; start it with .*, or leave it"):
        prepared(None, asks, json=SCHEMA)
    with pytest.raises(VLLMValidationError, match=r"unknown key 'max_whitspace'\. Did you mean 'max_white"):
        prepared(extra={"max_whitspace": 2}, json=SCHEMA)
    for backend in ("auto", "guidance"):
        with pytest.raises(VLLMValidationError, match=rf"backend='{backend}': .* Serve with --structured"):
            prepared({}, asks, backend, json=SCHEMA)
    with pytest.raises(VLLMValidationError, match=r"disable_any_whitespace, which allows none\. Leave one"):
        prepared({}, asks, disabled=True, json=SCHEMA)


@pytest.mark.parametrize(
    ("options", "structured", "says"),
    [
        ({"max_whitespace": 0}, {}, r"max_whitespace=0 is not allowed; allowed: integer or null, 1 to 1000"),
        ({"max_whitespace": "2"}, {}, r"max_whitespace='2' is not allowed"),
        ({"max_whitespace": 2}, {}, r"backend='auto': xgrammar alone .* and auto may take guidance\. Serve"),
        ({"max_whitespace": 2}, {"backend": "guidance"}, r"backend='guidance': xgrammar alone"),
        (
            {"max_whitespace": 2},
            {"backend": "xgrammar", "disable_any_whitespace": True},
            r"does not work with structured_outputs_config\.disable_any_whitespace",
        ),
    ],
)
def test_servers_that_cannot(slice_dir: str, options: Any, structured: Any, says: str) -> None:
    plugin.register()
    with pytest.raises(ValueError, match=says) as raised:
        EngineArgs(
            slice_dir,
            structured_outputs_config=structured,
            additional_config={"vllm_ext": {"structured_outputs": options}},
            max_model_len=64,
        ).create_engine_config()
    assert 'additional_config["vllm_ext"]["structured_outputs"]' in str(raised.value)


def test_rules_know_that_it_is_json() -> None:
    """Of structural tags, those that are one JSON value."""

    def kind(**structured: Any) -> str | None:
        params = SamplingParams(structured_outputs=prepared(**structured))
        found = asked.asked_of(params).grammar
        return None if found is None else found[0]

    assert kind(json=SCHEMA) == kind(json_object=True) == "structural_tag"
    assert kind(structural_tag=json.dumps({"type": "structural_tag", "format": PART})) == "structural_tag"
    xml = {"type": "structural_tag", "format": {**PART, "style": "qwen_xml"}}
    for tag in (TAG, OLD_TAG, xml):
        assert kind(structural_tag=json.dumps(tag)) is None
