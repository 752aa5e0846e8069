# SPDX-License-Identifier: Apache-2.0
"""An EAGLE head in vLLM's V2 worker: passes over what each step has committed, and over the nodes of growing trees.

The target's hidden states are there in the step that computes them, and never again: the head reads in every step,
those that draft nothing too. So whatever block the prefix cache shares, the head has read. Row ``i`` takes what the
target made of token ``i`` and the token behind it; of the rows below the last token's each takes what came out at its
parent.

The last row of a shared block was read with the token that followed in the request that filled it; for another request
that row alone may be off, which no output depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_ext.engine.draft_model.device.graphs import MOST_REQUESTS
from vllm_ext.engine.draft_model.device.node_rows import NodeRows
from vllm_ext.engine.draft_model.device.passes import Committed, Likeliest, Room, Texts
from vllm_ext.engine.draft_model.device.reading import ReadingPasses
from vllm_ext.engine.models.eagle_head import FIRST_READ, EagleHead
from vllm_ext.kernels.backends import Backend
from vllm_ext.proposers.eagle import EagleOptions


class EagleOnDevice(ReadingPasses):
    """See `ReadingPasses`. What a row puts out is what its language head gets, and behind that what rows below take.

    Args:
        vllm_config: the target's.
        options: which head.
        req_states: vLLM's ``RequestState``.
        backend: of the kernels.
    """

    what_next = "Choose another head, or a method without one: `vllm-ext methods`."
    follows = True
    ahead = 1

    def __init__(self, vllm_config: Any, options: EagleOptions, req_states: Any, backend: Backend) -> None:
        super().__init__(vllm_config, req_states, backend, f"speculative_config.model={options.model!r}")
        self._options = options
        self._most = vllm_config.scheduler_config.max_num_seqs
        self._head: EagleHead
        self._step: Committed
        # Of short reads, whose graphs read here: of each of the target's layers [requests * width, hidden size of the
        # target], and int32 [requests] how many rows are new.
        self._new: list[torch.Tensor] = []
        self._num_new = torch.empty(0)
        self._rows: NodeRows  # what rows below take
        self._features = torch.empty(0)  # [rows, width] of the pass that comes
        self._back = torch.empty(0)  # int64 [num_before] how far tokens are before a row's own

    def load(self, target: Any) -> None:
        """See `DevicePasses`."""
        self._head = head = EagleHead(self._target_config, self._options.model, target)
        self.config, self.model = head.config, head.model
        self.layers = self.own_layers = head.attention
        self.token_map, self.aux_layers = head.token_map, head.layers
        dtype, short = self._target_config.model_config.dtype, min(self._most, MOST_REQUESTS)

        def zeros(rows: int, size: int) -> torch.Tensor:
            return torch.zeros((rows, size), dtype=dtype, device=self._device)

        of_target = self._target_config.model_config.get_hidden_size()
        self._new = [zeros(short * self.most_new, of_target) for _ in range(max(len(head.layers), 1))]
        self._rows = NodeRows(zeros(self._most, head.width))
        self._num_new = torch.zeros(short, dtype=torch.int32, device=self._device)
        self._back = torch.arange(head.num_before, 0, -1, device=self._device)

    def is_short(self, input_batch: Any, behind: Any) -> bool:
        """See `DevicePasses`: of larger batches the rows that there are, and no more."""
        return not input_batch.has_prefill and input_batch.num_reqs <= len(self._num_new)

    def take(self, input_batch: Any, committed: Committed) -> None:
        """See `DevicePasses`."""
        self._step = committed
        number = input_batch.num_reqs
        if not self.is_short(input_batch, None):
            return
        place, _, _ = self._places(number, (1,) * self.most_new)
        offset = place if committed.path is None else committed.path[:, : self.most_new]
        # Behind a request's rows, those of others.
        row = (input_batch.query_start_loc[:number, None] + offset).clamp(max=len(committed.hidden) - 1)
        row = row.flatten()
        for kept, hidden in zip(self._new, self._sources, strict=True):
            torch.index_select(hidden, 0, row, out=kept[: len(row)])
        self._num_new[:number] = committed.num_new[:number]

    @property
    def _sources(self) -> Sequence[torch.Tensor]:
        """What of the step's rows the head takes: ``[query rows, hidden size]`` each."""
        return self._step.streams if self.aux_layers else [self._step.hidden]

    def _last_places(self, texts: Texts) -> tuple[torch.Tensor, torch.Tensor]:
        end = texts.lengths - 1
        new = self._num_new[: texts.number].clamp(min=1)  # what fills a batch up has none
        return (end - new).clamp(min=0), end

    def _give_last(self, texts: Texts, at: torch.Tensor) -> None:
        self._give_features([kept[: at.numel()] for kept in self._new], texts.slots[:, None], at)

    def _give_features(self, hidden: Sequence[torch.Tensor], slots: torch.Tensor, at: torch.Tensor) -> None:
        """Rows are read: of the target's layers what they take, and int of the same shape, where their tokens are."""
        features = self._head.features(torch.cat([*hidden], 1))
        if self._head.num_before:
            place = (at[..., None].long() - self._back).clamp(min=FIRST_READ)
            before = self._states.all_token_ids.gpu[slots[..., None], place]
            before = torch.where(before < self.vocab_size, before, 0)
            features = self._head.beside(features, before.flatten(0, -2))
        self._features = features

    def _rows_of(self, input_batch: Any, behind: Any) -> np.ndarray[Any, Any]:
        scheduled = np.asarray(input_batch.num_scheduled_tokens)
        return np.where(input_batch.is_prefilling_np, scheduled, np.minimum(scheduled, self.most_new))

    def _places_of(
        self, input_batch: Any, texts: Texts, number: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = texts.lengths.to(torch.int64) - 1
        prefilling = self.to_device(np.asarray(input_batch.is_prefilling_np), torch.bool)
        new = torch.where(prefilling, number, self._step.num_new[: texts.number].to(torch.int64))
        return end - new, end

    def _give(
        self, input_batch: Any, texts: Texts, whose: torch.Tensor, place: torch.Tensor, at: torch.Tensor
    ) -> None:
        step, offset = self._step, place
        if step.path is not None:
            most = step.path.shape[1] - 1
            # Of prompts the path is its own places.
            along = step.path[whose, place.clamp(max=most)].long()
            offset = torch.where(place <= most, along, place)
        row = input_batch.query_start_loc[whose].long() + offset
        self._give_features([hidden[row] for hidden in self._sources], texts.slots[whose], at)

    def _found(self, hidden: torch.Tensor) -> Likeliest:
        self._rows.roots[: len(hidden)] = hidden[:, self._head.hidden_size :]
        return self._likeliest(hidden)

    def room(self, texts: Texts, widths: Sequence[int]) -> Room:
        """See `DevicePasses`. A tree begins."""
        self._rows.begin(texts.number)
        return super().room(texts._replace(lengths=texts.lengths - 1), widths)

    def nodes(
        self, texts: Texts, room: Room, tokens: torch.Tensor, parents: torch.Tensor, past: int
    ) -> Likeliest:
        """See `DevicePasses`."""
        self._features = self._rows.above(parents, past)
        before = texts._replace(lengths=texts.lengths - 1)
        hidden = self._below(before, room, tokens, parents, past)
        self._rows.add(hidden[:, self._head.hidden_size :])
        return self._likeliest(hidden)

    def dummy(self, num_tokens: int) -> None:
        """See `DevicePasses`."""
        self._features = self._rows.roots.new_zeros((num_tokens, self._head.width))
        super().dummy(num_tokens)

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        features, self._features = self._features[: len(tokens)], self._features[len(tokens) :]
        return torch.cat(self._head(tokens, positions, features), 1)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.logits(hidden[:, : self._head.hidden_size].contiguous())
