# SPDX-License-Identifier: Apache-2.0
"""Logits of layers and of a second model for sampling rules, in vLLM's V1 runner of any platform.

The second model reads what the target reads, in the same step: the same tokens at the same positions, behind the same
metadata of trees and chains, into caches of its own that lie in the same blocks. So it is in step with the target by
construction, whatever is cached, preempted, chunked or drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger

from vllm_ext import companion_load, rules
from vllm_ext.hidden_states import HiddenStates
from vllm_ext.proposers.draft_model import SELF
from vllm_ext.rules import RuleSettings
from vllm_ext.samplers.steering import CompanionOptions, SteeringRule
from vllm_ext.v1_rules import RuleProcessor
from vllm_ext.vocabulary import ModelVocabulary

logger = init_logger("vllm.vllm_ext")

PREFIX = "beside"  # of the second model's layers' names


class SecondModel:
    """It, and what it has made of the step's tokens.

    Args:
        vllm_config: the target's.
        options: which model.
        target: vLLM's, loaded and not yet compiled.
    """

    def __init__(self, vllm_config: Any, options: CompanionOptions, target: Any) -> None:
        self._config, self._model, layers = companion_load.load(vllm_config, options, target, PREFIX)
        self._hidden: torch.Tensor | None = None
        weights = 0 if options.model == SELF else sum(p.nbytes for p in self._model.parameters())
        logger.info(
            "vllm-ext: companion model %s: %d layers, %.1f MB of weights of its own; its KV counts with the target's",
            options.model,
            len(layers),
            weights / 1e6,
        )

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """Where vLLM's forward context is the target's step: int32 and int64 ``[num_tokens]``."""
        known = torch.where(tokens < self._config.model_config.get_vocab_size(), tokens, 0)
        self._hidden = self._model(input_ids=known, positions=positions, intermediate_tensors=None)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 ``[num_rows, own vocab]`` of some of the step's tokens. All ranks must ask."""
        assert self._hidden is not None
        logits: torch.Tensor = self._model.compute_logits(self._hidden[rows]).float()
        return logits

    def warm_up(self, num_tokens: int) -> None:
        """Compile it, as vLLM's own warm-up does the target."""
        device = next(self._model.parameters()).device
        with torch.inference_mode(), set_forward_context(None, self._config, num_tokens=num_tokens):
            zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
            self.forward(zeros.to(torch.int32), zeros)
            self.logits(zeros[:2])


class StepRows:
    """See `vllm_ext.samplers.steering.Beside`: for the rows of whatever call is being made.

    Args:
        vocab_size: the target's.
        hidden: where layers are read.
        second: where a second model is.
    """

    def __init__(self, vocab_size: int, hidden: HiddenStates | None, second: SecondModel | None) -> None:
        self.hidden, self.second = hidden, second
        self._vocab_size = vocab_size
        self._token_rows: torch.Tensor | None = None  # of the step's rows with logits, among its tokens
        self._call: torch.Tensor | None = (
            None  # of the sampler's rows, among those with logits; None: all of them
        )
        self._rows: torch.Tensor | None = None  # of the rule's
        self._kept: dict[int, dict[str, dict[int, Any]]] = {}

    def begin(self, token_rows: torch.Tensor, streams: list[torch.Tensor] | None) -> None:
        """A step's logits are about to be sampled from."""
        self._token_rows, self._call = token_rows, None
        if self.hidden is not None:
            assert streams is not None
            self.hidden.hold(streams, token_rows)

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

    def layers(self, layers: Sequence[int], norm: bool) -> torch.Tensor:
        """See `Beside`."""
        assert self.hidden is not None
        return self.hidden.logits(layers, self._rows, norm)[..., : self._vocab_size].float()

    def companion(self) -> torch.Tensor:
        """See `Beside`."""
        assert self.second is not None
        assert self._token_rows is not None
        rows = self._token_rows if self._rows is None else self._token_rows[self._rows]
        with torch.inference_mode():
            logits = self.second.logits(rows)[:, : self._vocab_size]
        missing = self._vocab_size - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def kept(self, params: Any) -> dict[str, dict[int, Any]]:
        """What rules keep of a request, by rule; vLLM's SamplingParams are how a processor knows it."""
        return self._kept.setdefault(id(params), {})

    def forget(self, params: Any) -> None:
        """A request is gone."""
        self._kept.pop(id(params), None)


class RuledRunner:
    """Mixin in front of vLLM's V1 runner class of any platform."""

    # vLLM's.
    execute_model_state: Any
    input_batch: Any

    beside: StepRows | None = None  # set where a rule reads more than logits
    logits_rows: torch.Tensor | None = None  # of the step's tokens, those with logits

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's."""
        result = super()._prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        self.logits_rows = result[0]
        return result

    def _model_forward(self, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, and the second model's."""
        result = super()._model_forward(input_ids, positions, *args, **kwargs)  # type: ignore[misc]
        if self.beside is not None and self.beside.second is not None:
            self.beside.second.forward(input_ids, positions)
        return result

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's."""
        state = self.execute_model_state
        if state is not None and self.beside is not None:
            assert self.logits_rows is not None
            self.beside.begin(self.logits_rows, state.aux_hidden_states)
        return super().sample_tokens(grammar_output)  # type: ignore[misc]

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        super()._on_request_state_removed(req_id, req_state)  # type: ignore[misc]
        if self.beside is not None and req_state is not None:
            self.beside.forget(req_state.sampling_params)

    def read_beside(self, settings: RuleSettings) -> None:
        """After the target is loaded: make what rules read beside its logits."""
        runner: Any = self
        loaded = rules.load(settings.as_json, ModelVocabulary.of(runner.model_config))
        steering = {name: rule for name, rule in loaded.items() if isinstance(rule, SteeringRule)}
        if not steering:
            return
        target = runner.get_model()
        num_layers = runner.model_config.get_total_num_hidden_layers()
        numbers: set[int] = set()
        for rule in steering.values():
            rule.layer_numbers = rule.layers(rule.options, num_layers)
            numbers.update(rule.layer_numbers)
        hidden = HiddenStates(runner, sorted(numbers)) if numbers else None
        options = settings.companion
        second = None if options is None else SecondModel(runner.vllm_config, options, target)
        self.beside = StepRows(runner.model_config.get_vocab_size(), hidden, second)
        for processor in runner.input_batch.logitsprocs.all:
            if isinstance(processor, RuleProcessor):
                processor.beside = self.beside

    def warm_up_beside(self) -> None:
        """Compile what would else stall the first request."""
        if self.beside is not None and self.beside.second is not None:
            self.beside.second.warm_up(16)


def install(runner: Any) -> None:
    """Put the mixin in front of a constructed runner's class."""
    base = type(runner)
    runner.__class__ = type(f"Ruled{base.__name__}", (RuledRunner, base), {})
