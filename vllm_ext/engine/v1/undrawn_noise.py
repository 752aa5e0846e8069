# SPDX-License-Identifier: Apache-2.0
"""Requests that get no token in a step take nothing from their seed. Both our runners build on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm_ext.engine.steering.aux_logits import StepAuxLogits


class UndrawnNoise:
    """Keeps the generators of requests that get no token away from the sampler.

    vLLM lets it draw and winds the generator back, which a CPU's cannot do.
    """

    # vLLM's.
    execute_model_state: Any
    input_batch: Any
    discard_request_mask: Any

    # Ascending, after how many layers hidden states are kept in steps: set by `hidden_states`, for rules and heads.
    aux_layers: Sequence[int] = ()

    # Set by `steering_runner`, where there are rules.
    aux_logits: StepAuxLogits | None = None  # where a rule reads more than logits
    may_defer = False  # whether a rule may defer a request's token
    pairs: Sequence[tuple[int, int]] = ()  # of the step, batch indices of primaries and their pairs

    _aside: dict[int, torch.Generator]  # of the step's requests that get no token

    def sample_tokens(self, grammar_output: Any) -> Any:
        generators, self._aside = self.input_batch.generators, {}
        if generators:
            discarded = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
            self._aside = {index: generators.pop(index) for index in discarded if index in generators}
        try:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        finally:
            generators.update(self._aside)

    def noise(self, requests: Iterable[int]) -> dict[int, torch.Tensor]:
        """States of some requests' seeded generators, where a row may have to give back what it has drawn."""
        generators = self.input_batch.generators
        if not self.may_defer or not generators:
            return {}
        return {index: generators[index].get_state() for index in requests if index in generators}
