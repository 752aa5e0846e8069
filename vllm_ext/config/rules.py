# SPDX-License-Identifier: Apache-2.0
"""Sampling rules as a server has them: ``additional_config["vllm_ext"]["rules"]``, and what requests say of them.

Nothing of vLLM's but the names of some fields of SamplingParams; `logits_processor` is the adapter.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ValidationError

from vllm_ext.config import speculative
from vllm_ext.config.allowed import MOST_OTHERS, hint, nearest
from vllm_ext.config.asked import asked_of
from vllm_ext.data.model_files import ModelVocabulary
from vllm_ext.samplers.base import Kind, LearningRule, Rule, RuleOptions, RuleParams
from vllm_ext.samplers.messages import quoted
from vllm_ext.samplers.prompt_parts import PairedPrompt, Prompt
from vllm_ext.samplers.registry import RULES, load_rule, unknown_rule
from vllm_ext.samplers.steering import CompanionOptions, LookaheadRule, SteeringRule

logger = logging.getLogger("vllm.vllm_ext")

FIELD = speculative.FIELD
# Keys that the engine puts into SamplingParams.extra_args; see `vllm_ext.engine.paired_requests`.
ENGINE_KEYS = ("vllm_ext_twin_prompt", "vllm_ext_twin", "vllm_ext_twin_owner", "vllm_ext_trunk")
EXAMPLE = '--additional-config \'{"vllm_ext": {"rules": {"%s": {...}}}}\''


class Asking(NamedTuple):
    """A rule that a request is under."""

    name: str
    params: RuleParams


def needs_v1(name: str) -> bool:
    """Whether vLLM's V2 runner has no place for a rule yet; see `Rule.why_v1`."""
    return load_rule(name).why_v1 is not None


