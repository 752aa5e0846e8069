# SPDX-License-Identifier: Apache-2.0
"""Auxiliary logits for sampling rules: of layers and of a second model, beside a step's own, in either runner.

The second model reads what the target reads, in the same step: the same tokens at the same positions, behind the same
metadata of trees and chains, into caches of its own that lie in the same blocks. So it is in step with the target by
construction, whatever is cached, preempted, chunked or drafted. In steps without a request that asks for it, it rests;
such blocks are kept apart from those that have been read by both (`scheduler.companion_blocks`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger

from vllm_ext.config import rules
from vllm_ext.config.rules import RuleSettings
from vllm_ext.data.model_files import ModelVocabulary
from vllm_ext.engine.models import second_model
from vllm_ext.engine.models.hidden_states import HiddenStates, head_logits
from vllm_ext.proposers.draft_model import SELF
from vllm_ext.samplers.steering import CompanionOptions, SteeringRule

logger = init_logger("vllm.vllm_ext")

PREFIX = "rules_companion"  # of the second model's layers' names, which are not those of a draft model


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
        """Where vLLM's forward context is the target's step: int32 ``[num_tokens]``, and int64 as many or in rows.

        With M-RoPE there are rows, one a dimension. Of text, which is all that the target reads here, they are alike.
        """
        if positions.dim() > 1:
            positions = positions[0]
        known = torch.where(tokens < self._config.model_config.get_vocab_size(), tokens, 0)
        result = self._model(input_ids=known, positions=positions, intermediate_tensors=None)
        self._hidden, self._streams = (result, []) if self.hidden is None else result

    def begin(self, token_rows: torch.Tensor) -> None:
        """The step's logits are about to be sampled from; see `StepAuxLogits.begin`."""
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


def of_rules(
    runner: Any, settings: RuleSettings, requests: Mapping[str, Any] = MappingProxyType({})
) -> StepAuxLogits | None:
    """What the rules of a server read beside logits, once the target is loaded; None where none does.

    Args:
        runner: vLLM's, of either kind; its model hands out the layers that are read from now on.
        settings: of the rules.
        requests: see `StepAuxLogits`.
    """
    loaded = rules.load(settings.as_json, ModelVocabulary.of(runner.model_config))
    steering = [rule for rule in loaded.values() if isinstance(rule, SteeringRule)]
    if not steering:
        return None
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
    return StepAuxLogits(runner.model_config.get_vocab_size(), read, second, requests)


class StepAuxLogits:
    """See `vllm_ext.samplers.steering.AuxLogits`: for the rows of whatever call is being made.

    Args:
        vocab_size: the target's.
        read: where layers are.
        second: where a second model is.
        requests: V1's states of all there are, by id.
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
        self.pair_rows: torch.Tensor | None = None  # int64 [num_rows] of each of them its pair's row
        # By request id, by rule, by place in the output.
        self._kept: dict[str, dict[str, dict[int, Any]]] = {}

    @property
    def reads_forward(self) -> bool:
        """Whether the whole of the target's step is needed: layers' states, or what a second model reads along."""
        return self.read is not None or self.second is not None

    def begin(
        self,
        token_rows: torch.Tensor,
        logits: torch.Tensor | None,
        final: torch.Tensor,
        streams: list[torch.Tensor] | None,
    ) -> None:
        """A step's logits are about to be sampled from.

        Args:
            token_rows: those of the step's tokens that have logits.
            logits: ``[num_rows, vocab]``; None where no rule reads `target`, or `logits_are` tells them.
            final: ``[num_tokens, hidden_size]`` what the head reads.
            streams: of the layers that are read, as `HiddenStates.hold` takes them.
        """
        self._token_rows, self._logits, self._final, self._call = token_rows, logits, final, None
        if self.second is not None:
            self.second.begin(token_rows)
        if self.read is not None:
            assert streams is not None
            self.read.hold(streams, token_rows)

    def logits_are(self, logits: torch.Tensor) -> None:
        """The step's, ``[num_rows, vocab]``, where `begin` came before them."""
        self._logits = logits

    def call(self, rows: torch.Tensor | None) -> None:
        """The sampler is asked for these of the rows with logits; None: for all, in their order."""
        self._call = rows

    def rows_are(self, places: Sequence[int] | None) -> None:
        """A rule is applied to these rows of the sampler's; None: to all of them."""
        assert self._token_rows is not None
        rows = self._call
        if places is not None:
            index = torch.tensor(places).to(self._token_rows.device, non_blocking=True)
            rows = index if rows is None else rows[index]
        self._rows = rows

    def layers(self, layers: Sequence[int], norm: bool, ids: torch.Tensor | None = None) -> torch.Tensor:
        """See `AuxLogits`."""
        assert self.read is not None
        return self._padded(self.read.logits(layers, self._rows, norm, ids), ids)

    def companion(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """See `AuxLogits`."""
        assert self.second is not None
        with torch.inference_mode():
            return self._padded(self.second.logits(self._tokens, ids), ids)

    def companion_layers(
        self, layers: Sequence[int], norm: bool, ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `AuxLogits`."""
        assert self.second is not None
        assert self.second.hidden is not None
        return self._padded(self.second.hidden.logits(layers, self._rows, norm, ids), ids)

    def target(self) -> torch.Tensor:
        """See `AuxLogits`."""
        assert self._logits is not None
        return self._padded(self._logits if self._rows is None else self._logits[self._rows], None)

    def of_pairs(self, which: Sequence[bool]) -> StepAuxLogits:
        """See `AuxLogits`."""
        assert self.pair_rows is not None
        other, own = copy.copy(self), torch.arange(len(self.pair_rows), device=self.pair_rows.device)
        rows = own if self._rows is None else self._rows
        other._rows = torch.where(
            torch.tensor(which).to(rows.device, non_blocking=True), self.pair_rows[rows], rows
        )
        return other

    def hidden(self) -> torch.Tensor:
        """See `AuxLogits`."""
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
