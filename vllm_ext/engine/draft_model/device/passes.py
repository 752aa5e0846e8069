# SPDX-License-Identifier: Apache-2.0
"""Forward passes over the nodes of growing trees in vLLM's V2 worker: what models that draft there have in common.

The host knows the shapes of all passes without asking the device. Draft nodes lie behind a request's text, in slots of
the KV cache that the scheduler reserves, in the order of their places (see `proposers.sampled_device`); each sees the
tokens before the tree, its ancestors and itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ext.engine import tree_layers
from vllm_ext.engine.attention import tree_backend
from vllm_ext.engine.draft_model.passes import forward_context
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.likeliest import likeliest
from vllm_ext.kernels.top_k import MAX_K
from vllm_ext.kernels.tree_attention import TreeRows

MOST_LOGITS = 256  # rows whose logits are there at a time
NO_SLOT = -1  # nothing is written there


class Likeliest(NamedTuple):
    """Distributions after some rows, their likeliest tokens only."""

    ids: torch.Tensor  # int32 [rows, MAX_K], likeliest first
    log_q: (
        torch.Tensor
    )  # float32 [rows, MAX_K] at temperature 1, over the whole vocabulary; -inf: there is none


class Texts(NamedTuple):
    """Whose nodes a pass reads, in the order of the step."""

    slots: torch.Tensor  # int64 [requests]
    lengths: torch.Tensor  # int32 [requests] tokens of each
    blocks: torch.Tensor  # int [requests] of its KV, in the group of the layers that draft

    @property
    def number(self) -> int:
        """Of requests."""
        return len(self.slots)

    def of(self, some: slice) -> Texts:
        """Those of some requests."""
        return Texts(*(part[some] for part in self))


class Room(NamedTuple):
    """Of the nodes that are read in a step, by place."""

    slots: torch.Tensor  # int64 [requests, nodes] where the KV of each goes; NO_SLOT: nowhere
    positions: torch.Tensor  # int64 [requests, nodes] rotary positions
    blocks: torch.Tensor  # int32 [requests, blocks] of each request; behind a longest text, vLLM's null block

    def of(self, some: slice) -> Room:
        """That of some requests."""
        return Room(*(part[some] for part in self))


class Committed(NamedTuple):
    """What the target's step has computed, and what became of its rows."""

    hidden: torch.Tensor  # [query rows, hidden_size] behind the last norm
    streams: Sequence[torch.Tensor]  # [query rows, hidden_size] after each of `DevicePasses.aux_layers`
    # int32 [requests, nodes + 1] offsets of accepted rows, the root's first; behind the last, their own place. None: no
    # request had drafts.
    path: torch.Tensor | None
    num_new: torch.Tensor  # int32 [requests] tokens of each that are new; 0 while its prompt is incomplete


class DevicePasses(ABC):
    """A model that drafts, its place in the caches, and its passes.

    Args:
        vllm_config: the target's.
        req_states: vLLM's ``RequestState``.
        backend: of the kernels.
        what: how errors name the model.
    """

    what_next: str  # what an error says of layers that do not fit
    reads = False  # whether it has a cache of its own, which `read` keeps in step with the target's
    ahead = 0  # how many tokens behind a row's place its token is
    follows = False  # whether `read` needs what each step of the target has computed, one with no drafts too
    aux_layers: Sequence[int] = ()  # after how many of its layers the target is to hand out hidden states
    token_map: torch.Tensor | None = (
        None  # int64 [rows of the language head] their tokens; None: all, in order
    )
    deepest = 32  # nodes of which it knows something
    most_new = 1  # tokens that a step may put out of a request; set before `load`

    def __init__(self, vllm_config: Any, req_states: Any, backend: Backend, what: str) -> None:
        self._target_config, self._states, self._backend, self._what = vllm_config, req_states, backend, what
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._limit: int = vllm_config.scheduler_config.max_num_batched_tokens  # rows of a pass
        self._device: torch.device = req_states.device
        self.vocab_size: int = vllm_config.model_config.get_vocab_size()
        self.config: Any = vllm_config  # vLLM's, of the model that drafts
        self.layers: list[str] = []  # names of the attention layers it runs
        self.own_layers: list[str] = []  # those of them that are not the target's
        self._runner: Any = None
        self._group_id = 0  # of KV
        self._constants: dict[tuple[Any, ...], tuple[torch.Tensor, ...]] = {}  # by shapes

    @abstractmethod
    def load(self, target: Any) -> None:
        """Make it; ``target`` is vLLM's model, loaded."""

    def bind(self, runner: Any) -> None:
        """After vLLM has bound the caches.

        Raises:
            ValueError: its layers cannot attend over trees, or lie in several groups of caches.
        """
        self._runner = runner
        tree_layers.check_draft(self.layers, self._target_config, self._what, self.what_next)
        groups = (group.layer_names for group in runner.kv_cache_config.kv_cache_groups)
        self._group_id = tree_layers.only_group(self.layers, groups, self._what, self.what_next)

    def blocks(self, slots: Any) -> Any:
        """int32 ``[requests]`` on the host: `Texts.blocks` of these slots, as vLLM has them in this step."""
        return self._runner.block_tables.num_blocks.np[self._group_id, slots]

    def take(self, input_batch: Any, committed: Committed) -> None:
        """A step is over; before `read`, and not in a graph.

        Args:
            input_batch: vLLM's, of the step.
            committed: what it has computed.
        """

    def is_short(self, input_batch: Any, behind: Any) -> bool:
        """Whether `read_last` is enough; arguments as of `read`."""
        return True

    @abstractmethod
    def read_last(self, texts: Texts) -> Likeliest:
        """Read each text's last tokens, where nothing before them is new: the same shapes for as many requests.

        Args:
            texts: as they are now.

        Returns:
            The distribution after each one's last token.
        """

    def read(self, input_batch: Any, texts: Texts, behind: Any) -> Likeliest:
        """Read what the step has committed, as far as it was not.

        Args:
            input_batch: vLLM's, of the step.
            texts: as they are now.
            behind: int ``[requests]`` on the host: tokens more that were not read yet, at most.

        Returns:
            The distribution after each one's last token, or after what is there of an incomplete prompt.
        """
        return self.read_last(texts)

    def room(self, texts: Texts, widths: Sequence[int]) -> Room:
        """Where the nodes of a step lie, which all of its passes read.

        Args:
            texts: what lies before them.
            widths: how many nodes of each depth, from 1 on, are read of a request.
        """
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
        """Read the nodes of one depth, the same number of each request.

        Args:
            texts: what lies before them.
            room: of all nodes of the step.
            tokens: int32 ``[requests, width]``.
            parents: int32 ``[requests, past + width]``: places of the parents of all nodes read so far and of these; -1
                of those that have none but the last token.
            past: nodes of a request that were read before.
        """
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
        """A pass of so many rows, without attention, as vLLM's own dummy runs: what memory it takes is measured."""
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

    def _of_logits(self, logits: torch.Tensor) -> Likeliest:
        support = min(MAX_K, logits.shape[1])
        ids, log_q = likeliest(logits, support, self._backend)
        if self.token_map is not None:
            ids = self.token_map[ids.long()].to(torch.int32)
        missing = MAX_K - support
        if not missing:
            return Likeliest(ids, log_q)
        return Likeliest(
            torch.nn.functional.pad(ids, (0, missing)),
            torch.nn.functional.pad(log_q, (0, missing), value=-torch.inf),
        )

    def to_device(self, numbers: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        moved: torch.Tensor = async_tensor_h2d(numbers, device=self._device, dtype=dtype)
        return moved
