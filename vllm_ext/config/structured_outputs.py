# SPDX-License-Identifier: Apache-2.0
"""Structured output as a server may want it: ``additional_config["vllm_ext"]["structured_outputs"]``.

``strict`` refuses requests whose JSON schema xgrammar compiles and enforces only in part, so that what is answered
whole is valid. vLLM's own refusals come first. With its backend "auto" xgrammar may be what compiles a schema that
guidance was chosen for (an engine has one backend, the first request's), so there all schemas are held to what
xgrammar enforces. Of guidance nothing is refused here: by itself it refuses most of what it does not enforce.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_ext.config import json_whitespace, rules, speculative
from vllm_ext.samplers.kept import Kept, digest
from vllm_ext.samplers.strict_schema import Problem, first_problem

FIELD = f'{speculative.FIELD}["{speculative.STRUCTURED_OUTPUTS}"]'
READ_OF = "0.2.8"  # the xgrammar that `first_problem` describes
IN_PART = "xgrammar would enforce the JSON schema only in part"  # in each refusal
GUIDANCE = "--structured-outputs-config.backend guidance"
KEPT_BYTES = 1 << 20
_problems_kept: Kept[Problem | None] = Kept(KEPT_BYTES, lambda problem: 100 if problem is None else 4_000)


class StructuredOptions(BaseModel):
    """What the server is started with, as the user writes it in ``--additional-config``. Strict: no unknown key."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    strict: bool = Field(
        False, description="refuse requests whose JSON schema xgrammar would enforce only in part"
    )
    max_whitespace: int | None = Field(
        None,
        ge=1,
        le=json_whitespace.MOST,
        description="most spaces, tabs and newlines in a row in structured JSON, for requests that do not say it "
        "themselves; null: as many as the model likes",
    )


def parse(given: Any) -> StructuredOptions:
    """Validate what the user wrote.

    Raises:
        ValueError: the message names the field, the value, what is allowed and the way out.
    """
    try:
        return StructuredOptions.model_validate(given)
    except ValidationError as error:
        explained = speculative.explain(StructuredOptions, error, "Options")
        raise ValueError(f"{FIELD}: {explained} Correct or remove it in --additional-config.") from None


def of(carrier: Any) -> StructuredOptions | None:
    """What the ``additional_config`` of a VllmConfig or of EngineArgs says; None where it says nothing.

    Raises:
        ValueError: see `parse`.
    """
    ours = speculative.ours(carrier)
    return parse(ours[speculative.STRUCTURED_OUTPUTS]) if speculative.STRUCTURED_OUTPUTS in ours else None


def check_vllm_config(vllm_config: Any, options: StructuredOptions) -> str | None:
    """Refuse what an option does not work with; what the log should say, where there is anything.

    Raises:
        ValueError: naming the option and the way out.
    """
    if options.max_whitespace is not None and (
        problem := json_whitespace.problem(vllm_config.structured_outputs_config)
    ):
        raise ValueError(f'{FIELD}["{json_whitespace.KEY}"] {problem}.')
    return _check_strict(vllm_config) if options.strict else None


def _check_strict(vllm_config: Any) -> str | None:
    """Refuse backends of which nobody knows what they enforce; see `check_vllm_config`."""
    backend = vllm_config.structured_outputs_config.backend
    if backend not in ("auto", "xgrammar", "guidance"):
        raise ValueError(
            f'{FIELD}["strict"] does not work with structured_outputs_config.backend={backend!r}: what it enforces '
            "is known of xgrammar and guidance alone. Take one of these, auto, or leave strict out."
        )
    if backend == "guidance":
        return "strict refuses nothing with backend guidance, which by itself refuses most of what it does not enforce"
    installed = metadata.version("xgrammar")
    if installed != READ_OF:
        return f"strict knows what xgrammar {READ_OF} enforces; this is {installed}, which may enforce less"
    return None


def check_closing(vllm_config: Any) -> None:
    """Refuse what rule close_by_max_tokens does not know the endings of.

    Raises:
        ValueError: naming the option and the way out.
    """
    structured = vllm_config.structured_outputs_config
    what = f"{speculative.FIELD}[\"rules\"]: rule 'close_by_max_tokens'"
    if structured.backend not in ("auto", "xgrammar"):
        raise ValueError(
            f"{what} does not work with structured_outputs_config.backend={structured.backend!r}: it knows xgrammar's "
            "grammars alone. Take xgrammar or auto, or leave the rule out."
        )
    if structured.disable_any_whitespace:
        raise ValueError(
            f"{what} does not work with structured_outputs_config.disable_any_whitespace: its endings have no spaces. "
            "Leave one of them out."
        )
    if structured.reasoning_parser:
        raise ValueError(
            f"{what} does not work with structured_outputs_config.reasoning_parser={structured.reasoning_parser!r}: "
            "where an answer begins, behind the thoughts, is not known to it. Leave one of them out."
        )


