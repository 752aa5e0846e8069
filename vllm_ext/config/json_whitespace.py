# SPDX-License-Identifier: Apache-2.0
"""``max_whitespace``: at most so many spaces, tabs and newlines in a row between the parts of structured JSON.

A grammar of JSON lets whitespace go on for ever, and a model that is held to one may never leave it. xgrammar can bound
the runs (``max_whitespace_cnt``), and vLLM does not ask for it. A structural tag can: one whose only part is a JSON
schema is compiled to the same grammar as the schema by itself. So a request's schema is put into such a tag when it is
taken in, and what vLLM does with it from there on is what it does with any tag. Spaces in strings are not counted.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from vllm_ext.config import speculative
from vllm_ext.config.allowed import MOST_OTHERS, hint, nearest
from vllm_ext.samplers.messages import quoted

KEY = "max_whitespace"
MOST = 1000
NO_BOUND = -1
ANY_OBJECT = '{"type": "object"}'  # what vLLM has for json_object
COUNT = "max_whitespace_cnt"  # xgrammar's name
XML_TYPE = "qwen_xml_parameter"  # the older name of a style, which takes no bound
BACKEND = "--structured-outputs-config.backend xgrammar"


class RequestWhitespace(BaseModel):
    """What one request says, in ``vllm_xargs``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    max_whitespace: int = Field(
        NO_BOUND,
        ge=NO_BOUND,
        le=MOST,
        description="most spaces, tabs and newlines in a row in structured JSON; -1: as many as the model likes",
    )

    @field_validator(KEY)
    @classmethod
    def _is_bound(cls, value: int) -> int:
        if value == 0:
            raise ValueError(
                f"none at all is not what this can do; give 1 to {MOST}, -1 for no bound, or serve with "
                "--structured-outputs-config.disable_any_whitespace"
            )
        return value


def problem(structured: Any) -> str | None:
    """Why a server cannot bound whitespace, with the way out; None where it can.

    Args:
        structured: vLLM's StructuredOutputsConfig.
    """
    if structured.backend != "xgrammar":
        also = ", and auto may take guidance" if structured.backend == "auto" else ""
        return (
            f"does not work with structured_outputs_config.backend={structured.backend!r}: xgrammar alone can bound "
            f"whitespace{also}. Serve with {BACKEND}, or leave it out"
        )
    if structured.disable_any_whitespace:
        return (
            "does not work with structured_outputs_config.disable_any_whitespace, which allows none. Leave one of them "
            "out"
        )
    return None


def asked_of(given: dict[str, Any] | None) -> int | None:
    """What a request says; None where it says nothing.

    Args:
        given: its ``vllm_xargs``.

    Raises:
        ValueError: naming the key, its value and what is allowed.
    """
    if not given:
        return None
    if KEY not in given:
        for key in list(given)[:MOST_OTHERS]:
            if isinstance(key, str) and nearest(key, (KEY,)):
                raise ValueError(
                    f"vllm_xargs has an unknown key {quoted(key)}.{hint(key, (KEY,))} Correct or remove it."
                )
        return None
    try:
        return RequestWhitespace.model_validate({KEY: given[KEY]}).max_whitespace
    except ValidationError as error:
        said = speculative.explain(RequestWhitespace, error, "Of requests to servers with structured_outputs")
        raise ValueError(f"vllm_xargs: {said}") from None


def bounded(given: Any, most: int) -> Any:
    """vLLM's StructuredOutputsParams with whitespace bounded; None where there is no JSON in them.

    Args:
        given: they are left as they are.
        most: whitespace characters in a row.
    """
    if given.json is not None:
        schema = given.json if isinstance(given.json, str) else json.dumps(given.json)
    elif given.json_object:
        schema = ANY_OBJECT
    elif given.structural_tag is not None:
        tag = _bounded_tag(json.loads(given.structural_tag), most)
        return None if tag is None else _with_tag(given, json.dumps(tag))
    else:
        return None
    # Put together as text: a schema's numbers may be more than Python's JSON can say.
    part = f'{{"type": "json_schema", "{COUNT}": {most}, "json_schema": {schema}}}'
    return _with_tag(given, f'{{"type": "structural_tag", "format": {part}}}')


def _with_tag(given: Any, tag: str) -> Any:
    new = copy.copy(given)  # with the backend that vLLM has chosen
    new.json = new.json_object = None
    new.structural_tag = tag
    return new


def _bounded_tag(tag: dict[str, Any], most: int) -> dict[str, Any] | None:
    """A structural tag of xgrammar's kind, or of vLLM's older one; None where it has no schema."""
    if "structures" in tag:
        tags = [
            {
                "type": "tag",
                "begin": each["begin"],
                "content": {"type": "json_schema", "json_schema": each["schema"]},
                "end": each["end"],
            }
            for each in tag["structures"]
        ]
        tag = {
            "type": "structural_tag",
            "format": {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags},
        }
    return tag if _bound(tag, most) else None


def _bound(part: Any, most: int) -> bool:
    """Bound all schemas in a part of a tag, in place; whether there are any."""
    if isinstance(part, dict) and "json_schema" in part:
        if part.get("type") == XML_TYPE:
            part |= {"type": "json_schema", "style": "qwen_xml"}
        own = part.get(COUNT)
        part[COUNT] = most if own is None else min(most, own)
        return True
    parts = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return sum(_bound(each, most) for each in parts) > 0  # each of them


def lone_schema(tag: str) -> bool:
    """Whether all that a structural tag asks for is one JSON value."""
    part = json.loads(tag).get("format")
    return (
        isinstance(part, dict) and part.get("type") == "json_schema" and part.get("style", "json") == "json"
    )
