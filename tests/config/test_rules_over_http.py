# SPDX-License-Identifier: Apache-2.0
"""Parameters of rules as requests bring them over HTTP, through vLLM's own types; no engine is started."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from vllm_ext.config import rules
from vllm_ext.samplers.registry import RULES, load_rule
from vllm_ext.samplers.steering import SteeringRule

DOCS = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))
COMPANION = {"model": "self"}
SETTINGS = rules.RuleSettings(
    {
        name: load_rule(name).Options.model_validate(
            {
                "trie": {"files": {"products": "/none"}},
                "awrs": {"checks": {"sql": "my_package:sql"}},
                "monitor": {"root": "/none"},
                **dict.fromkeys(("contrastive", "anchored", "entropy_adaptive", "lol"), COMPANION),
                **{each: {"file": "/none"} for each in ("svdecode", "caad")},
            }.get(name, {})
        )
        for name in RULES
    }
)
# Switched on or off by their name.
SWITCHES = [name for name in RULES if issubclass(load_rule(name), SteeringRule)]
# Of parameters that say what their request is about.
TEXTS = {
    "trie": "products",
    "extract": "a passage",
    "monitor": "python",
    "monitor_context": "import math",
    "asap_json": "{}",
    "asap_regex": "a",
    "asap_grammar": 'root ::= "a"',
    "awrs_json": "{}",
    "awrs_regex": "a",
    "awrs_grammar": 'root ::= "a"',
    "awrs_check": "sql",
}
NEEDED = {
    "extract_max_tokens": "extract",
    "monitor_context": "monitor",
    "monitor_file": "monitor",
    "rpg_count": "rpg",
}
GREEDY = ("momentum", "adadec")
CONTEXT = {"cad_context": "Hi"}  # without which cad has nothing to leave out


def over_http(xargs: dict[str, Any], completion: bool = False, **others: Any) -> Any:
    """The SamplingParams of a request's body."""
    body = {"model": "m", "vllm_xargs": xargs, "temperature": 1.0, "max_tokens": 5, **others}
    if completion:
        request: Any = CompletionRequest.model_validate_json(json.dumps({**body, "prompt": "Hi"}))
    else:
        messages = [{"role": "user", "content": "Hi"}]
        request = ChatCompletionRequest.model_validate_json(json.dumps({**body, "messages": messages}))
    return request.to_sampling_params(5, {})


@pytest.mark.parametrize("completion", [False, True])
@pytest.mark.parametrize("name", SWITCHES)
def test_switches_are_true_and_false(name: str, completion: bool) -> None:
    always = rules.RuleSettings({name: SETTINGS.options[name].model_copy(update={"always": True})})
    others: dict[str, Any] = {"temperature": 0.0} if name in GREEDY else {}
    for given, is_on in ((True, True), (1, True), (False, False), (0, False)):
        context = CONTEXT if name == "cad" and is_on else {}
        params = over_http({name: given, **context}, completion, **others)
        for settings in (SETTINGS, always):
            settings.validate(params)
            assert [asking.name for asking in settings.of_request(params)] == [name] * is_on
    left_out = over_http(CONTEXT if name == "cad" else {}, completion)
    assert [asking.name for asking in always.of_request(left_out)] == [name]
    for wrong in (2, -1, "true", 0.5, [1]):
        with pytest.raises(ValueError, match=rf"{name}=.*is not allowed; allowed: boolean"):
            SETTINGS.validate(over_http({name: wrong}, completion))


def samples(key: str, schema: dict[str, Any]) -> Iterator[Any]:
    """Values of each type that a parameter may have."""
    for choice in schema.get("anyOf", [schema]):
        low = choice.get("minimum", choice.get("exclusiveMinimum", 0) + 1)
        kind = choice.get("type")
        if "enum" in choice:
            yield from choice["enum"]
        elif kind == "boolean":
            yield from (True, False, 1, 0)
        elif kind == "integer":
            yield int(low)
        elif kind == "number":
            yield from {float(low), *([int(low)] if low == int(low) else [])}
        elif kind == "array":
            yield [next(samples(key, choice["items"]))]
        elif kind == "string":
            yield TEXTS.get(key, "text")
        else:
            assert kind == "null", choice  # which is to leave it out


PARAMETERS = [
    (name, key, value)
    for name in RULES
    for key, schema in load_rule(name).Params.model_json_schema()["properties"].items()
    for value in samples(key, schema)
]


def test_every_parameter_is_sent() -> None:
    sent = {key for _, key, _ in PARAMETERS}
    assert sent == {key for name in RULES for key in load_rule(name).Params.model_fields}


@pytest.mark.parametrize(("name", "key", "value"), PARAMETERS)
def test_every_parameter_has_its_types(name: str, key: str, value: Any) -> None:
    needed = NEEDED.get(key)
    given = {key: value} if needed is None else {needed: TEXTS.get(needed, 1.0), key: value}
    if name == "cad" and not (key == "cad" and not value):
        given = {**CONTEXT, **given}
    others: dict[str, Any] = {"structured_outputs": {"regex": "a"}} if name == "close_by_max_tokens" else {}
    params = over_http(given, temperature=0.0 if name in GREEDY else 1.0, **others)
    SETTINGS.validate(params)
    asking = SETTINGS.of_request(params)
    is_switch = key in (*SWITCHES, "close_by_max_tokens")
    if is_switch and not value:
        assert not asking
        return
    (found,) = asking
    assert (found.name, getattr(found.params, key)) == (name, value)
    assert isinstance(getattr(found.params, key), bool) == is_switch


def examples() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """What the docs send: where that stands, the ``vllm_xargs`` and what else there is."""
    for file in DOCS:
        for block in re.findall(r"```python\n(.*?)```", file.read_text(), re.DOTALL):
            for call in ast.walk(ast.parse(block)):
                if not isinstance(call, ast.Call):
                    continue
                given = {each.arg: each.value for each in call.keywords if each.arg is not None}
                if "extra_body" not in given or "vllm_xargs" not in ast.unparse(given["extra_body"]):
                    continue
                names = {each.id: "some text" for each in ast.walk(call) if isinstance(each, ast.Name)}
                body = eval(compile(ast.Expression(given["extra_body"]), str(file), "eval"), names)
                others = {key: each.value for key, each in given.items() if isinstance(each, ast.Constant)}
                if form := given.get("response_format"):
                    schema = {"schema": {"type": "object"}}
                    others["response_format"] = eval(compile(ast.Expression(form), str(file), "eval"), schema)
                yield file.name, body["vllm_xargs"], others


EXAMPLES = list(examples())


def test_all_examples_are_found() -> None:
    assert len(EXAMPLES) == sum(file.read_text().count('extra_body={"vllm_xargs"') for file in DOCS) > 5


@pytest.mark.parametrize(("where", "xargs", "others"), EXAMPLES)
def test_every_example_of_the_docs_is_accepted(
    where: str, xargs: dict[str, Any], others: dict[str, Any]
) -> None:
    params = over_http(xargs, **others)
    SETTINGS.validate(params)
    assert SETTINGS.of_request(params)