@dataclass(frozen=True)
class RuleSettings:
    """The validated rules of a server."""

    options: Mapping[str, RuleOptions]  # by name, in the registry's order

    @functools.cached_property
    def as_json(self) -> str:
        """What travels to other processes."""
        return json.dumps({name: options.model_dump() for name, options in self.options.items()})

    def with_options(self, values: Mapping[str, Mapping[str, Any]]) -> RuleSettings:
        """The same with some options' values replaced, by rule."""
        replaced = {name: self.options[name].model_copy(update=dict(values[name])) for name in values}
        return RuleSettings({**self.options, **replaced})

    @functools.cached_property
    def reports(self) -> bool:
        """Whether a rule leaves notes."""
        return any(load_rule(name).reports for name in self.options)

    def report_of(self, params: Any) -> str | None:
        """What the sum of a request's notes is called; None where no rule leaves any."""
        return next(
            (found for name, _ in self.of_request(params) if (found := load_rule(name).reports)), None
        )

    @functools.cached_property
    def learns(self) -> bool:
        """Whether a rule keeps what it learns."""
        return any(issubclass(load_rule(name), LearningRule) for name in self.options)

    @functools.cached_property
    def steers(self) -> bool:
        """Whether a rule may read more than logits."""
        return any(issubclass(load_rule(name), SteeringRule) for name in self.options)

    @functools.cached_property
    def companion(self) -> CompanionOptions | None:
        """Which second model rules read, all the same; None where none does."""
        return next((each for each in self.options.values() if isinstance(each, CompanionOptions)), None)

    @functools.cached_property
    def pairs(self) -> bool:
        """Whether a rule reads pairs of requests."""
        return bool(self.paired_rules)

    @functools.cached_property
    def paired_rules(self) -> dict[str, type[SteeringRule]]:
        """The rules that do, by name."""
        found = {name: load_rule(name) for name in self.options}
        return {
            name: rule for name, rule in found.items() if issubclass(rule, SteeringRule) and rule.has_pairs
        }

    def paired_prompt(self, params: Any, prompt: Prompt) -> PairedPrompt | None:
        """What a request's pair is to read; see `SteeringRule.paired_prompt`.

        Raises:
            ValueError: there is no such prompt, or there are two.
        """
        asked = {
            name: rest
            for name, its in self.of_request(params)
            if name in self.paired_rules and (rest := self.paired_rules[name].paired_prompt(its, prompt))
        }
        if len(asked) > 1:
            raise ValueError(
                f"{' and '.join(asked)} do not go together in one request: each reads another prompt beside its own. "
                "Leave one of them out"
            )
        return next(iter(asked.values()), None)

    @property
    def need_v1(self) -> list[str]:
        """Rules that vLLM's V2 runner has no place for yet."""
        return [name for name in self.options if needs_v1(name)]

    @functools.cached_property
    def looks_ahead(self) -> str | None:
        """The rule that can put tokens off, to look ahead; None where there is none."""
        return next((name for name in self.options if issubclass(load_rule(name), LookaheadRule)), None)

    def waits(self, on_v2: bool) -> bool:
        """Whether a rule may have rows wait, on a runner of vLLM's."""
        rules = [load_rule(name) for name in self.options]
        return any(rule.waits and not (on_v2 and rule.shares_grammars) for rule in rules)

    @functools.cached_property
    def shares_grammars(self) -> list[str]:
        """Rules that read the grammars of structured output."""
        return [name for name in self.options if load_rule(name).shares_grammars]

    @property
    def schedules(self) -> bool:
        """Whether vLLM's scheduler alone will not do."""
        return self.reports or self.companion is not None or bool(self.adds_requests)

    @functools.cached_property
    def adds_requests(self) -> list[str]:
        """Rules that have requests of the engine's own run beside those they are for: pairs, branches."""
        return [
            name
            for name in self.options
            if name in self.paired_rules or issubclass(load_rule(name), LookaheadRule)
        ]

    def reads_companion(self, params: Any) -> bool:
        """Whether a request is under a rule that reads the second model."""
        return any(
            isinstance(self.options.get(name), CompanionOptions) for name, _ in self.of_request(params)
        )

    def grammars(self, params: Any) -> list[tuple[str, Kind, str]]:
        """Those that rules know by themselves: key of ``vllm_xargs``, vLLM's field for such a grammar, source."""
        found = [(name, load_rule(name).grammar(its)) for name, its in self.of_request(params)]
        return [(f"{name}_{given[0]}", *given) for name, given in found if given is not None]

    def check(self, vocab_size: int, tokenizer_hash: Callable[[], str], num_layers: int) -> None:
        """Refuse what cannot work with this model; see `Rule.check` and `SteeringRule.layers`.

        Raises:
            ValueError: naming the rule, the field, the value and the way out.
        """
        for name, options in self.options.items():
            with named(name):
                rule = load_rule(name)
                rule.check(options, vocab_size, tokenizer_hash)
                if issubclass(rule, SteeringRule):
                    rule.layers(options, num_layers)

    def check_companion(self, num_layers: int) -> None:
        """Refuse layers that the second model, which has so many, does not have.

        Raises:
            ValueError: naming the rule, the field, the value and what is allowed.
        """
        for name, options in self.options.items():
            rule = load_rule(name)
            if issubclass(rule, SteeringRule):
                with named(name):
                    rule.companion_layers(options, num_layers)

    def of_request(self, params: Any) -> list[Asking]:
        """The rules that a request is under, in the registry's order.

        Args:
            params: vLLM's SamplingParams.

        Raises:
            ValueError: a parameter is wrong; the message says what is allowed.
        """
        given = params.extra_args
        if given and (ENGINE_KEYS[2] in given or ENGINE_KEYS[3] in given):  # a pair, or a branch
            return []
        if not self._always and (not given or _keys().keys().isdisjoint(given)):
            return []
        asked: dict[str, dict[str, Any]] = {name: {} for name in self._always}
        for key, value in (given or {}).items():
            if (name := _keys().get(key)) is not None:
                asked.setdefault(name, {})[key] = value
        under = [Asking(name, _params(name, asked[name])) for name in RULES if name in asked]
        return [each for each in under if getattr(each.params, each.name, None) is not False]

    @functools.cached_property
    def _always(self) -> list[str]:
        """Rules of requests that do not turn them off."""
        return [name for name, each in self.options.items() if getattr(each, "always", False)]

    def validate(self, params: Any) -> None:
        """Refuse a request; see `of_request`.

        Raises:
            ValueError: also for a rule that this server does not have, or that contradicts what else is asked for.
        """
        if own := [key for key in ENGINE_KEYS if key in (params.extra_args or {})]:
            raise ValueError(f"vllm_xargs {own[0]}: it is the engine's own. Leave it out.")
        strangers = (key for key in params.extra_args or {} if key not in _keys())
        for key in itertools.islice(strangers, MOST_OTHERS):
            if meant := nearest(str(key), tuple(_keys())):
                raise ValueError(
                    f"vllm_xargs has an unknown key {quoted(key)}. Did you mean {meant!r}? Correct or remove it."
                )
        self._check_sizes(params)
        asked = asked_of(params)
        under = self.of_request(params)
        if len(closed := [name for name, _ in under if load_rule(name).closed]) > 1:
            raise ValueError(
                f"vllm_xargs: {' and '.join(closed)} do not go together: each says by itself what may come. Leave one "
                "of them out."
            )
        for name, parsed in under:
            if name not in self.options:
                raise ValueError(
                    f"vllm_xargs {', '.join(parsed.model_fields_set)}: this server has no rule {name!r}; start it with "
                    f"{EXAMPLE % name}, or leave them out."
                )
            if load_rule(name).alone and len(under) > 1:
                others = ", ".join(repr(other.name) for other in under if other.name != name)
                raise ValueError(
                    f"vllm_xargs {', '.join(parsed.model_fields_set)}: rule {name!r} does not go with {others} in one "
                    "request: it samples from the model's own distribution. Leave one of them out."
                )
            if problem := load_rule(name).problem(self.options[name], parsed, asked):
                raise ValueError(f"vllm_xargs: {problem}.")

    def _check_sizes(self, params: Any) -> None:
        """Refuse texts that are longer than the server takes, before anything looks at them.

        Raises:
            ValueError: naming the parameter, its length, what is allowed and the way out.
        """
        for key, value in (params.extra_args or {}).items():
            options = self.options.get(_keys().get(key, ""))
            if options is None:
                continue
            field, most = options.text_limit
            length = len(value if isinstance(value, str) else repr(value))
            if length > most:
                raise ValueError(
                    f"vllm_xargs: {key} has {length} characters; allowed: {most}, which is {field} of rule "
                    f"{_keys()[key]!r}. Give less text, or raise that option of the server."
                )


