# SPDX-License-Identifier: Apache-2.0
"""Logits of layers and of a second model for sampling rules, in vLLM's V1 runner of any platform.

The second model reads what the target reads, in the same step: the same tokens at the same positions, behind the same
metadata of trees and chains, into caches of its own that lie in the same blocks. So it is in step with the target by
construction, whatever is cached, preempted, chunked or drafted. In steps without a request that asks for it, it rests;
such blocks are kept apart from those that have been read by both (`scheduler.RulesScheduler.add_request`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger

from vllm_ext import patches
from vllm_ext.config import rules
from vllm_ext.config.rules import RuleSettings
from vllm_ext.data.model_files import ModelVocabulary
from vllm_ext.engine import step_extras
from vllm_ext.engine.models import second_model
from vllm_ext.engine.models.hidden_states import HiddenStates, head_logits
from vllm_ext.engine.v1 import logits_processor
from vllm_ext.engine.v1.logits_processor import RuleProcessor
from vllm_ext.engine.v1.paired_rows import Twins
from vllm_ext.proposers.draft_model import SELF
from vllm_ext.samplers.steering import CompanionOptions, Pause, PausingRule, SteeringRule

logger = init_logger("vllm.vllm_ext")

PREFIX = "beside"  # of the second model's layers' names


class SecondModel:
    """It, and what it has made of the step's tokens.

    Args:
        vllm_config: the target's.
        options: which model.
        target: vLLM's, loaded and not yet compiled.
        layers: of a number of layers, those that are read.
    """

    def __init__(
        self,
        vllm_config: Any,
        options: CompanionOptions,
        target: Any,
        layers: Callable[[int], Sequence[int]],
    ) -> None:
        self._config, self._model, attention = second_model.load(vllm_config, options, target, PREFIX)
        self._hidden: torch.Tensor | None = None
        self._streams: list[torch.Tensor] = []
        num_layers = self._config.model_config.get_total_num_hidden_layers()
        self.hidden: HiddenStates | None = None
        if numbers := layers(num_layers):
            self.hidden = HiddenStates(self._model, options.model, num_layers, numbers)
        weights = 0 if options.model == SELF else second_model.weight_bytes(self._model)
        logger.info(
            "vllm-ext: companion model %s: %d layers, %.1f MB of weights of its own; its KV counts with the target's",
            options.model,
            len(attention),
            weights / 1e6,
        )

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """Where vLLM's forward context is the target's step: int32 and int64 ``[num_tokens]``."""
        known = torch.where(tokens < self._config.model_config.get_vocab_size(), tokens, 0)
        result = self._model(input_ids=known, positions=positions, intermediate_tensors=None)
        self._hidden, self._streams = (result, []) if self.hidden is None else result

    def begin(self, token_rows: torch.Tensor) -> None:
        """The step's logits are about to be sampled from; see `StepRows.begin`."""
        if self.hidden is not None:
            self.hidden.hold(self._streams, token_rows)

    def logits(self, rows: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        """Of some of the step's tokens; see `head_logits`. All ranks must ask."""
        assert self._hidden is not None
        return head_logits(self._model, self._hidden[rows][None], ids)[0]

    def warm_up(self, num_tokens: int) -> None:
        """Compile it, as vLLM's own warm-up does the target."""
        device = next(self._model.parameters()).device
        with torch.inference_mode(), set_forward_context(None, self._config, num_tokens=num_tokens):
            zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
            self.forward(zeros.to(torch.int32), zeros)
            self.logits(zeros[:2], None)


class StepRows:
    """See `vllm_ext.samplers.steering.Beside`: for the rows of whatever call is being made.

    Args:
        vocab_size: the target's.
        read: where layers are.
        second: where a second model is.
        requests: vLLM's states of all there are, by id.
    """

    def __init__(
        self,
        vocab_size: int,
        read: HiddenStates | None,
        second: SecondModel | None,
        requests: Mapping[str, Any],
    ) -> None:
        self.read, self.second = read, second
        self._requests = requests
        self._vocab_size = vocab_size
        self._final: torch.Tensor | None = None  # what the target's head reads, of the step's tokens
        self._token_rows: torch.Tensor | None = None  # of the step's rows with logits, among its tokens
        # Of the sampler's rows, among those with logits; None: all of them.
        self._call: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None  # of the rule's
        self._logits: torch.Tensor | None = None  # [num_rows, vocab] of the step
        self.twins: torch.Tensor | None = None  # int64 [num_rows] of each of them its twin's row
        # By request id, by rule, by place in the output.
        self._kept: dict[str, dict[str, dict[int, Any]]] = {}

    @property
    def reads_forward(self) -> bool:
        """Whether the whole of the target's step is needed: layers' states, or what a second model reads along."""
        return self.read is not None or self.second is not None

    def begin(
        self,
        token_rows: torch.Tensor,
        logits: torch.Tensor,
        final: torch.Tensor,
        streams: list[torch.Tensor] | None,
    ) -> None:
        """A step's logits are about to be sampled from.

        Args:
            token_rows: those of the step's tokens that have logits.
            logits: ``[num_rows, vocab]``.
            final: ``[num_tokens, hidden_size]`` what the head reads.
            streams: of the layers that are read, as `HiddenStates.hold` takes them.
        """
        self._token_rows, self._logits, self._final, self._call = token_rows, logits, final, None
        if self.second is not None:
            self.second.begin(token_rows)
        if self.read is not None:
            assert streams is not None
            self.read.hold(streams, token_rows)

    def call(self, rows: torch.Tensor) -> None:
        """The sampler is asked for these of the rows with logits."""
        self._call = rows

    def rows_are(self, places: Sequence[int] | None) -> None:
        """A rule is applied to these rows of the sampler's; None: to all of them."""
        assert self._token_rows is not None
        rows = self._call
        if places is not None:
            index = torch.tensor(places, device=self._token_rows.device)
            rows = index if rows is None else rows[index]
        self._rows = rows

    def layers(self, layers: Sequence[int], norm: bool, ids: torch.Tensor | None = None) -> torch.Tensor:
        """See `Beside`."""
        assert self.read is not None
        return self._padded(self.read.logits(layers, self._rows, norm, ids), ids)

    def companion(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """See `Beside`."""
        assert self.second is not None
        with torch.inference_mode():
            return self._padded(self.second.logits(self._tokens, ids), ids)

    def companion_layers(
        self, layers: Sequence[int], norm: bool, ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Beside`."""
        assert self.second is not None
        assert self.second.hidden is not None
        return self._padded(self.second.hidden.logits(layers, self._rows, norm, ids), ids)

    def target(self) -> torch.Tensor:
        """See `Beside`."""
        assert self._logits is not None
        return self._padded(self._logits if self._rows is None else self._logits[self._rows], None)

    def of_twins(self, which: Sequence[bool]) -> StepRows:
        """See `Beside`."""
        assert self.twins is not None
        other, own = copy.copy(self), torch.arange(len(self.twins), device=self.twins.device)
        rows = own if self._rows is None else self._rows
        other._rows = torch.where(torch.tensor(which, device=rows.device), self.twins[rows], rows)
        return other

    def hidden(self) -> torch.Tensor:
        """See `Beside`."""
        assert self._final is not None
        return self._final[self._tokens]

    @property
    def _tokens(self) -> torch.Tensor:
        """The rule's rows among the step's tokens."""
        assert self._token_rows is not None
        return self._token_rows if self._rows is None else self._token_rows[self._rows]

    def _padded(self, logits: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        """In float32, of as many tokens as the target's, or of those that were asked for."""
        if ids is not None:
            return logits
        missing = self._vocab_size - logits.shape[-1]
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[..., : self._vocab_size].float()

    def kept(self, output: list[int]) -> dict[str, dict[int, Any]]:
        """What rules keep of a request, by rule. Its list of output tokens is how a processor knows it."""
        name = next(name for name, state in self._requests.items() if state.output_token_ids is output)
        return self._kept.setdefault(name, {})

    def keep(self, request_id: str, rule: str, place: int, value: Any) -> None:
        """Something is known of a request's place that its rule is to find."""
        self._kept.setdefault(request_id, {}).setdefault(rule, {})[place] = value

    def forget(self, request_id: str) -> None:
        """A request is gone."""
        self._kept.pop(request_id, None)


class RuledRunner:
    """Mixin in front of vLLM's V1 runner class of any platform."""

    # vLLM's.
    execute_model_state: Any
    input_batch: Any
    discard_request_mask: Any

    twins: Twins | None = None  # set where a rule reads twins
    pausing: str | None = None  # the rule that can put tokens off
    may_pause = False  # whether that is, or a rule may have rows wait
    pauses: dict[str, Pause | None]  # of the step's requests whose next token was put off, by id
    beside: StepRows | None = None  # set where a rule reads more than logits
    _aside: dict[int, torch.Generator]  # of the step's requests that get no token
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
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        # What is not to be sampled takes nothing from a seed's noise. vLLM takes it and winds the generator back, which
        # a CPU's cannot do.
        generators = self.input_batch.generators
        self._aside = {index: generators.pop(index) for index in discarded if index in generators}
        try:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        finally:
            generators.update(self._aside)

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
        return rows

    def _row_start(self) -> list[int]:
        """Where each request's rows with logits begin: ``[num_requests + 1]``."""
        return list(range(self.input_batch.num_reqs + 1))

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """vLLM's; twins get their owners' tokens, and paused requests none."""
        noise = self.noise(range(self.input_batch.num_reqs))
        output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        if self.may_pause:
            for index, pause in logits_processor.paused(self.input_batch.logitsprocs).items():
                if self.pause(index, pause):
                    self.discard_request_mask.np[index] = True
                    if index in noise:
                        self.input_batch.generators[index].set_state(noise[index])
                        self._aside[index] = self.input_batch.generators.pop(index)
        if self.twins is not None and self.twins.pairs:
            owners, their_twins = map(list, zip(*self.twins.pairs, strict=True))
            output.sampled_token_ids[their_twins] = output.sampled_token_ids[owners]
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
