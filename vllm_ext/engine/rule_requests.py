# SPDX-License-Identifier: Apache-2.0
"""Rules as vLLM's logits processors, on either runner: which class is named, and which requests it refuses.

A class is passed by name in the engine's own ``logits_processors``, and never through the entry-point group of that
name, which a V2 runner would refuse to start with. vLLM asks the class whether a request is right and tells it nothing
of the configuration, in whatever process it takes requests in; so the rules' settings are in the class's name.
"""

from __future__ import annotations

import json
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

from vllm_ext.config import rules
from vllm_ext.config.rules import RuleSettings
from vllm_ext.samplers import grammar
from vllm_ext.samplers.base import Kind
from vllm_ext.samplers.messages import quoted


class Configured:
    """Subclasses of one processor by attribute: ``x`` and its settings as JSON in hexadecimal."""

    def __init__(self, processor: type[Any]) -> None:
        self._processor = processor
        self._made: dict[str, type[Any]] = {}

    def name_of(self, settings: RuleSettings) -> str:
        """What to put in ``logits_processors``; the processor's module has this object as ``configured``."""
        return f"{self._processor.__module__}:configured.x{settings.as_json.encode().hex()}"

    def __getattr__(self, name: str) -> type[Any]:
        if not name.startswith("x"):
            raise AttributeError(name)
        if name not in self._made:
            settings = rules.parse(json.loads(bytes.fromhex(name[1:])))
            self._made[name] = type(self._processor.__name__, (self._processor,), {"settings": settings})
        return self._made[name]


def validate(settings: RuleSettings, params: SamplingParams) -> None:
    """Refuse a request; vLLM makes HTTP 400 of it.

    Raises:
        VLLMValidationError: the message says what is allowed.
    """
    try:
        settings.validate(params)
        for key, field, source in settings.grammars(params):
            _check_grammar(key, field, source)
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from None


def _check_grammar(key: str, field: Kind, source: str) -> None:
    """Refuse what xgrammar can make nothing of, and schemas that it would only take in part."""
    try:
        validate_xgrammar_grammar(
            SamplingParams(structured_outputs=StructuredOutputsParams(**{field: source}))
        )
        grammar.check(field, source)
    except (ValueError, VLLMValidationError) as error:
        raise ValueError(f"vllm_xargs {key}: {quoted(error)}") from None