def prepare_request(vllm_config: Any, request: Any) -> None:
    """Refuse a request that a strict server should not answer, and bound the whitespace of its JSON.

    Args:
        vllm_config: the engine's.
        request: vLLM's EngineCoreRequest, which vLLM has nothing against; its parameters are its own.

    Raises:
        VLLMValidationError: its JSON schema would be enforced only in part; or it asks for bounds that it cannot have.
    """
    params = request.sampling_params
    if params is None:
        return
    options = of(vllm_config)
    if options is not None and options.strict:
        _check_schemas(vllm_config, params)
    try:
        _bound_whitespace(vllm_config, options, params)
    except ValueError as error:
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None


def _check_schemas(vllm_config: Any, params: Any) -> None:
    given = params.structured_outputs
    if given is not None and vllm_config.structured_outputs_config.backend != "guidance":
        for problem in _problems(given):
            _refuse(
                "structured_outputs",
                "structured_outputs (response_format)",
                problem,
                f"serve with {GUIDANCE}",
            )
    ruled = rules.of_vllm_config(vllm_config)
    for key, field, source in ruled.grammars(params) if ruled is not None else ():
        if field == "json" and (found := _problem_of(source)):  # xgrammar compiles it, whatever the backend
            _refuse("vllm_xargs", f"vllm_xargs {key}", found)


def _bound_whitespace(vllm_config: Any, options: StructuredOptions | None, params: Any) -> None:
    asked = json_whitespace.asked_of(params.extra_args)
    what = f"vllm_xargs {json_whitespace.KEY}"
    if options is None:
        if asked is not None:
            raise ValueError(
                f"{what}: this server takes none; start it with --additional-config "
                '\'{"vllm_ext": {"structured_outputs": {}}}\', or leave it out.'
            )
        return
    if asked is not None and (problem := json_whitespace.problem(vllm_config.structured_outputs_config)):
        raise ValueError(f"{what} {problem}.")
    most = options.max_whitespace if asked is None else asked
    given = params.structured_outputs
    new = None if given is None or most is None else json_whitespace.bounded(given, most)
    if asked is not None and new is None:
        raise ValueError(
            f"{what} is for JSON: json, json_object or structural tags that have schemas, which this request does not "
            "ask for. Give it response_format or structured_outputs, or leave it out."
        )
    if new is not None and most != json_whitespace.NO_BOUND:
        params.structured_outputs = new


def _refuse(parameter: str, what: str, problem: Problem, *ways: str) -> None:
    from vllm.exceptions import VLLMValidationError

    ways = (problem.instead or "Change the schema", *ways, f'serve without {FIELD}["strict"]')
    raise VLLMValidationError(
        f"{what}: {IN_PART}, which this server refuses: {problem}. {', '.join(ways[:-1])}, or {ways[-1]}.",
        parameter=parameter,
    )


def _problem_of(schema: str) -> Problem | None:
    return _problems_kept.of(digest(schema), lambda: first_problem(json.loads(schema)))


def _problems(given: Any) -> Iterator[Problem]:
    """Of the JSON schemas in vLLM's StructuredOutputsParams, the first of each."""
    if given.json is not None:
        found = _problem_of(given.json if isinstance(given.json, str) else json.dumps(given.json))
        yield from () if found is None else (found,)
    if given.structural_tag is not None:
        yield from _problems_in(json.loads(given.structural_tag), "")


def _problems_in(tag: Any, pointer: str) -> Iterator[Problem]:
    """Of those in a structural tag, of xgrammar's kind or of vLLM's older one."""
    if isinstance(tag, list):
        for number, value in enumerate(tag):
            yield from _problems_in(value, f"{pointer}/{number}")
    elif isinstance(tag, dict):
        if tag.get("any_order") is True:
            yield Problem(
                pointer, "any_order", True, "xgrammar does not demand what is required then", "Leave it out"
            )
        for key, value in tag.items():
            if key not in ("json_schema", "schema"):
                yield from _problems_in(value, f"{pointer}/{key}")
            elif found := _problem_of(json.dumps(value)):
                yield replace(found, pointer=f"{pointer}/{key}{found.pointer}")
