# SPDX-License-Identifier: Apache-2.0
"""From ``speculative_config`` as the user wrote it to frozen settings, and back out of a VllmConfig.

The only file that knows where our settings travel: ``additional_config["vllm_ext"]``, a JSON dict that vLLM
carries to every process unread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from vllm_ext.proposers.base import MethodOptions, Proposer
from vllm_ext.proposers.registry import METHODS, load_method, unknown_method

ADDITIONAL_CONFIG_KEY = "vllm_ext"
# Keys under that; the first is ours alone to write.
SPECULATION, RULES, KV, STRUCTURED_OUTPUTS = "speculation", "rules", "kv", "structured_outputs"


@dataclass(frozen=True)
class Settings:
    """One validated method choice."""

    method: str
    options: MethodOptions

    @property
    def proposer_class(self) -> type[Proposer]:
        """The class the method names."""
        return load_method(self.method)

    @property
    def own_options(self) -> dict[str, Any]:
        """The method's own, less those that all have."""
        return self.options.model_dump(exclude=set(MethodOptions.model_fields))

    def with_options(self, **values: Any) -> Settings:
        """The same with some options' values replaced."""
        return replace(self, options=self.options.model_copy(update=values))

    def to_additional_config(self) -> dict[str, Any]:
        """What travels to the workers."""
        return {"method": self.method, **self.options.model_dump()}

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.options.model_dump().items())
        return f"{self.method} ({options})"


def parse(speculative_config: Mapping[str, Any]) -> Settings:
    """Validate a ``speculative_config`` whose method is one of ours.

    Raises:
        ValueError: an unknown method or option, a wrong type or an out-of-range value; the message names
            the field, the value, what is allowed and the way out.
    """
    # vLLM accepts hyphens in these keys, so we do.
    given = {key.replace("-", "_"): value for key, value in speculative_config.items()}
    method = given.pop("method")
    proposer_class = load_method(method)
    try:
        options = proposer_class.Options.model_validate(given)
    except ValidationError as error:
        explained = explain(proposer_class.Options, error, f"Options of {method}")
        raise ValueError(
            f"speculative_config for method {method!r}: {explained} "
            "Correct or remove it in --speculative-config; `vllm-ext methods NAME` explains each option."
        ) from None
    return Settings(method, options)


def from_vllm_config(vllm_config: Any) -> Settings | None:
    """The settings a VllmConfig carries; None when vllm-ext was not asked for."""
    stored = ours(vllm_config).get(SPECULATION)
    return None if stored is None else parse(stored)


def ours(config: Any) -> Mapping[str, Any]:
    """What is ours in the ``additional_config`` of a VllmConfig or of EngineArgs; empty where nothing is."""
    additional = config.additional_config
    found = additional.get(ADDITIONAL_CONFIG_KEY) if isinstance(additional, Mapping) else None
    return {} if found is None else found


def is_ours(speculative_config: Mapping[str, Any] | None) -> bool:
    """Whether the config names one of our methods."""
    method = speculative_config.get("method") if speculative_config else None
    return isinstance(method, str) and method in METHODS


def check_known(speculative_config: Mapping[str, Any]) -> None:
    """Refuse a method name that is neither ours nor vLLM's, listing both.

    Raises:
        ValueError: vLLM alone would list only its own names.
    """
    from vllm.config.speculative import SpeculativeMethod

    method = speculative_config.get("method")
    theirs = _flatten(SpeculativeMethod)
    if method is not None and method not in (*theirs, "[ngram]"):
        raise ValueError(unknown_method(method, METHODS, theirs))


def option_rows(options: type[BaseModel]) -> list[tuple[str, str, str, str]]:
    """Name, default, allowed and meaning of each option, for tables and error messages."""
    rows = []
    schema = options.model_json_schema()["properties"]
    for name, field in schema.items():
        choices = field.get("anyOf", [field])
        allowed = " or ".join(choice["type"] for choice in choices)
        low, high = choices[0].get("minimum"), choices[0].get("maximum")
        if low is not None:
            allowed += f", at least {low}" if high is None else f", {low} to {high}"
        if "enum" in field:
            allowed = " or ".join(map(repr, field["enum"]))
        default = str(field["default"]) if "default" in field else "required"
        rows.append((name, default, allowed, field.get("description", "")))
    return rows


def _flatten(literal: Any) -> list[str]:
    """The strings of a Literal that may contain Literals."""
    values: list[str] = []
    for arg in get_args(literal):
        values.extend([arg] if isinstance(arg, str) else _flatten(arg))
    return values


def explain(options: type[BaseModel], error: ValidationError, title: str) -> str:
    """What is wrong with some options, field by field, and then those that there are.

    Args:
        options: what was to be validated.
        error: what came of it.
        title: of the list of options.
    """
    allowed = {name: text for name, _, text, _ in option_rows(options)}
    lines = []
    for problem in error.errors(include_url=False):
        field = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown option {field}={problem['input']!r}")
        elif problem["type"] == "value_error":  # a validator's own words
            lines.append(f"{field}={problem['input']!r}: {problem['ctx']['error']}")
        elif problem["type"] == "missing":
            lines.append(f"{field} is missing, and required: {options.model_fields[field].description}")
        else:
            top = str(problem["loc"][0]) if problem["loc"] else ""
            lines.append(
                f"{field}={problem['input']!r} is not allowed; allowed: {allowed.get(top, 'an object')}"
            )
    known = "; ".join(f"{name}: {text}" for name, text in allowed.items())
    return f"{'. '.join(lines)}. {title}: {known}."
