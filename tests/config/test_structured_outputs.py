# SPDX-License-Identifier: Apache-2.0
"""What a server may say of structured output, and which requests a strict one refuses; no engine is started."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_ext import plugin
from vllm_ext.cli.main import app
from vllm_ext.config import structured_outputs

STRICT = {"vllm_ext": {"structured_outputs": {"strict": True}}}
IN_PART = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}
WHOLE = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TAG = {"type": "tag", "begin": "<a>", "end": "</a>"}


def config_of(additional: Any, backend: str = "auto") -> Any:
    """What a VllmConfig has of it."""
    return SimpleNamespace(
        additional_config=additional,
        structured_outputs_config=SimpleNamespace(backend=backend, disable_any_whitespace=False),
    )


def check(additional: Any = STRICT, backend: str = "auto", extra: Any = None, **structured: Any) -> None:
    given = StructuredOutputsParams(**structured) if structured else None
    params = SamplingParams(structured_outputs=given, extra_args=extra)
    structured_outputs.prepare_request(
        config_of(additional, backend), SimpleNamespace(sampling_params=params)
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, "allowed: an object"),
        ({"strict": "yes"}, r"strict='yes' is not allowed; allowed: boolean"),
        (
            {"strickt": True},
            r"unknown option strickt=True\. Did you mean 'strict'\? Options: strict: boolean; max_whi.*\. Correct",
        ),
    ],
)
def test_what_is_wrong_is_named(given: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        structured_outputs.parse(given)
    assert str(raised.value).startswith('additional_config["vllm_ext"]["structured_outputs"]: ')


def test_only_strict_servers_refuse() -> None:
    others: list[Any] = [{}, {"vllm_ext": {}}, {"vllm_ext": {"structured_outputs": {}}}]
    for additional in others:
        check(additional, json=json.dumps(IN_PART))
    check()
    check(json=json.dumps(WHOLE))
    check(json=WHOLE)
    check(json_object=True)
    check(regex="(?=a)b")
    check(json=json.dumps(IN_PART), backend="guidance")
    structured_outputs.prepare_request(config_of(STRICT), SimpleNamespace(sampling_params=None))  # pooling


@pytest.mark.parametrize("backend", ["auto", "xgrammar"])
@pytest.mark.parametrize("schema", [IN_PART, json.dumps(IN_PART)], ids=["object", "text"])
def test_what_a_refusal_says(schema: Any, backend: str) -> None:
    with pytest.raises(VLLMValidationError) as raised:
        check(json=schema, backend=backend)
    assert str(raised.value) == (
        "structured_outputs (response_format): xgrammar would enforce the JSON schema only in part, which this server "
        "refuses: /properties/a: maxLength=3: xgrammar lets control characters into strings of a given length, which "
        'JSON does not have as they are. Say "pattern": "^[ -~]{0,3}$", which is ASCII alone, serve with '
        "--structured-outputs-config.backend guidance, or serve without "
        'additional_config["vllm_ext"]["structured_outputs"]["strict"]. (parameter=structured_outputs)'
    )
    assert structured_outputs.IN_PART in str(raised.value)


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        (
            {"structures": [{"begin": "<a>", "schema": IN_PART, "end": "</a>"}], "triggers": ["<a>"]},
            "/structures/0/schema/properties/a: maxLength=3",
        ),
        (
            {
                "type": "structural_tag",
                "format": {**TAG, "content": {"type": "json_schema", "json_schema": IN_PART}},
            },
            "/format/content/json_schema/properties/a: maxLength=3",
        ),
        (
            {
                "type": "structural_tag",
                "format": {
                    **TAG,
                    "content": {"type": "json_schema", "json_schema": WHOLE, "any_order": True},
                },
            },
            "/format/content: any_order=true",
        ),
    ],
)
def test_schemas_in_structural_tags(tag: Any, says: str) -> None:
    with pytest.raises(VLLMValidationError, match=says):
        check(structural_tag=json.dumps(tag))
    text = (
        json.dumps(tag).replace(json.dumps(IN_PART), json.dumps(WHOLE)).replace('"any_order": true', '"x": 0')
    )
    check(structural_tag=text)


def test_schemas_of_rules() -> None:
    additional = {"vllm_ext": {**STRICT["vllm_ext"], "rules": {"awrs": {}}}}
    check(additional, extra={"awrs_json": json.dumps(WHOLE)})
    check(additional, extra={"awrs_regex": "a"})
    with pytest.raises(VLLMValidationError, match=r"vllm_xargs awrs_json: .*/properties/a: maxLength=3"):
        check(additional, backend="guidance", extra={"awrs_json": json.dumps(IN_PART)})


@pytest.mark.parametrize(
    "speculation", [None, {"method": "ngram", "num_speculative_tokens": 3}, {"method": "hybrid"}]
)
def test_requests_are_looked_at_where_they_are_taken_in(
    slice_dir: str, speculation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With vLLM's own speculation, with ours, and with none."""
    taken: list[Any] = []

    def process_inputs(self: Any, request_id: str, prompt: Any, params: Any) -> Any:
        taken.append(SimpleNamespace(sampling_params=params))
        return taken[-1]

    monkeypatch.setattr(InputProcessor, "process_inputs", process_inputs)
    plugin.register()
    config = EngineArgs(
        slice_dir, speculative_config=speculation, additional_config=STRICT, max_model_len=64
    ).create_engine_config()
    processor = object.__new__(InputProcessor)
    processor.vllm_config = config

    def take(schema: Any) -> Any:
        structured = StructuredOutputsParams(json=json.dumps(schema))
        return processor.process_inputs("1", "a prompt", SamplingParams(structured_outputs=structured))

    assert take(WHOLE) is taken[0]
    with pytest.raises(VLLMValidationError, match="only in part"):
        take(IN_PART)
    assert len(taken) == 2  # vLLM's own refusals come first
    config.additional_config = {}
    take(IN_PART)


