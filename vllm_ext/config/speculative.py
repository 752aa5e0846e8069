# SPDX-License-Identifier: Apache-2.0
"""From ``speculative_config`` as the user wrote it to frozen settings, and back out of a VllmConfig.

The only file that knows where our settings travel: ``additional_config["vllm_ext"]``, a JSON dict that vLLM
carries to every process unread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from vllm_ext.config.allowed import hint, in_words, nearest
from vllm_ext.proposers.base import MethodOptions, Proposer
from vllm_ext.proposers.registry import METHODS, load_method, unknown_method
from vllm_ext.samplers.messages import MOST_QUOTED, quoted

ADDITIONAL_CONFIG_KEY = "vllm_ext"
# Keys under that; the first is ours alone to write.
SPECULATION, RULES, KV, STRUCTURED_OUTPUTS = "speculation", "rules", "kv", "structured_outputs"
ENTROPY, REFLECTIVE = "entropy", "reflective"  # of `verify`
FIELD = f'additional_config["{ADDITIONAL_CONFIG_KEY}"]'
MOST_PROBLEMS = 8  # in a message
# Keys of vLLM's own methods, and what ours have in their place.
BUDGET = "budget='goodput', the default, drafts less where the load is high, down to nothing. Leave it out"
RANKS = "drafting takes the ranks of the target (tensor_parallel_size). Leave it out"
MATCH = "{} of methods rest and suffix_tree is the like. Leave it out"
VLLMS_KEYS = {
    "disable_by_batch_size": BUDGET,
    "speculative_disable_by_batch_size": BUDGET,
    "num_speculative_tokens_per_batch_size": BUDGET,
    "enable_adaptive_verification": BUDGET,
    "draft_tensor_parallel_size": RANKS,
    "tensor_parallel_size": RANKS,
    "prompt_lookup_min": MATCH.format("min_match"),
    "prompt_lookup_max": MATCH.format("max_match"),
    "suffix_decoding_max_tree_depth": MATCH.format("max_match"),
    "suffix_decoding_max_cached_requests": "memory_mb of method suffix_tree is the like. Leave it out",
    "speculative_token_tree": "trees take the form that pays, up to num_speculative_tokens nodes. Leave it out",
    "rejection_sample_method": "verify='exact', the default, samples as vLLM does without speculation; "
    "verify='typical', 'entropy' and 'reflective' are lossy. Leave it out",
    "online": "methods with a draft model learn so: dyspec, rsd_c, rsd_s, spectr, static_tree. Leave it out",
    "draft_sample_method": "the method says how it draws. Leave it out",
}


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
    given: dict[str, Any] = {}
    for key, value in speculative_config.items():
        name = str(key).replace("-", "_")
        if name in given:
            raise ValueError(
                f"speculative_config has {name.replace('_', '-')!r} and {name!r}, {quoted(given[name])} and "
                f"{quoted(value)}, which are the same option; give one of them."
            )
        given[name] = value
    method = given.pop("method")
    proposer_class = load_method(method)
    try:
        options = proposer_class.Options.model_validate(given)
    except ValidationError as error:
        explained = explain(proposer_class.Options, error, f"Options of {method}", VLLMS_KEYS)
        raise ValueError(
            f"speculative_config for method {method!r}: {explained} "
            "Correct or remove it in --speculative-config; `vllm-ext methods NAME` explains each option."
        ) from None
    settings = Settings(method, options)
    check_text(settings, f"speculative_config for method {method!r}: ")
    return settings


def check_text(settings: Settings, before: str = "") -> None:
    """Refuse a verification for which a method has no text of a draft model.

    Raises:
        ValueError: with this before what is in the way.
    """
    if settings.options.verify not in (ENTROPY, REFLECTIVE) or settings.proposer_class.writes_text:
        return
    able = ", ".join(repr(name) for name in METHODS if load_method(name).writes_text)
    raise ValueError(
        f"{before}verify={settings.options.verify!r} is not allowed with method {settings.method!r}, which has no "
        f"draft model whose own text could be the answer; allowed with methods {able}. Take one of these, or "
        "verify='typical'."
    )


def from_vllm_config(vllm_config: Any) -> Settings | None:
    """The settings a VllmConfig carries; None when vllm-ext was not asked for."""
    stored = ours(vllm_config).get(SPECULATION)
    return None if stored is None else parse(stored)


def ours(config: Any) -> Mapping[str, Any]:
    """What is ours in the ``additional_config`` of a VllmConfig or of EngineArgs; empty where nothing is."""
    additional = config.additional_config
    if not isinstance(additional, Mapping) or ADDITIONAL_CONFIG_KEY not in additional:
        return {}
    found = additional[ADDITIONAL_CONFIG_KEY]
    if not isinstance(found, Mapping):
        raise ValueError(
            f"{FIELD}={quoted(found)} is not allowed; allowed: an object with some of {RULES!r}, {KV!r}, "
            f"{STRUCTURED_OUTPUTS!r}. Correct or remove it in --additional-config."
        )
    return found


def check_spelling(config: Any) -> None:
    """Refuse a key beside ours that was meant to be ours; others belong to others.

    Args:
        config: EngineArgs.

    Raises:
        ValueError: naming it.
    """
    additional = config.additional_config
    for key in additional if isinstance(additional, Mapping) else ():
        if key != ADDITIONAL_CONFIG_KEY and nearest(str(key), (ADDITIONAL_CONFIG_KEY,)):
            raise ValueError(
                f"additional_config has an unknown key {key!r}. Did you mean {ADDITIONAL_CONFIG_KEY!r}? Correct or "
                "remove it in --additional-config."
            )


def is_ours(speculative_config: Any) -> bool:
    """Whether the config names one of our methods."""
    method = speculative_config.get("method") if isinstance(speculative_config, Mapping) else None
    return isinstance(method, str) and method in METHODS


def check_known(speculative_config: Any) -> None:
    """Refuse what can be no method of ours or vLLM's.

    Raises:
        ValueError: a method that nobody knows, several of them, or no object.
    """
    from vllm.config.speculative import SpeculativeMethod

    several = speculative_config if isinstance(speculative_config, list) else None
    if isinstance(speculative_config, Mapping):
        several = speculative_config.get("method")
    if isinstance(several, list):
        raise ValueError(
            f"speculative_config.method={quoted(several)} is not allowed; allowed: one name. Several methods of "
            'vllm-ext draft together by {"method": "hybrid", "drafters": [...]}.'
        )
    if not isinstance(speculative_config, Mapping):
        raise ValueError(
            f"speculative_config={quoted(speculative_config)} is not allowed; allowed: an object with a method. "
            "Correct or remove --speculative-config."
        )
    if "method" not in speculative_config:
        for key in speculative_config:
            if nearest(str(key), ("method",)):
                raise ValueError(f"speculative_config has an unknown key {key!r}. Did you mean 'method'?")
    method = speculative_config.get("method")
    theirs = _flatten(SpeculativeMethod)
    if method is not None and method not in (*theirs, "[ngram]"):
        raise ValueError(unknown_method(method, METHODS, theirs))


def option_rows(options: type[BaseModel]) -> list[tuple[str, str, str, str]]:
    """Name, default, allowed and meaning of each option, for tables and error messages.

    Behind one that has options of its own come these: ``online.dir``.
    """
    schema = options.model_json_schema()
    return list(_rows(schema["properties"], schema.get("$defs", {}), ""))


def _rows(
    properties: Mapping[str, Any], own: Mapping[str, Any], before: str
) -> Iterator[tuple[str, str, str, str]]:
    for name, field in properties.items():
        default = str(field["default"]) if "default" in field else "required"
        yield before + name, default, in_words(field), field.get("description", "")
        for choice in field.get("anyOf", [field]):
            if (named := choice.get("$ref", "").rpartition("/")[2]) in own:
                yield from _rows(own[named]["properties"], own, f"{before}{name}.")


def _flatten(literal: Any) -> list[str]:
    """The strings of a Literal that may contain Literals."""
    values: list[str] = []
    for arg in get_args(literal):
        values.extend([arg] if isinstance(arg, str) else _flatten(arg))
    return values


def explain(
    options: type[BaseModel], error: ValidationError, title: str, others: Mapping[str, str] | None = None
) -> str:
    """What is wrong with some options, field by field, and then those that there are.

    Args:
        options: what was to be validated.
        error: what came of it.
        title: of the list of options.
        others: of names that are no options, what to say of them.
    """
    rows = option_rows(options)
    allowed = {name: text for name, _, text, _ in rows}
    lines: dict[
        str, str
    ] = {}  # by field: of a choice of types the last, which is the one nearest to what was meant
    for problem in error.errors(include_url=False):
        top, *inner = [
            str(part) if len(str(part)) <= MOST_QUOTED else quoted(part) for part in problem["loc"]
        ] or [""]
        # Between them stand names of types, where there is a choice.
        field = ".".join([top, *(part for part in inner if not _is_type(part))])
        shown = f"{field}={quoted(problem['input'])}" if field else quoted(problem["input"])
        if problem["type"] == "extra_forbidden":
            instead = (others or {}).get(field)
            line = f"unknown option {shown}{f': {instead}' if instead else f'.{hint(field, allowed)}'}"
        elif problem["type"] == "value_error":  # a validator's own words
            line = f"{shown}: {problem['ctx']['error']}" if field else str(problem["ctx"]["error"])
        elif problem["type"] == "missing":
            meaning = next(text for name, _, _, text in rows if name == field)
            line = f"{field} is missing, and required: {meaning}"
        else:
            line = f"{shown} is not allowed; allowed: {allowed.get(field, allowed.get(top, 'an object'))}"
        lines[top] = line
    known = "; ".join(f"{name}: {text}" for name, text in allowed.items())
    sentences = [
        line if line.endswith(("?", ".")) else f"{line}." for line in list(lines.values())[:MOST_PROBLEMS]
    ]
    return f"{' '.join(sentences)} {title}: {known}."


def _is_type(part: str) -> bool:
    """Whether a part of an error's place is the name of a type, not a key or a number."""
    return part in ("str", "int", "float", "bool") or part.endswith(("]", ")"))
