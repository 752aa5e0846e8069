# SPDX-License-Identifier: Apache-2.0
"""vLLM's V1 runner with sampling rules: what they read beside logits, requests in pairs, tokens that are deferred."""

from __future__ import annotations

from typing import Any

import torch

from vllm_ext import patches
from vllm_ext.config.rules import RuleSettings
from vllm_ext.engine import step_extras
from vllm_ext.engine.steering import aux_logits
from vllm_ext.engine.steering.paired_rows import PairedRows
from vllm_ext.engine.v1 import logits_processor
from vllm_ext.engine.v1.logits_processor import RuleProcessor
from vllm_ext.engine.v1.undrawn_noise import UndrawnNoise
from vllm_ext.samplers.steering import Deferral


class RuledRunner(UndrawnNoise):
    """Mixin in front of vLLM's V1 runner class of any platform, where there are rules."""

    paired_rows: PairedRows | None = None  # set where a rule reads pairs
    looking_ahead: str | None = None  # the rule that can put tokens off
    deferrals: dict[str, Deferral | None]  # of the step's requests whose next token was put off, by id
    logits_rows: torch.Tensor | None = None  # of the step's tokens, those with logits

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        self.logits_rows = result[0]
        return result

    def _model_forward(self, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, and the second model's where a request of the batch asks for it."""
        result = super()._model_forward(input_ids, positions, *args, **kwargs)  # type: ignore[misc]
        if self.aux_logits is not None and self.aux_logits.second is not None:
            processors = self.input_batch.logitsprocs.all
            if any(isinstance(each, RuleProcessor) and each.reads_companion for each in processors):
                self.aux_logits.second.forward(input_ids, positions)
        return result

    def sample_tokens(self, grammar_output: Any) -> Any:
        state = self.execute_model_state
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs]
        for processor in self.input_batch.logitsprocs.all:
            if isinstance(processor, RuleProcessor):
                processor.deferrals, processor.unread = {}, set(discarded.nonzero()[0].tolist())
        if state is not None and self.aux_logits is not None:
            assert self.logits_rows is not None
            self.aux_logits.begin(
                self.logits_rows, state.logits, state.hidden_states, state.aux_hidden_states
            )
            if self.paired_rows is not None:
                rows = self._begin_pairs(self.paired_rows)
                self.aux_logits.pair_rows = torch.tensor(rows, device=self.logits_rows.device)
        return super().sample_tokens(grammar_output)

    def defer(self, index: int, deferral: Deferral | None) -> bool:
        """A request's next token is put off; False where it would have got none anyway."""
        if self.discard_request_mask.np[index]:
            return False
        self.deferrals[self.input_batch.req_ids[index]] = deferral
        return True

    def _begin_pairs(self, paired: PairedRows) -> list[int]:
        """Which rows are whose pairs'; requests of the step without their other halves beside them get no token."""
        discarded = self.discard_request_mask.np
        rows = paired.begin(
            self.input_batch.req_id_to_index,
            self._row_start(),
            [not each for each in discarded[: self.input_batch.num_reqs]],
        )
        discarded[paired.held] = True
        self.pairs = paired.pairs
        return rows

    def _row_start(self) -> list[int]:
        """Where each request's rows with logits begin: ``[num_requests + 1]``."""
        return list(range(self.input_batch.num_reqs + 1))

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """vLLM's; pairs get their primaries' tokens, and paused requests none."""
        noise = self.noise(range(self.input_batch.num_reqs))
        output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        if self.may_defer:
            for index, deferral in logits_processor.deferrals(self.input_batch.logitsprocs).items():
                if self.defer(index, deferral):
                    self.discard_request_mask.np[index] = True
                    if index in noise:
                        self.input_batch.generators[index].set_state(noise[index])
                        self._aside[index] = self.input_batch.generators.pop(index)
        if self.pairs:
            primaries, pairs = map(list, zip(*self.pairs, strict=True))
            output.sampled_token_ids[pairs] = output.sampled_token_ids[primaries]
        return output

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self.may_defer:
            self.deferrals = {}
        if self.aux_logits is not None and self.looking_ahead is not None:
            for name, (place, token) in step_extras.of(scheduler_output).choices.items():
                self.aux_logits.keep(name, self.looking_ahead, place, token)
        if self.paired_rows is not None:
            for request in scheduler_output.scheduled_new_reqs:
                self.paired_rows.admit(request.req_id, request.sampling_params)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        super()._on_request_state_removed(req_id, req_state)  # type: ignore[misc]
        if self.aux_logits is not None:
            self.aux_logits.forget(req_id)
        if self.paired_rows is not None:
            self.paired_rows.forget(req_id)

    def read_aux_logits(self, settings: RuleSettings) -> None:
        """After the target is loaded: make what rules read beside its logits."""
        runner: Any = self
        self.may_defer = settings.waits(on_v2=False) or settings.looks_ahead is not None
        self.aux_logits = aux_logits.of_rules(runner, settings, runner.requests)
        if self.aux_logits is None:
            return
        self.paired_rows = PairedRows() if settings.pairs else None
        self.looking_ahead = settings.looks_ahead
        for processor in runner.input_batch.logitsprocs.all:
            if isinstance(processor, RuleProcessor):
                processor.aux_logits = self.aux_logits

    def warm_up_aux_logits(self) -> None:
        """Compile what would else stall the first request."""
        if self.aux_logits is not None and self.aux_logits.second is not None:
            self.aux_logits.second.warm_up(16)


def install(runner: Any) -> None:
    """Put the mixin in front of a constructed runner's class."""
    patches.subclass_in_place(runner, RuledRunner)
