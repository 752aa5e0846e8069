# SPDX-License-Identifier: Apache-2.0
"""Sampling rules as a logits processor of vLLM's V1 runner, without speculation and in the walk down a tree.

Passed by name in the engine's own ``logits_processors``, and never through the entry-point group of that name, which a
V2 runner would refuse to start with. vLLM asks the class whether a request is right and tells it nothing of the
configuration, in whatever process it takes requests in; so the rules' settings are in the class's name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from vllm_ext.config import rules
from vllm_ext.config.asked import asked_of
from vllm_ext.config.rules import RuleSettings
from vllm_ext.data.model_files import ModelVocabulary
from vllm_ext.engine import rule_faults, rule_requests
from vllm_ext.engine.rule_requests import Configured
from vllm_ext.samplers.base import Row, Rule
from vllm_ext.samplers.steering import CompanionOptions, Deferral, SteeringRule

if TYPE_CHECKING:
    from vllm_ext.engine.steering.aux_logits import StepAuxLogits

Notes = dict[int, float]  # of a request, by place in its output


class RuleProcessor(LogitsProcessor):  # type: ignore[misc]  # vLLM is untyped to us
    """The rules of one server; a subclass has their settings."""

    settings: ClassVar[RuleSettings]
    aux_logits: StepAuxLogits | None = None  # set by the runner where rules read more than logits

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """HTTP 400 for what the rules refuse."""
        rule_requests.validate(cls.settings, sampling_params)

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rules = rules.load(self.settings.as_json, ModelVocabulary.of(vllm_config.model_config))
        self.rows: dict[int, dict[str, Row]] = {}  # by batch index, by rule
        # By batch index, requests that get no token in this step: more of their prompts is to be read.
        self.unread: Collection[int] = ()
        self.deferrals: dict[int, Deferral | None] = {}  # by batch index, of the last call; None: it waits
        self._patience = rule_faults.patience_of(vllm_config)

    @property
    def is_idle(self) -> bool:
        """Whether no request of the batch is under a rule."""
        return not self.rows

    @property
    def reads_companion(self) -> bool:
        """Whether a request of the batch is under a rule that reads the second model."""
        return any(
            isinstance(self.settings.options[name], CompanionOptions)
            for its in self.rows.values()
            for name in its
        )

    def is_argmax_invariant(self) -> bool:
        """They say what may be sampled at all."""
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self.rows, batch_update, self._new)

    def _new(
        self, params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> dict[str, Row] | None:
        """A request's rows; the list of its output is vLLM's own, which grows."""
        asking = self.settings.of_request(params)
        if not asking:
            return None
        asked, end = asked_of(params), params.eos_token_id
        kept = {} if self.aux_logits is None else self.aux_logits.kept(output)
        faults: dict[int, str] = {}
        return {
            name: Row(prompt or [], output, end, its, asked, kept=kept.setdefault(name, {}), faults=faults)
            for name, its in asking
        }

    def behind(self, requests: Sequence[int], outputs: Sequence[list[int]]) -> RuleProcessor:
        """The same for some of the batch's requests, each behind its own longer output."""
        other = copy.copy(self)
        other.unread = ()  # they go on
        other.rows = {
            new: {name: replace(row, output=output) for name, row in self.rows[old].items()}
            for new, (old, output) in enumerate(zip(requests, outputs, strict=True))
            if old in self.rows
        }
        return other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.deferrals = {}
        for name, rule in self._rules.items():
            rows = {index: its[name] for index, its in self.rows.items() if name in its}
            rows = {
                index: row
                for index, row in sorted(rows.items())
                if not row.faults and index not in self.unread
            }
            if not rows:
                continue
            places = list(rows)
            if isinstance(rule, SteeringRule):
                assert self.aux_logits is not None
                rule.aux_logits = self.aux_logits
                self.aux_logits.rows_are(None if len(rows) == len(logits) else places)
            index = None if len(rows) == len(logits) else torch.tensor(places, device=logits.device)
            part = logits if index is None else logits[index]
            rule.patience = self._patience
            deferrals = rule_faults.apply(name, rule, part, list(rows.values()), self._at(rule, places))
            if index is not None:
                logits[index] = part
            if self._patience == rule_faults.SHORT_PATIENCE:
                deferrals = rule_faults.wait_no_longer(name, list(rows.values()), deferrals)
            self.deferrals |= {places[row]: deferral for row, deferral in deferrals.items()}
        rule_faults.end(logits, {index: next(iter(its.values())) for index, its in self.rows.items()})
        return logits

    def _at(self, rule: Rule, places: Sequence[int]) -> Callable[[Sequence[int]], None]:
        """What tells of rows of a rule's that it is about to be applied to."""

        def at(rows: Sequence[int]) -> None:
            if isinstance(rule, SteeringRule) and self.aux_logits is not None:
                self.aux_logits.rows_are([places[row] for row in rows])

        return at


def deferrals(processors: Any) -> dict[int, Deferral | None]:
    """Rows of the last call of vLLM's LogitsProcessors that are to get no token yet, by batch index."""
    found: dict[int, Deferral | None] = {}
    for processor in processors.all:
        if isinstance(processor, RuleProcessor):
            found |= processor.deferrals
    return found


def take_notes(processors: Any, names: Sequence[str]) -> dict[str, Notes]:
    """What rules have noted of this step's rows, by request id; it is theirs no more.

    Args:
        processors: vLLM's LogitsProcessors.
        names: request ids, by batch index.
    """
    found: dict[str, Notes] = {}
    for processor in processors.all:
        if isinstance(processor, RuleProcessor) and processor.settings.reports:
            for index, rows in processor.rows.items():
                for row in rows.values():
                    if row.notes:
                        found.setdefault(names[index], {}).update(row.notes)
                        row.notes.clear()
    return found


def take_faults(processors: Any, names: Sequence[str]) -> dict[str, tuple[int, str]]:
    """What rules have raised for the batch's requests, by request id: a place in the output, and the reason.

    Args:
        processors: vLLM's LogitsProcessors.
        names: request ids, by batch index.
    """
    return {
        names[index]: fault
        for processor in processors.all
        if isinstance(processor, RuleProcessor)
        for index, rows in processor.rows.items()
        for row in rows.values()
        for fault in row.faults.items()
    }


configured = Configured(RuleProcessor)
