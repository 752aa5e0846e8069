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
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models.interfaces import supports_eagle3


class HiddenStates:
    """Part of `aux_logits.StepAuxLogits`; to be read while tokens are sampled, or after the step.

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
                "vLLM runs no EAGLE-3 draft on it either. Choose a rule or a method that does not read layers, or "
                "another model."
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
        model = runner.get_model()
        made = cls(model, config.model, config.get_total_num_hidden_layers(), layers)
        # Rules and a head may both read some: one list says of all what the streams of a step are of.
        made.layers = runner.aux_layers if isinstance(runner.aux_layers, list) else []
        made.layers[:] = sorted({*layers, *runner.aux_layers})
        model.set_aux_hidden_state_layers(tuple(made.layers))
        runner.use_aux_hidden_state_outputs, runner.aux_layers = True, made.layers
        return made

    def hold(self, streams: list[torch.Tensor], rows: torch.Tensor) -> None:
        """For the runner: the step's ``[num_tokens, hidden_size]``, by layer, and the rows tokens are drawn from."""
        self._streams, self._rows = streams, rows

    def of(self, layer: int) -> torch.Tensor:
        """``[num_rows, hidden_size]`` after so many layers, as the next one gets it; rows as in the step's logits."""
        return self._streams[self.layers.index(layer)][self._rows]

    def logits(
        self,
        layers: Sequence[int],
        rows: torch.Tensor | None = None,
        norm: bool = True,
        ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the model's head makes of them, which is read once: ``[len(layers), num_rows, vocab_size]``.

        All ranks must ask.

        Args:
            layers: some of those that are kept.
            rows: int64, of the step's rows with logits; all of them if it is None.
            norm: whether the model's final norm comes first.
            ids: int64 ``[num_rows, k]``, tokens that are asked for alone; None: all.
        """
        with torch.inference_mode():
            of_layers = [self.of(layer) for layer in layers]
            hidden = torch.stack(of_layers if rows is None else [each[rows] for each in of_layers])
            if norm:
                hidden = self._model.model.norm(hidden.flatten(0, 1)).view_as(hidden)
            return head_logits(self._model, hidden, ids)


def head_logits(model: Any, hidden: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """What a model's head makes of hidden states: ``[num_layers, num_rows, vocab_size]``, or of some tokens alone.

    Args:
        model: vLLM's.
        hidden: ``[num_layers, num_rows, hidden_size]``.
        ids: int64 ``[num_rows, k]``; None: all.

    Returns:
        in the model's dtype; with ``ids`` float32 ``[num_layers, num_rows, k]``, minus infinity where there is no such
        token.
    """
    if ids is not None and (weight := _plain_head(model)) is not None:
        known = ids < len(weight)
        flat = torch.where(known, ids, 0).flatten()
        # [num_rows, k, hidden_size]; on a CPU six times as fast as by brackets.
        rows = weight.index_select(0, flat).view(*ids.shape, -1)
        scores = torch.matmul(rows, hidden.permute(1, 2, 0)).float().permute(2, 0, 1)
        return torch.where(known, scores, -torch.inf)
    logits: torch.Tensor = model.compute_logits(hidden.flatten(0, 1))
    logits = logits.view(*hidden.shape[:2], -1)
    if ids is None:
        return logits
    known = ids < logits.shape[2]
    where = torch.where(known, ids, 0).expand(len(logits), *ids.shape)
    return torch.where(known, logits.gather(2, where).float(), -torch.inf)


def _plain_head(model: Any) -> torch.Tensor | None:
    """The head's weight ``[vocab_size, hidden_size]``, where its rows are all there is to it."""
    head, processor = getattr(model, "lm_head", None), getattr(model, "logits_processor", None)
    if head is None or processor is None or processor.soft_cap is not None or processor.scale != 1.0:
        return None
    if getattr(head, "tp_size", 1) > 1 or getattr(head, "bias", None) is not None:
        return None
    weight = getattr(head, "weight", None)
    if not isinstance(getattr(head, "quant_method", None), UnquantizedEmbeddingMethod) or weight is None:
        return None
    plain: torch.Tensor = weight[: model.config.vocab_size]
    return plain
