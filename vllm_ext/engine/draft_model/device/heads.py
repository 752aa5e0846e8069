# SPDX-License-Identifier: Apache-2.0
"""Medusa's heads in vLLM's V2 worker: one pass of one row a request, over the last row that the step has committed.

Nothing is kept between steps, and a tree costs no pass of its own: all nodes of a depth have what one head says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_ext.engine.draft_model.device.passes import Committed, DevicePasses, Likeliest, Room, Texts
from vllm_ext.engine.models.medusa_heads import MedusaHeads, read_shape
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.top_k import MAX_K
from vllm_ext.proposers.medusa import MedusaOptions


class HeadsOnDevice(DevicePasses):
    """See `DevicePasses`.

    Args:
        vllm_config: the target's.
        options: which heads.
        req_states: vLLM's ``RequestState``.
        backend: of the kernels.
    """

    what_next = "Choose other heads, or a method without them: `vllm-ext methods`."

    def __init__(self, vllm_config: Any, options: MedusaOptions, req_states: Any, backend: Backend) -> None:
        super().__init__(vllm_config, req_states, backend, f"speculative_config.model={options.model!r}")
        self._options = options
        self.deepest = read_shape(options.model)[1].num_heads
        self._heads: MedusaHeads
        most, model = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config
        size = most, model.get_hidden_size()
        self._hidden = torch.zeros(size, dtype=model.dtype, device=self._device)
        support = self.deepest, most, MAX_K
        self._said = Likeliest(
            torch.zeros(support, dtype=torch.int32, device=self._device),
            torch.zeros(support, dtype=torch.float32, device=self._device),
        )
        self._depth = 0  # of the nodes that were asked for last

    def load(self, target: Any) -> None:
        """See `DevicePasses`."""
        dtype = self._target_config.model_config.dtype
        self._heads = MedusaHeads(self._options.model, dtype, self._device)
        self.token_map = self._heads.token_map

    def bind(self, runner: Any) -> None:
        """See `DevicePasses`: it has no layers in the caches."""
        self._runner = runner

    def blocks(self, slots: Any) -> Any:
        """See `DevicePasses`: none are looked at."""
        return np.zeros(len(slots), np.int32)

    def take(self, input_batch: Any, committed: Committed) -> None:
        """See `DevicePasses`."""
        number = input_batch.num_reqs
        last = input_batch.query_start_loc[1 : number + 1] - 1
        if committed.path is not None:
            new = (committed.num_new[:number] - 1).clamp(min=0).long()
            along = input_batch.query_start_loc[:number] + committed.path.gather(1, new[:, None])[:, 0]
            if input_batch.has_prefill:
                decodes = self.to_device(~np.asarray(input_batch.is_prefilling_np), torch.bool)
                last = torch.where(decodes, along, last)
            else:
                last = along
        torch.index_select(committed.hidden, 0, last, out=self._hidden[:number])

    def read_last(self, texts: Texts, most_new: int) -> Likeliest:
        """See `DevicePasses`: all heads at once."""
        number = texts.number
        found = self._all(self._hidden[:number])
        for kept, part in zip(self._said, found, strict=True):
            kept[:, :number] = part.view(self.deepest, number, MAX_K)
        return self._at(0, number, 1)

    def room(self, texts: Texts, widths: Sequence[int]) -> Room:
        """See `DevicePasses`: nodes need none. A tree begins."""
        self._depth = 0
        return Room(texts.slots, texts.slots, texts.slots)

    def nodes(
        self, texts: Texts, room: Room, tokens: torch.Tensor, parents: torch.Tensor, past: int
    ) -> Likeliest:
        """See `DevicePasses`: whatever the tokens are, those of a depth have one distribution."""
        self._depth += 1
        return self._at(self._depth, *tokens.shape)

    def _at(self, depth: int, number: int, width: int) -> Likeliest:
        """What all nodes of a depth of so many requests are followed by, ``width`` times each."""
        return Likeliest(
            *(part[depth, :number, None].expand(-1, width, -1).flatten(0, 1) for part in self._said)
        )

    def _all(self, hidden: torch.Tensor) -> Likeliest:
        """By head and row."""
        with torch.inference_mode():
            return self._of_logits(self._heads(hidden).flatten(0, 1))

    def dummy(self, num_tokens: int) -> None:
        """See `DevicePasses`."""
        self._all(self._hidden[:num_tokens])

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError  # no node is read

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError
