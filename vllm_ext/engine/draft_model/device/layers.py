# SPDX-License-Identifier: Apache-2.0
"""Passes of a model with layers in the KV caches, in vLLM's V2 worker: over the nodes of growing trees.

Draft nodes lie behind a request's text, in slots of the KV cache that the scheduler reserves, in the order of their
places (see `proposers.sampled_device`); each sees the tokens before the tree, its ancestors and itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_ext.engine import tree_layers
from vllm_ext.engine.attention import tree_backend
from vllm_ext.engine.draft_model.device.passes import DevicePasses, Likeliest, Room, Texts
from vllm_ext.engine.draft_model.passes import forward_context
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.tree_attention import TreeRows

MOST_LOGITS = 256  # rows whose logits are there at a time
NO_SLOT = -1  # nothing is written there


class LayersOnDevice(DevicePasses):
    """See `DevicePasses`; arguments too.

    Args:
        what: how errors name the model.
    """

    what_next: str  # what an error says of layers that do not fit

    def __init__(self, vllm_config: Any, req_states: Any, backend: Backend, what: str) -> None:
        super().__init__(vllm_config, req_states, backend)
        self._what = what
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._limit: int = vllm_config.scheduler_config.max_num_batched_tokens  # rows of a pass
        self._group_id = 0  # of KV
        self._constants: dict[tuple[Any, ...], tuple[torch.Tensor, ...]] = {}  # by shapes

    def bind(self, runner: Any) -> None:
        """See `DevicePasses`.

        Raises:
            ValueError: its layers cannot attend over trees, or lie in several groups of caches.
        """
        super().bind(runner)
        tree_layers.check_draft(self.layers, self._target_config, self._what, self.what_next)
        groups = (group.layer_names for group in runner.kv_cache_config.kv_cache_groups)
        self._group_id = tree_layers.only_group(self.layers, groups, self._what, self.what_next)

    def blocks(self, slots: Any) -> Any:
        """See `DevicePasses`."""
        return self._runner.block_tables.num_blocks.np[self._group_id, slots]

    def room(self, texts: Texts, widths: Sequence[int]) -> Room:
        """See `DevicePasses`."""
        place, depth, whose = self._places(texts.number, tuple(widths))
        at = texts.lengths[:, None] + place
        starts = torch.arange(texts.number + 1, device=at.device) * place.shape[1]
        slots = self._kv_slots(texts, starts.to(torch.int32), at.flatten().long(), whose, None)
        tables = self._runner.block_tables
        # Nodes may lie behind the longest text there is: kernels look up blocks for all of them.
        more = 1 + place.shape[1] // tables.block_sizes[self._group_id]
        blocks = torch.nn.functional.pad(tables.input_block_tables[self._group_id][: texts.number], (0, more))
        return Room(slots.view(at.shape), (texts.lengths[:, None] + depth).long(), blocks)

    def _places(self, number: int, widths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """Made once: int32 ``[1, nodes]`` each node's place, and its depth less 1; int64 ``[number * nodes]`` whose."""
        key = number, widths
        if key not in self._constants:
            depths = np.repeat(np.arange(len(widths)), widths)
            whose = np.repeat(np.arange(number), len(depths))
            parts = (
                (np.arange(len(depths))[None], torch.int32),
                (depths[None], torch.int32),
                (whose, torch.int64),
            )
            self._constants[key] = tuple(self.to_device(part, dtype) for part, dtype in parts)
        return self._constants[key]

    def nodes(
        self, texts: Texts, room: Room, tokens: torch.Tensor, parents: torch.Tensor, past: int
    ) -> Likeliest:
        """See `DevicePasses`."""
        return self._likeliest(self._below(texts, room, tokens, parents, past))

    def _below(
        self, texts: Texts, room: Room, tokens: torch.Tensor, parents: torch.Tensor, past: int
    ) -> torch.Tensor:
        """``[requests * width, hidden]`` of `nodes`."""
        number, width = tokens.shape
        if number > (most := max(1, self._limit // width)):
            lots = [slice(begin, begin + most) for begin in range(0, number, most)]
            found = [
                self._below(texts.of(lot), room.of(lot), tokens[lot], parents[lot], past) for lot in lots
            ]
            return torch.cat(found)
        key = number, width, past
        if key not in self._constants:
            rows = [range(0, number * width, width), [past + width] * number, [past] * number]
            rows.append(range(0, (number + 1) * (past + width), past + width))
            self._constants[key] = tuple(self.to_device(np.array(row), torch.int32) for row in rows)
        first_row, num_rows, num_past, row_start = self._constants[key]
        trees = TreeRows(
            block_table=room.blocks,
            first_row=first_row,
            num_rows=num_rows,
            num_past=num_past,
            context_len=texts.lengths,
            parents=parents.flatten(),
            max_rows=past + width,
        )
        vars(trees).update(row_start=row_start)
        metadata = SimpleNamespace(**{tree_backend.TREES: tree_backend.TreeMetadata(trees, None, None)})

        def here(values: torch.Tensor) -> torch.Tensor:
            # Of one column, `flatten` gives a view, which kernels would take for an array without gaps.
            return values[:, past : past + width].contiguous().flatten()

        return self._forward(
            tokens.flatten(),
            here(room.positions),
            here(room.slots),
            dict.fromkeys(self.layers, metadata),
        )

    def dummy(self, num_tokens: int) -> None:
        """See `DevicePasses`."""
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        hidden = self._forward(zeros, zeros, None, None)
        self._likeliest(hidden[:MOST_LOGITS])

    def _kv_slots(
        self,
        texts: Texts,
        query_start: torch.Tensor,
        place: torch.Tensor,
        whose: torch.Tensor,
        there: torch.Tensor | None,
    ) -> torch.Tensor:
        """int64 ``[rows]``: where the KV at a place of a request's text lies; NO_SLOT where it has no block, or is not
        ``there``.
        """
        tables = self._runner.block_tables
        inside = place.clamp(max=self._max_model_len - 1)
        found = torch.empty((tables.num_kv_cache_groups, len(place)), dtype=torch.int64, device=place.device)
        tables.compute_slot_mappings(texts.slots, query_start, inside, len(place), out=found)
        room = texts.blocks[whose] * tables.block_sizes[self._group_id]
        good = (place < self._max_model_len) & (place < room)
        if there is not None:
            good &= there
        result: torch.Tensor = torch.where(good, found[self._group_id], NO_SLOT)
        return result

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, kv_slots: torch.Tensor | None, metadata: Any
    ) -> torch.Tensor:
        """``[rows, hidden]``; without slots and metadata nothing is written or attended."""
        known = torch.where(tokens < self.vocab_size, tokens, 0).to(torch.int32)
        positions = positions.clamp(max=self._max_model_len - 1)
        with forward_context(self.config, self.layers, len(tokens), kv_slots, metadata):
            return self._run(known, positions)

    @abstractmethod
    def _run(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The model itself, in vLLM's forward context; int32 and int64 ``[rows]``."""

    @abstractmethod
    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab]``."""

    def _likeliest(self, hidden: torch.Tensor) -> Likeliest:
        parts = [self._of_some(part) for part in torch.split(hidden, MOST_LOGITS)]
        if len(parts) == 1:
            return parts[0]
        return Likeliest(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def _of_some(self, hidden: torch.Tensor) -> Likeliest:
        with torch.inference_mode():
            return self._of_logits(self._logits(hidden)[:, : self.vocab_size])
