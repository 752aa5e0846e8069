# SPDX-License-Identifier: Apache-2.0
"""vLLM's V1 runner with sampling rules: what they read beside logits, requests in pairs, tokens that are deferred."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from vllm_ext import patches
from vllm_ext.config import rules
from vllm_ext.config.rules import RuleSettings
from vllm_ext.data.model_files import ModelVocabulary
from vllm_ext.engine import step_extras
from vllm_ext.engine.models.hidden_states import HiddenStates
from vllm_ext.engine.v1 import logits_processor
from vllm_ext.engine.v1.aux_logits import SecondModel, StepRows
from vllm_ext.engine.v1.logits_processor import RuleProcessor
from vllm_ext.engine.v1.paired_rows import Twins
from vllm_ext.engine.v1.undrawn_noise import UndrawnNoise
from vllm_ext.samplers.steering import Pause, PausingRule, SteeringRule


class RuledRunner(UndrawnNoise):
    """Mixin in front of vLLM's V1 runner class of any platform, where there are rules."""

    twins: Twins | None = None  # set where a rule reads pairs
    pausing: str | None = None  # the rule that can put tokens off
    pauses: dict[str, Pause | None]  # of the step's requests whose next token was put off, by id
    logits_rows: torch.Tensor | None = None  # of the step's tokens, those with logits

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        self.logits_rows = result[0]
        return result

    def _model_forward(self, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, and the second model's where a request of the batch asks for it."""
        result = super()._model_forward(input_ids, positions, *args, **kwargs)  # type: ignore[misc]
        if self.beside is not None and self.beside.second is not None:
            processors = self.input_batch.logitsprocs.all
            if any(isinstance(each, RuleProcessor) and each.reads_companion for each in processors):
                self.beside.second.forward(input_ids, positions)
        return result

    def sample_tokens(self, grammar_output: Any) -> Any:
        state = self.execute_model_state
        if self.may_pause:
            for processor in self.input_batch.logitsprocs.all:
                if isinstance(processor, RuleProcessor):
                    processor.paused = {}
        if state is not None and self.beside is not None:
            assert self.logits_rows is not None
            self.beside.begin(self.logits_rows, state.logits, state.hidden_states, state.aux_hidden_states)
            if self.twins is not None:
                rows = self._begin_twins(self.twins)
                self.beside.twins = torch.tensor(rows, device=self.logits_rows.device)
        return super().sample_tokens(grammar_output)

    def noise(self, requests: Iterable[int]) -> dict[int, torch.Tensor]:
        """States of some requests' seeded generators, where a row may have to give back what it has drawn."""
        generators = self.input_batch.generators
        if not self.may_pause or not generators:
            return {}
        return {index: generators[index].get_state() for index in requests if index in generators}

    def pause(self, index: int, pause: Pause | None) -> bool:
        """A request's next token is put off; False where it would have got none anyway."""
        if self.discard_request_mask.np[index]:
            return False
        self.pauses[self.input_batch.req_ids[index]] = pause
        return True

    def _begin_twins(self, twins: Twins) -> list[int]:
        """Which rows are whose twins'; requests of the step without their other halves beside them get no token."""
        discarded = self.discard_request_mask.np
        rows = twins.begin(
            self.input_batch.req_id_to_index,
            self._row_start(),
            [not each for each in discarded[: self.input_batch.num_reqs]],
        )
        discarded[twins.held] = True
        self.pairs = twins.pairs
        return rows

    def is_pair(self, request_id: str) -> bool:
        return self.twins is not None and request_id in self.twins

    def _row_start(self) -> list[int]:
        """Where each request's rows with logits begin: ``[num_requests + 1]``."""
        return list(range(self.input_batch.num_reqs + 1))

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """vLLM's; pairs get their primaries' tokens, and paused requests none."""
        noise = self.noise(range(self.input_batch.num_reqs))
        output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        if self.may_pause:
            for index, pause in logits_processor.paused(self.input_batch.logitsprocs).items():
                if self.pause(index, pause):
                    self.discard_request_mask.np[index] = True
                    if index in noise:
                        self.input_batch.generators[index].set_state(noise[index])
                        self._aside[index] = self.input_batch.generators.pop(index)
        if self.pairs:
            primaries, pairs = map(list, zip(*self.pairs, strict=True))
            output.sampled_token_ids[pairs] = output.sampled_token_ids[primaries]
        return output

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self.may_pause:
            self.pauses = {}
        if self.beside is not None and self.pausing is not None:
            for name, (place, token) in step_extras.of(scheduler_output).choices.items():
                self.beside.keep(name, self.pausing, place, token)
        if self.twins is not None:
            for request in scheduler_output.scheduled_new_reqs:
                self.twins.admit(request.req_id, request.sampling_params)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        super()._on_request_state_removed(req_id, req_state)  # type: ignore[misc]
        if self.beside is not None:
            self.beside.forget(req_id)
        if self.twins is not None:
            self.twins.forget(req_id)

    def read_beside(self, settings: RuleSettings) -> None:
        """After the target is loaded: make what rules read beside its logits."""
        runner: Any = self
        self.may_pause = settings.waits or settings.pauses
        loaded = rules.load(settings.as_json, ModelVocabulary.of(runner.model_config))
        steering = [rule for rule in loaded.values() if isinstance(rule, SteeringRule)]
        if not steering:
            return
        num_layers = runner.model_config.get_total_num_hidden_layers()
        numbers: set[int] = set()
        for rule in steering:
            rule.layer_numbers = rule.layers(rule.options, num_layers)
            numbers.update(rule.layer_numbers)

        def of_companion(num_layers: int) -> list[int]:
            numbers: set[int] = set()
            for rule in steering:
                rule.companion_layer_numbers = rule.companion_layers(rule.options, num_layers)
                numbers.update(rule.companion_layer_numbers)
            return sorted(numbers)

        read = HiddenStates.of_target(runner, sorted(numbers)) if numbers else None
        second = None
        if settings.companion is not None:
            second = SecondModel(runner.vllm_config, settings.companion, runner.get_model(), of_companion)
        self.beside = StepRows(runner.model_config.get_vocab_size(), read, second, runner.requests)
        self.twins = Twins() if settings.twins else None
        self.pausing = next((rule.name for rule in steering if isinstance(rule, PausingRule)), None)
        for processor in runner.input_batch.logitsprocs.all:
            if isinstance(processor, RuleProcessor):
                processor.beside = self.beside

    def warm_up_beside(self) -> None:
        """Compile what would else stall the first request."""
        if self.beside is not None and self.beside.second is not None:
            self.beside.second.warm_up(16)


def install(runner: Any) -> None:
    """Put the mixin in front of a constructed runner's class."""
    patches.subclass_in_place(runner, RuledRunner)
