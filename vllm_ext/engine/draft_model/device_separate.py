# SPDX-License-Identifier: Apache-2.0
"""A second model in vLLM's V2 worker, which reads what the target reads, in the same step.

It reads prompts by the same chunks. Of a request that decodes it reads the last tokens that may be new, whether they
are or not: what was read before is read again into the same slots of the KV cache. These are the target's blocks, in
layers of the model's own. So blocks that the prefix cache shares hold both, and draft nodes are read again once they
are committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, init_attn_backend

from vllm_ext.engine.draft_model.device_passes import DevicePasses, Likeliest, Texts
from vllm_ext.engine.models import second_model
from vllm_ext.kernels.backends import Backend
from vllm_ext.proposers.draft_model import SELF, DraftModelOptions

logger = init_logger("vllm.vllm_ext")

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
        own, shared = second_model.weight_bytes(self.model), 0
        if self._options.model == SELF:
            shared, own = own, 0
        logger.info(
            "vllm-ext: draft model %s: %d layers, %.1f MB of weights of its own (%.1f MB are the target's); its KV is "
            "counted with the target's",
            self._options.model,
            len(self.layers),
            own / 1e6,
            shared / 1e6,
        )

    def bind(self, runner: Any) -> None:
        """See `DevicePasses`."""
        super().bind(runner)
        self._attn_groups = init_attn_backend(
            runner.kv_cache_config, self._target_config, self._device, active_layer_names=set(self.layers)
        )[0]

    def read(self, input_batch: Any, most_new: int, behind: Sequence[int]) -> tuple[Texts, Likeliest]:
        """See `DevicePasses`: prompts too."""
        scheduled = np.asarray(input_batch.num_scheduled_tokens)
        done = np.asarray(input_batch.num_computed_tokens_np) + scheduled
        complete = done >= input_batch.prefill_len_np
        number = input_batch.num_reqs
        lengths = np.where(
            input_batch.is_prefilling_np, scheduled + complete, np.minimum(scheduled, most_new)
        ) + np.asarray(behind)
        starts = np.zeros(number + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        owner = np.repeat(np.arange(number), lengths)
        offset = np.arange(starts[-1]) - starts[owner]
        known = self._to_device(np.concatenate([lengths, done, complete, owner, offset, starts]))
        sizes = [number, number, number, len(owner), len(owner), number + 1]
        length, prompt_end, speaks, whose, place, query_start = torch.split(known, sizes)
        slots = input_batch.idx_mapping
        end = torch.where(speaks != 0, self._states.total_len.gpu[slots].to(torch.int64), prompt_end)
        first = (end - length).clamp(min=0)
        position = first[whose] + place
        there = position < end[whose]
        token = self._states.all_token_ids.gpu[slots[whose], torch.minimum(position, end[whose] - 1)]
        starts32 = query_start.to(torch.int32)
        slot_mapping = self._kv_slots(slots, starts32, position, whose, there)
        metadata = build_attn_metadata(
            attn_groups=self._attn_groups,
            num_reqs=number,
            num_tokens=len(owner),
            query_start_loc_gpu=starts32,
            query_start_loc_cpu=torch.from_numpy(starts.astype(np.int32)),
            max_query_len=int(lengths.max()),
            seq_lens=(first + length).to(torch.int32),
            max_seq_len=self._max_model_len,
            block_tables=[table[:number] for table in self._runner.block_tables.input_block_tables],
            slot_mappings=slot_mapping.expand(len(self._attn_groups), -1),
            kv_cache_config=self._runner.kv_cache_config,
            seq_lens_cpu_upper_bound=torch.from_numpy(
                np.minimum(done + 1, self._max_model_len).astype(np.int32)
            ),
            positions=position,
        )
        hidden = self._forward(token, position, slot_mapping, metadata)
        rows = query_start[:-1] + (end - 1 - first)
        return Texts(slots, end.to(torch.int32), number), self._likeliest(hidden[rows])

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids=tokens, positions=positions, intermediate_tensors=None)
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.compute_logits(hidden)
        return logits
