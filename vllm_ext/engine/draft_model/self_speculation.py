# SPDX-License-Identifier: Apache-2.0
"""The target's own layers draft, over the target's own KV: nothing to load, and nothing to keep in step.

The target's keys and values are there for all tokens but the last one, which is the root of the next tree: it and the
nodes below it are written by the draft where the target's next step will write them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from vllm_ext.engine.draft_model.passes import DraftPasses, Growth
from vllm_ext.engine.models.layer_slices import LayerSlice
from vllm_ext.proposers.draft_model import Rows


class SelfDraft(DraftPasses):
    """What methods that draft with some of the target's layers have in common. Node 0 of a growing tree is its root."""

    what_next = "Choose another model, or a method that needs only the model's output: `vllm-ext methods`."

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config, f"model {vllm_config.model_config.model!r}")
        self._target: Any = None

    def load(self, target: Any) -> None:
        """See `DraftPasses`."""
        self._target = target
        self.layers = [name for layer in target.model.layers for name in attention_names(layer)]

    def advance(self, num_tokens: Sequence[int], drafting: set[str]) -> None:
        """See `DraftPasses`."""
        self._growth.clear()
        self.passes.clear()
        for slot, request_id in enumerate(self._runner.input_batch.req_ids):
            if request_id in drafting:
                self._growth[request_id] = Growth(slot, num_tokens[slot] - 1)

    def roots(self, request_ids: Sequence[str]) -> Rows:
        """See `DraftModel`: the pass over the last tokens."""
        growths = [self._growth[request_id] for request_id in request_ids]
        known = self._runner.input_batch.token_ids_cpu
        return super().nodes(
            request_ids,
            [-1] * len(growths),
            [int(known[growth.slot, growth.context]) for growth in growths],
        )

    def nodes(self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        """See `DraftModel`."""
        return super().nodes(request_ids, [parent + 1 for parent in parents], tokens)

    def _logits(self, hidden: Any) -> Any:
        return self._target.compute_logits(hidden)


class SkippedLayers(SelfDraft):
    """Drafts with a choice of the layers. What it writes is not the target's, which computes all of it again.

    Args:
        vllm_config: the target's.
        kept: the layers, ascending.
    """

    def __init__(self, vllm_config: Any, kept: Sequence[int]) -> None:
        super().__init__(vllm_config)
        self._kept = list(kept)
        self._slice: Any = None

    def load(self, target: Any) -> None:
        """See `DraftPasses`."""
        super().load(target)
        self._slice = LayerSlice(self._target_config, target, self._kept, hand_out=False)

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
        return self._slice(positions, tokens=tokens)[0]


def attention_names(layer: Any) -> list[str]:
    """What vLLM calls the attention layers in a decoder layer."""
    return [part.layer_name for part in layer.modules() if isinstance(part, AttentionLayerBase)]
