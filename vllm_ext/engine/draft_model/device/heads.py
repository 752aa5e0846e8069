# SPDX-License-Identifier: Apache-2.0
"""Heads that draft from the target's last hidden state, in vLLM's V2 worker.

The row that they read is the last one that the step has committed: nothing is kept between steps, and no node is read
by attention. Medusa's heads tell all depths in one pass over these rows; Clover's take a pass for each depth.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_ext.engine.draft_model.device.node_rows import NodeRows
from vllm_ext.engine.draft_model.device.passes import Committed, DevicePasses, Likeliest, Room, Texts
from vllm_ext.engine.models import clover_heads, prompt_embeddings
from vllm_ext.engine.models.medusa_heads import MedusaHeads, read_shape
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.top_k import MAX_K
from vllm_ext.proposers.clover import CloverOptions
from vllm_ext.proposers.medusa import MedusaOptions


class LastRowsOnDevice(DevicePasses):
    """See `DevicePasses`.

    Args:
        vllm_config: the target's.
        req_states: vLLM's ``RequestState``.
        backend: of the kernels.
    """

    def __init__(self, vllm_config: Any, req_states: Any, backend: Backend) -> None:
        super().__init__(vllm_config, req_states, backend)
        config = vllm_config.model_config
        self._dtype: torch.dtype = config.dtype
        size = vllm_config.scheduler_config.max_num_seqs, config.get_hidden_size()
        self._hidden = torch.zeros(size, dtype=self._dtype, device=self._device)  # of each request's last row

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

    def room(self, texts: Texts, widths: Sequence[int]) -> Room:
        """See `DevicePasses`: nodes need none. A tree begins."""
        self._begin(texts.number)
        return Room(texts.slots, texts.slots, texts.slots)

    @abstractmethod
    def _begin(self, number: int) -> None:
        """Trees of so many requests begin."""


class MedusaOnDevice(LastRowsOnDevice):
    """See `DevicePasses`; arguments as of `LastRowsOnDevice`, and which heads."""

    def __init__(self, vllm_config: Any, options: MedusaOptions, req_states: Any, backend: Backend) -> None:
        super().__init__(vllm_config, req_states, backend)
        self._options = options
        self.deepest = read_shape(options.model)[1].num_heads
        self._heads: MedusaHeads
        support = self.deepest, len(self._hidden), MAX_K
        self._said = Likeliest(
            torch.zeros(support, dtype=torch.int32, device=self._device),
            torch.zeros(support, dtype=torch.float32, device=self._device),
        )
        self._depth = 0  # of the nodes that were asked for last

    def load(self, target: Any) -> None:
        """See `DevicePasses`."""
        self._heads = MedusaHeads(self._options.model, self._dtype, self._device)
        self.token_map = self._heads.token_map

    def read_last(self, texts: Texts) -> Likeliest:
        """See `DevicePasses`: all heads at once."""
        number = texts.number
        for kept, part in zip(self._said, self._all(self._hidden[:number]), strict=True):
            kept[:, :number] = part.view(self.deepest, number, MAX_K)
        return self._at(0, number, 1)

    def _begin(self, number: int) -> None:
        self._depth = 0

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


class CloverOnDevice(LastRowsOnDevice):
    """See `DevicePasses`; arguments as of `LastRowsOnDevice`, and which heads."""

    def __init__(self, vllm_config: Any, options: CloverOptions, req_states: Any, backend: Backend) -> None:
        super().__init__(vllm_config, req_states, backend)
        self._options = options
        self._heads: clover_heads.CloverHeads
        self._table: Any = None  # the target's embeddings
        self._rows = NodeRows(torch.zeros_like(self._hidden))  # states

    def load(self, target: Any) -> None:
        """See `DevicePasses`.

        Raises:
            ValueError: weights are missing or do not fit, or the target has no table of embeddings or several.
        """
        _, self._table = prompt_embeddings.only_table(target, "clover_tree")
        self._heads = clover_heads.load(self._options.model, self._dtype, self._device)
        self.token_map = self._heads.token_map

    def read_last(self, texts: Texts) -> Likeliest:
        """See `DevicePasses`: the states behind the last tokens."""
        tokens = self._states.all_token_ids.gpu[texts.slots, (texts.lengths - 1).long()]
        with torch.inference_mode():
            states = self._heads.first(self._hidden[: texts.number], self._embeds(tokens))
            self._rows.roots[: texts.number] = states
            return self._of_logits(self._heads.logits(states))

    def _begin(self, number: int) -> None:
        self._rows.begin(number)

    def nodes(
        self, texts: Texts, room: Room, tokens: torch.Tensor, parents: torch.Tensor, past: int
    ) -> Likeliest:
        """See `DevicePasses`: the cell goes on from the states of the parents."""
        with torch.inference_mode():
            above = self._rows.above(parents, past)
            states = self._heads.following(above, self._embeds(tokens.flatten()))
            self._rows.add(states)
            return self._of_logits(self._heads.logits(states))

    def _embeds(self, tokens: torch.Tensor) -> torch.Tensor:
        # Tokens behind the vocabulary stand for images.
        embeds: torch.Tensor = self._table(torch.where(tokens < self.vocab_size, tokens, 0).long())
        return embeds

    def dummy(self, num_tokens: int) -> None:
        """See `DevicePasses`."""
        hidden = self._hidden[:num_tokens]
        with torch.inference_mode():
            tokens = torch.zeros(len(hidden), dtype=torch.int64, device=self._device)
            self._of_logits(self._heads.logits(self._heads.first(hidden, self._embeds(tokens))))
