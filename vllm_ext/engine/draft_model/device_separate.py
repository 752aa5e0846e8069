# SPDX-License-Identifier: Apache-2.0
"""A second model in vLLM's V2 worker, which reads what the target reads, in the same step.

It reads prompts by the same chunks, in passes of as many rows as vLLM's steps have. Of a request that decodes it reads
the last tokens that may be new, whether they are or not: what was read before is read again into the same slots of the
KV cache. These are the target's blocks, in layers of the model's own. So blocks that the prefix cache shares hold both,
and draft nodes are read again once they are committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, init_attn_backend

from vllm_ext.engine.draft_model.device_passes import DevicePasses, Likeliest, Texts
from vllm_ext.engine.draft_model.own_caches import packed
from vllm_ext.engine.models import second_model
from vllm_ext.kernels.backends import Backend
from vllm_ext.proposers.draft_model import DraftModelOptions

PREFIX = "companion"  # of the layers' names


class SeparateOnDevice(DevicePasses):
    """See `DevicePasses`.

    Args:
        vllm_config: the target's.
        options: which model.
        req_states: vLLM's ``RequestState``.
        backend: of the kernels.
    """

    what_next = "Choose another draft model, or a method without one: `vllm-ext methods`."
    reads = True

    def __init__(
        self, vllm_config: Any, options: DraftModelOptions, req_states: Any, backend: Backend
    ) -> None:
        super().__init__(vllm_config, req_states, backend, f"speculative_config.model={options.model!r}")
        self._options = options
        self.model: Any = None
        self._attn_groups: list[list[Any]] = []

    def load(self, target: Any) -> None:
        """Build it and load its weights; its layers then take part in vLLM's sizing of the caches."""
        self.config, self.model, self.layers = second_model.load(
            self._target_config, self._options, target, PREFIX
        )
        self.own_layers = self.layers
        self.vocab_size = min(self.vocab_size, self.config.model_config.get_vocab_size())
        second_model.log_draft(self._options, self.model, self.layers)

    def bind(self, runner: Any) -> None:
        """See `DevicePasses`."""
        super().bind(runner)
        self._attn_groups = init_attn_backend(
            runner.kv_cache_config, self._target_config, self._device, active_layer_names=set(self.layers)
        )[0]

    def is_short(self, input_batch: Any, most_new: int, behind: Any) -> bool:
        """See `DevicePasses`: no prompt, and nothing that was left unread."""
        return not input_batch.has_prefill and not behind.any()  # numpy

    def read_last(self, texts: Texts, most_new: int) -> Likeliest:
        """See `DevicePasses`: as the nodes of a chain."""
        number = texts.number
        begin = texts._replace(lengths=(texts.lengths - most_new).clamp(min=0))
        place, _, _ = self._places(number, (1,) * most_new)
        # Of a shorter text the last token is read again behind its end, where the tree's nodes will lie.
        at = torch.minimum(begin.lengths[:, None] + place, texts.lengths[:, None] - 1)
        tokens = self._states.all_token_ids.gpu[texts.slots[:, None], at.long()].to(torch.int32)
        parents = (place - 1).expand(number, -1).contiguous()
        hidden = self._below(begin, self.room(begin, [1] * most_new), tokens, parents, 0)
        last = (texts.lengths - 1 - begin.lengths).long()[:, None, None]
        rows = hidden.view(number, most_new, -1)
        return self._likeliest(rows.gather(1, last.expand(-1, 1, rows.shape[2]))[:, 0])

    def read(self, input_batch: Any, texts: Texts, most_new: int, behind: Any) -> Likeliest:
        """See `DevicePasses`: prompts too, by the chunks of vLLM's step."""
        scheduled = np.asarray(input_batch.num_scheduled_tokens)
        done = np.asarray(input_batch.num_computed_tokens_np) + scheduled
        complete = done >= input_batch.prefill_len_np
        number = input_batch.num_reqs
        lengths = (
            np.where(input_batch.is_prefilling_np, scheduled + complete, np.minimum(scheduled, most_new))
            + behind
        )
        starts = np.zeros(number + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        owner = np.repeat(np.arange(number), lengths)
        offset = np.arange(starts[-1]) - starts[owner]
        known = self.to_device(np.concatenate([lengths, owner, offset, starts]))
        length, whose, place, query_start = torch.split(known, [number, len(owner), len(owner), number + 1])
        end = texts.lengths.to(torch.int64)
        first = (end - length).clamp(min=0)
        position = first[whose] + place
        there = position < end[whose]
        token = self._states.all_token_ids.gpu[texts.slots[whose], torch.minimum(position, end[whose] - 1)]
        slot_mapping = self._kv_slots(texts, query_start.to(torch.int32), position, whose, there)
        longest = np.minimum(np.maximum(done + 1, lengths), self._max_model_len)
        parts = [(request, 0, rows) for request, rows in enumerate(lengths.tolist())]
        hidden = [
            self._read_some(
                lot, int(starts[lot[0][0]]) + lot[0][1], token, position, slot_mapping, first, longest
            )
            for lot in packed(parts, self._limit)
        ]
        rows = query_start[:-1] + (end - 1 - first)
        return self._likeliest(torch.cat(hidden)[rows])

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

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids=tokens, positions=positions, intermediate_tensors=None)
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.compute_logits(hidden)
        return logits