@contextmanager
def named(name: str) -> Iterator[None]:
    """Say of an error which rule's it is."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{FIELD}: rule {name!r}: {error}.") from None


def parse(given: Any) -> RuleSettings:
    """Validate what the user wrote under ``rules``.

    Raises:
        ValueError: an unknown rule or option, or a wrong value; the message says what is allowed, and the way out.
    """
    if not isinstance(given, Mapping) or not given:
        raise ValueError(
            f'{FIELD}["rules"]={quoted(given)} is not allowed; allowed: an object of rules: {", ".join(RULES)}.'
        )
    if unknown := [name for name in given if name not in RULES]:
        raise ValueError(f"{FIELD}: {unknown_rule(unknown[0])}")
    options: dict[str, RuleOptions] = {}
    for name in RULES:
        if name in given:
            rule = load_rule(name)
            try:
                options[name] = rule.Options.model_validate(given[name])
            except ValidationError as error:
                said = speculative.explain(rule.Options, error, f"Options of {name}")
                raise ValueError(
                    f"{FIELD}: rule {name!r}: {said} Correct or "
                    "remove it in --additional-config; `vllm-ext rules NAME` explains each option."
                ) from None
    _check_companions(options)
    return RuleSettings(options)


def _check_companions(options: Mapping[str, RuleOptions]) -> None:
    """Refuse rules that need different second models."""
    named = {
        name: (its.model, its.self_layers)
        for name, its in options.items()
        if isinstance(its, CompanionOptions)
    }
    first = next(iter(named), "")
    if other := [name for name, model in named.items() if model != named[first]]:
        raise ValueError(
            f"{FIELD}: rules {first!r} and {other[0]!r} have different companion models, {named[first]} and "
            f"{named[other[0]]} (model, self_layers); a server has one. Give both the same, or serve them apart."
        )


def from_config(engine_args: Any) -> RuleSettings | None:
    """The rules that the user wrote; None where there are none.

    Raises:
        ValueError: see `parse`; or something else stands beside them.
    """
    ours = speculative.ours(engine_args)
    known = (speculative.RULES, speculative.KV, speculative.STRUCTURED_OUTPUTS)
    if unknown := [key for key in ours if key not in known]:
        raise ValueError(
            f"{FIELD}: unknown key {quoted(unknown[0])}.{hint(unknown[0], known)} Known: {', '.join(map(repr, known))}."
        )
    return parse(ours[speculative.RULES]) if speculative.RULES in ours else None


def of_vllm_config(vllm_config: Any) -> RuleSettings | None:
    """The rules that a VllmConfig carries; None where there are none."""
    stored = speculative.ours(vllm_config).get(speculative.RULES)
    return None if stored is None else parse(stored)


@functools.cache
def load(settings: str, vocabulary: ModelVocabulary) -> dict[str, Rule]:
    """The rules themselves, by name; one of each in a process.

    Args:
        settings: JSON of `RuleSettings`.
        vocabulary: the target's.
    """
    rules = {
        name: load_rule(name).from_options(options, vocabulary)
        for name, options in parse(json.loads(settings)).options.items()
    }
    for rule in rules.values():
        rule.warm_up()
    return rules


@functools.cache
def _keys() -> dict[str, str]:
    """By key of ``vllm_xargs``, the rule whose it is."""
    return {key: name for name in RULES for key in load_rule(name).Params.model_fields}


def _params(name: str, given: Mapping[str, Any]) -> RuleParams:
    """Validated parameters of a rule. Nothing of them is kept here: they may be long, or refused."""
    rule = load_rule(name)
    try:
        return rule.Params.model_validate(dict(given))
    except ValidationError as error:
        raise ValueError(
            f"vllm_xargs: {speculative.explain(rule.Params, error, f'Of rule {name}')}"
        ) from None
