# SPDX-License-Identifier: Apache-2.0
"""What the target's layers hand on to the next, kept for the rows that tokens are drawn from.

A service for whatever reads layers: contrasts of layers, figures about early exits. vLLM's models hand hidden states
out for EAGLE-3; here they do it for us, in the forward pass that runs anyway: one addition of
``[num_rows, hidden_size]`` for each layer asked for, and nothing where nobody asks.

A step whose hidden states are kept runs the whole model: it does not begin behind an early exit, where the layers below
have computed other rows at other times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.models.interfaces import supports_eagle3


class HiddenStates:
    """Part of `v1_beside.StepRows`; to be read while tokens are sampled, or after the step.

    Args:
        model: vLLM's, loaded and not yet compiled.
        name: how errors call it.
        most: how many layers it has.
        layers: after how many of them, ascending: 0, the embeddings, to all there are.

    Raises:
        ValueError: the model hands out no hidden states, or does not have such layers.
        RuntimeError: the model is compiled.
    """

    def __init__(self, model: Any, name: str, most: int, layers: Sequence[int]) -> None:
        if not supports_eagle3(model):
            raise ValueError(
                f"{type(model).__name__}, the architecture of {name}, does not hand out hidden states of its layers: "
                "vLLM runs no EAGLE-3 draft on it either. Choose a rule that does not read layers, or another model."
            )
        wrong = [layer for layer in layers if not 0 <= layer <= most]
        if wrong or list(layers) != sorted(set(layers)) or not layers:
            raise ValueError(
                f"layers={list(layers)} is not allowed; allowed: 0 to {most}, ascending, of {name}."
            )
        if getattr(model.model, "compiled", False):
            raise RuntimeError(
                "hidden states are asked for after the model was compiled; ask when it is loaded."
            )
        self.layers = list(layers)
        self._model = model
        self._streams: list[torch.Tensor] = []
        self._rows: torch.Tensor | None = None
        model.set_aux_hidden_state_layers(tuple(layers))

    @classmethod
    def of_target(cls, runner: Any, layers: Sequence[int]) -> HiddenStates:
        """Those of a runner's model, which from now on has them in its steps."""
        config = runner.model_config
        made = cls(runner.get_model(), config.model, config.get_total_num_hidden_layers(), layers)
        runner.use_aux_hidden_state_outputs = True
        return made

    def hold(self, streams: list[torch.Tensor], rows: torch.Tensor) -> None:
        """For the runner: the step's ``[num_tokens, hidden_size]``, by layer, and the rows tokens are drawn from."""
        self._streams, self._rows = streams, rows

    def of(self, layer: int) -> torch.Tensor:
        """``[num_rows, hidden_size]`` after so many layers, as the next one gets it; rows as in the step's logits."""
        return self._streams[self.layers.index(layer)][self._rows]

    def logits(
        self, layers: Sequence[int], rows: torch.Tensor | None = None, norm: bool = True
    ) -> torch.Tensor:
        """What the target's head makes of them, which is read once: ``[len(layers), num_rows, vocab_size]``.

        All ranks must ask.

        Args:
            layers: some of those that are kept.
            rows: int64, of the step's rows with logits; all of them if it is None.
            norm: whether the target's final norm comes first.
        """
        with torch.inference_mode():
            hidden = torch.stack(
                [self.of(layer) if rows is None else self.of(layer)[rows] for layer in layers]
            )
            flat = hidden.flatten(0, 1)
            logits: torch.Tensor = self._model.compute_logits(self._model.model.norm(flat) if norm else flat)
            return logits.view(*hidden.shape[:2], -1)
