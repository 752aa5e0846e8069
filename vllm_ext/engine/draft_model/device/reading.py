# SPDX-License-Identifier: Apache-2.0
"""A model with a cache of its own in vLLM's V2 worker: it reads a text's tokens in the step that computes them.

It reads prompts by the same chunks, in passes of as many rows as vLLM's steps have. Its cache lies in the target's
blocks, in layers of the model's own. So blocks that the prefix cache shares hold both, and draft nodes are read again
once they are committed. What a row is given beside its token, and which rows there are, is the subclass's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, init_attn_backend

from vllm_ext.engine.draft_model.device.layers import LayersOnDevice
from vllm_ext.engine.draft_model.device.passes import Likeliest, Texts
from vllm_ext.engine.draft_model.own_caches import packed


class ReadingPasses(LayersOnDevice):
    """See `DevicePasses`. A row of the cache stands at a *place* of a text."""

    reads = True

    # vLLM's, by KV group.
    _attn_groups: Sequence[Sequence[Any]] = ()

    def bind(self, runner: Any) -> None:
        """See `DevicePasses`."""
        super().bind(runner)
        self._attn_groups = init_attn_backend(
            runner.kv_cache_config, self._target_config, self._device, active_layer_names=set(self.layers)
        )[0]

    def is_short(self, input_batch: Any, behind: Any) -> bool:
        """See `DevicePasses`: no prompt, and nothing that was left unread."""
        return not input_batch.has_prefill and not behind.any()  # numpy

    @abstractmethod
    def _last_places(self, texts: Texts) -> tuple[torch.Tensor, torch.Tensor]:
        """Of texts that decode, int32 ``[requests]``: the first place to be read, and one that is behind the last."""

    @abstractmethod
    def _rows_of(self, input_batch: Any, behind: Any) -> np.ndarray[Any, Any]:
        """Arguments as of `read`; int ``[requests]`` on the host: how many places may have to be read, at most."""

    @abstractmethod
    def _places_of(
        self, input_batch: Any, texts: Texts, number: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `_last_places`, int64, of any texts.

        Args:
            input_batch: vLLM's.
            texts: as they are now.
            number: int64 ``[requests]``, of `_rows_of`.
        """

    def _give_last(self, texts: Texts, at: torch.Tensor) -> None:
        """Rows are read, as many of each text as may be new; int32 ``[requests, most_new]``, where their tokens are."""

    def _give(
        self, input_batch: Any, texts: Texts, whose: torch.Tensor, place: torch.Tensor, at: torch.Tensor
    ) -> None:
        """Rows are read.

        Args:
            input_batch: vLLM's.
            texts: as they are now.
            whose: int64 ``[rows]`` requests.
            place: int64 ``[rows]`` of each request's rows the how manieth it is.
            at: int64 ``[rows]`` where its token is in its text.
        """

    def _found(self, hidden: torch.Tensor) -> Likeliest:
        """The distributions after the requests' last tokens; ``[requests, hidden]``."""
        return self._likeliest(hidden)

    def read_last(self, texts: Texts) -> Likeliest:
        """See `DevicePasses`: as the nodes of a chain."""
        number = texts.number
        first, end = self._last_places(texts)
        begin = texts._replace(lengths=first)
        place, _, _ = self._places(number, (1,) * self.most_new)
        # Of a shorter text the last token is read again behind its end, where the tree's nodes will lie.
        at = torch.minimum(first[:, None] + place, end[:, None] - 1)
        if self.ahead:
            at = at + self.ahead
        tokens = self._states.all_token_ids.gpu[texts.slots[:, None], at.long()].to(torch.int32)
        parents = (place - 1).expand(number, -1).contiguous()
        self._give_last(texts, at)
        room = super().room(begin, [1] * self.most_new)
        rows = self._below(begin, room, tokens, parents, 0).view(number, self.most_new, -1)
        last = (end - 1 - first).long()[:, None, None]
        return self._found(rows.gather(1, last.expand(-1, 1, rows.shape[2]))[:, 0])

    def read(self, input_batch: Any, texts: Texts, behind: Any) -> Likeliest:
        """See `DevicePasses`: prompts too, by the chunks of vLLM's step."""
        done = np.asarray(input_batch.num_computed_tokens_np) + np.asarray(input_batch.num_scheduled_tokens)
        number = input_batch.num_reqs
        lengths = self._rows_of(input_batch, behind)
        starts = np.zeros(number + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        owner = np.repeat(np.arange(number), lengths)
        offset = np.arange(starts[-1]) - starts[owner]
        known = self.to_device(np.concatenate([lengths, owner, offset, starts]))
        length, whose, place, query_start = torch.split(known, [number, len(owner), len(owner), number + 1])
        first, end = self._places_of(input_batch, texts, length)
        position = first[whose] + place
        there = position < end[whose]
        at = torch.minimum(position, end[whose] - 1) + self.ahead
        token = self._states.all_token_ids.gpu[texts.slots[whose], at]
        slot_mapping = self._kv_slots(texts, query_start.to(torch.int32), position, whose, there)
        longest = np.minimum(np.maximum(done + 1, lengths), self._max_model_len)
        parts = [(request, 0, rows) for request, rows in enumerate(lengths.tolist())]
        self._give(input_batch, texts, whose, place, at)
        hidden = [
            self._read_some(
                lot, int(starts[lot[0][0]]) + lot[0][1], token, position, slot_mapping, first, longest
            )
            for lot in packed(parts, self._limit)
        ]
        rows = query_start[:-1] + (end - 1 - first).clamp(min=0)
        return self._found(torch.cat(hidden)[rows])

    def _read_some(
        self,
        lot: Sequence[tuple[int, int, int]],
        begin: int,
        token: torch.Tensor,
        position: torch.Tensor,
        slot_mapping: torch.Tensor,
        first: torch.Tensor,
        longest: Any,
    ) -> torch.Tensor:
        """One pass over rows of some requests.

        Args:
            lot: requests, with the first of their rows and the one behind the last.
            begin: of all rows the first.
            token: int ``[all rows]``.
            position: int64 ``[all rows]``.
            slot_mapping: int64 ``[all rows]``.
            first: int64 ``[requests]`` position of each one's first row.
            longest: int ``[requests]`` tokens of each, at most, on the host.

        Returns:
            ``[rows, hidden]``.
        """
        requests, starts, ends = (np.array(part) for part in zip(*lot, strict=True))
        query_start = np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int32)
        here = slice(begin, begin + int(query_start[-1]))
        tables = [table[: len(first)] for table in self._runner.block_tables.input_block_tables]
        seq_lens = first
        if len(lot) < len(first):
            picked = self.to_device(requests)
            tables, seq_lens = [table[picked] for table in tables], first[picked]
        metadata = build_attn_metadata(
            attn_groups=self._attn_groups,
            num_reqs=len(lot),
            num_tokens=int(query_start[-1]),
            query_start_loc_gpu=self.to_device(query_start, torch.int32),
            query_start_loc_cpu=torch.from_numpy(query_start),
            max_query_len=int((ends - starts).max()),
            seq_lens=(seq_lens + self.to_device(ends)).to(torch.int32),
            max_seq_len=self._max_model_len,
            block_tables=tables,
            slot_mappings=slot_mapping[here].expand(len(self._attn_groups), -1),
            kv_cache_config=self._runner.kv_cache_config,
            seq_lens_cpu_upper_bound=torch.from_numpy(longest[requests].astype(np.int32)),
            positions=position[here],
        )
        return self._forward(token[here], position[here], slot_mapping[here], metadata)
