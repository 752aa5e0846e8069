# SPDX-License-Identifier: Apache-2.0
"""Some of the target's own layers draft in vLLM's V2 worker, over the target's own KV.

That is there for all tokens but the last one, which is the root of the next tree: it and the nodes below it are written
by the draft where the target's next step writes them again, with all of its layers. What the draft has computed is
computed again there: that step may be a captured graph, which begins where it always does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_ext.engine.draft_model.device.layers import LayersOnDevice
from vllm_ext.engine.draft_model.device.passes import Likeliest, Room, Texts
from vllm_ext.engine.draft_model.self_speculation import attention_names
from vllm_ext.engine.models.exit_heads import Head
from vllm_ext.engine.models.layer_slices import LayerSlice
from vllm_ext.kernels.backends import Backend


class SliceOnDevice(LayersOnDevice):
    """See `DevicePasses`. Place 0 of its nodes is the root's.

    Args:
        vllm_config: the target's.
        kept: the layers that draft, ascending.
        head: what is done to their normed hidden states before the target's head.
        req_states: vLLM's ``RequestState``.
        backend: of the kernels.
    """

    what_next = "Choose another model, or a method that needs only the model's output: `vllm-ext methods`."

    def __init__(
        self, vllm_config: Any, kept: Sequence[int], head: Head | None, req_states: Any, backend: Backend
    ) -> None:
        super().__init__(vllm_config, req_states, backend, f"model {vllm_config.model_config.model!r}")
        self._kept, self._head = list(kept), head
        self._target: Any = None
        self._slice: LayerSlice

    def load(self, target: Any) -> None:
        """See `DevicePasses`."""
        self._target = target
        self.layers = [name for index in self._kept for name in attention_names(target.model.layers[index])]
        self._slice = LayerSlice(self._target_config, target, self._kept, hand_out=False)

    def read_last(self, texts: Texts) -> Likeliest:
        """See `DevicePasses`: the last token alone, or any other of a text whose prompt is incomplete."""
        before = texts._replace(lengths=texts.lengths - 1)
        roots = self._states.all_token_ids.gpu[texts.slots, before.lengths.long()][:, None].to(torch.int32)
        return super().nodes(before, super().room(before, [1]), roots, torch.full_like(roots, -1), 0)

    def room(self, texts: Texts, widths: Sequence[int]) -> Room:
        """See `DevicePasses`."""
        return super().room(texts._replace(lengths=texts.lengths - 1), [1, *widths])

    def nodes(
        self, texts: Texts, room: Room, tokens: torch.Tensor, parents: torch.Tensor, past: int
    ) -> Likeliest:
        """See `DevicePasses`."""
        texts = texts._replace(lengths=texts.lengths - 1)
        behind_root = torch.nn.functional.pad(parents + 1, (1, 0), value=-1)
        return super().nodes(texts, room, tokens, behind_root, past + 1)

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._slice(positions, tokens=tokens)[0]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        adapted = hidden if self._head is None else self._head(hidden)
        logits: torch.Tensor = self._target.compute_logits(adapted)
        return logits
