# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 runner with sampling rules: what they read beside logits, requests in pairs, tokens that are put off.

The second model reads behind the target's step, by the step's own metadata: V2 makes none of trees for steps that a
graph replays whole, so that an engine with such a model captures none (`config.refusals`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from vllm_ext import patches
from vllm_ext.config import rules
from vllm_ext.engine.steering import aux_logits
from vllm_ext.engine.steering.paired_steps import PairedSampler, PairedSteps
from vllm_ext.engine.steering.step_deferrals import DeferringSampler
from vllm_ext.engine.v2.logits_processor import RuleProcessor


class RuledRunner:
    """Mixin in front of vLLM's V2 runner class of any platform, where there are rules."""

    # vLLM's.
    execute_model_state: Any
    vllm_config: Any
    sampler: Any
    req_states: Any
    device: torch.device

    # After how many layers the target hands out hidden states: set by `hidden_states`, for rules and heads.
    aux_layers: Sequence[int] = ()
    aux_logits: aux_logits.StepAuxLogits | None = None
    _streams: list[torch.Tensor] | None = None  # of the step that is sampled, after each of `aux_layers`
    halves: PairedSteps | None = None  # where a rule reads pairs
    processor: RuleProcessor | None = None  # None: another rank of the pipeline samples
    _kept: dict[str, dict[str, dict[int, Any]]]  # by request id, by rule; see `Row.kept`

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's; then what rules read is made, before a method's heads ask for layers of theirs."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        settings = rules.of_vllm_config(self.vllm_config)
        assert settings is not None
        self._kept = {}
        if self.sampler is None:
            return  # another rank of the pipeline samples
        (self.processor,) = (
            each for each in self.sampler.logits_processors if isinstance(each, RuleProcessor)
        )
        self.aux_logits = self.processor.aux_logits = aux_logits.of_rules(self, settings)
        patches.subclass_in_place(self.sampler, DeferringSampler)
        self.sampler.deferrals = self.processor.deferrals
        if settings.pairs:
            assert self.aux_logits is not None
            self.halves = PairedSteps(self.aux_logits, self.device)
            patches.subclass_in_place(self.sampler, PairedSampler)
            self.sampler.halves = self.halves

    def add_requests(self, scheduler_output: Any) -> None:
        """vLLM's; what rules keep of a request outlives its preemptions. vLLM calls it in each step."""
        super().add_requests(scheduler_output)  # type: ignore[misc]
        if self.processor is None:
            return
        for name in scheduler_output.finished_req_ids:
            self._kept.pop(name, None)
            if self.halves is not None:
                self.halves.known.forget(name)
        for request in scheduler_output.scheduled_new_reqs:
            if request.sampling_params is not None:
                slot = self.req_states.req_id_to_index[request.req_id]
                self.processor.keep(slot, self._kept.setdefault(request.req_id, {}))
                if self.halves is not None:
                    self.halves.known.admit(request.req_id, request.sampling_params)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, and the second model's behind it where a request of the batch asks for it."""
        result = super().execute_model(*args, **kwargs)  # type: ignore[misc]
        state, second = self.execute_model_state, None if self.aux_logits is None else self.aux_logits.second
        self._streams = None if state is None else state.aux_hidden_states
        if second is not None and state is not None:
            batch = state.input_batch
            assert self.processor is not None
            if self.processor.reads_companion(batch.idx_mapping_np):
                rows = batch.num_tokens_after_padding
                with (
                    torch.inference_mode(),
                    set_forward_context(
                        state.attn_metadata,
                        self.vllm_config,
                        num_tokens=rows,
                        slot_mapping=state.slot_mappings_by_layer,
                    ),
                ):
                    second.forward(batch.input_ids[:rows], batch.positions[:rows])
        return result

    def warm_up_aux_logits(self) -> None:
        """Compile what would else stall the first request."""
        if self.aux_logits is not None and self.aux_logits.second is not None:
            self.aux_logits.second.warm_up(16)

    def sample(self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Any:
        """vLLM's, of a step that rules may read."""
        if self.aux_logits is not None:
            self.aux_logits.begin(input_batch.logits_indices, None, hidden_states, self._streams)
        if self.halves is not None:
            self.halves.begin(input_batch)
        assert self.processor is not None
        self.processor.deferrals.begin(input_batch)
        return super().sample(hidden_states, input_batch, grammar_output)  # type: ignore[misc]


def before_penalties(processors: list[Any]) -> None:
    """Put the rules of a sampler where V1 has them: behind biases and bad words. In place.

    Args:
        processors: vLLM's, whose order is the order in which they are applied.
    """
    order = (LogitBiasState, BadWordsState, RuleProcessor, PenaltiesState)

    def place(processor: Any) -> int:
        return next((i for i, kind in enumerate(order) if isinstance(processor, kind)), len(order))

    processors.sort(key=place)


def install(runner: Any) -> None:
    """Put the mixin in front of a constructed runner's class."""
    patches.subclass_in_place(runner, RuledRunner)