@pytest.mark.parametrize("backend", ["outlines", "lm-format-enforcer"])
def test_backends_that_nobody_knows_are_refused(slice_dir: str, backend: str) -> None:
    plugin.register()
    with pytest.raises(
        ValueError, match=rf'"strict"\] does not work with .*backend={backend!r}.* Take one of these'
    ):
        EngineArgs(
            slice_dir,
            structured_outputs_config={"backend": backend},
            additional_config=STRICT,
            max_model_len=64,
        ).create_engine_config()


def test_schemas_are_looked_at_from_the_command_line(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("whole.json", "part.json", "none.json")}
    files["whole.json"].write_text(json.dumps(WHOLE))
    files["part.json"].write_text(json.dumps(IN_PART))
    files["none.json"].write_text("{")

    def run(*names: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["schema", *(str(files[name]) for name in names)])
        return result.exit_code, result.output.replace(str(tmp_path), "")

    assert run("whole.json") == (0, "/whole.json: enforced whole\n")
    code, said = run("part.json", "whole.json")
    assert code == 1
    assert said.startswith("/part.json: in part: /properties/a: maxLength=3: ")
    assert said.endswith(
        'as they are. Say "pattern": "^[ -~]{0,3}$", which is ASCII alone\n/whole.json: enforced whole\n'
    )
    code, said = run("none.json")
    assert code == 2
    assert said.startswith("error: /none.json: no JSON (Expecting property name")


def test_another_xgrammar_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def warning(backend: str = "auto") -> str | None:
        options = structured_outputs.parse({"strict": True})
        return structured_outputs.check_vllm_config(config_of(STRICT, backend), options)

    assert warning() is None
    monkeypatch.setattr(metadata, "version", lambda _: "0.3.0")
    assert "this is 0.3.0" in str(warning())
    assert "refuses nothing" in str(warning("guidance"))
