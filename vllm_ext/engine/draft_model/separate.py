# SPDX-License-Identifier: Apache-2.0
"""A second model in vLLM's V1 worker, which reads what the target reads.

vLLM's own loader makes it. A request's tokens are read when it is drafted for, and not before: who is not drafted for
costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_ext.engine.draft_model.online import Online
from vllm_ext.engine.draft_model.own_caches import OwnCaches, packed
from vllm_ext.engine.draft_model.passes import Growth, Pass
from vllm_ext.engine.models import cpu_linear, second_model
from vllm_ext.proposers.draft_model import DraftModelOptions

PREFIX = "companion"  # of the layers' names
MAX_NEW_TOKENS = 8  # of a request, on average, in a pass that reads no prompt


class SeparateModel(OwnCaches):
    """The model, its place in the caches, and forward passes. See `vllm_ext.proposers.draft_model.DraftModel`."""

    what_next = "Choose another draft model, or a method without one: `vllm-ext methods`."

    def __init__(self, vllm_config: Any, options: DraftModelOptions) -> None:
        super().__init__(vllm_config, f"speculative_config.model={options.model!r}")
        self._options = options
        self.online: Online | None = None

    def load(self, target: Any) -> None:
        """Build it and load its weights; its layers then take part in vLLM's sizing of the caches."""
        with cpu_linear.drafts(self._target_config):
            loaded = second_model.load(self._target_config, self._options, target, PREFIX)
        self.config, self.model, self.layers = loaded
        self.own_layers = self.layers
        self._vocab_size = min(self._vocab_size, self.config.model_config.get_vocab_size())
        second_model.log_draft(self._options, self.model, self.layers)
        self.online = Online.of(self._target_config, self._options, self.model, self._what)

    def renew(self) -> bool:
        """See `DraftPasses`."""
        return self.online is not None and self.online.swap()

    def close(self) -> None:
        """See `DraftPasses`."""
        if self.online is not None:
            self.online.close()

    def unread(self, request_ids: Sequence[str], num_tokens: Sequence[int]) -> list[int]:
        """See `DraftPasses`."""
        return [
            tokens - self._read_of(request_id)
            for request_id, tokens in zip(request_ids, num_tokens, strict=True)
        ]

    def advance(self, num_tokens: Sequence[int], drafting: set[str]) -> None:
        """See `DraftPasses`: read what those that are drafted for have committed."""
        self._roots.clear()
        self._growth.clear()
        self.passes.clear()
        # The last token is read again where it was before, for what follows it.
        parts = [
            (slot, min(self._read_of(request_id), num_tokens[slot] - 1), num_tokens[slot])
            for slot, request_id in enumerate(self._runner.input_batch.req_ids)
            if request_id in drafting
        ]
        for stretches in packed(parts, self._target_config.scheduler_config.max_num_batched_tokens):
            self._read(stretches, num_tokens)

    def _read(self, parts: list[tuple[int, int, int]], num_tokens: Sequence[int]) -> None:
        """One pass over stretches of committed tokens; those that reach their request's end have roots then."""
        started = time.perf_counter()
        batch = self._runner.input_batch
        slots, start, end = (np.array(column, np.int32) for column in zip(*parts, strict=True))
        hidden, row_start = self._pass(
            slots, start, end, lambda owners, places: batch.token_ids_cpu[owners, places]
        )
        asked, names = [], []
        for index, (slot, first, last) in enumerate(parts):
            request_id = batch.req_ids[slot]
            self._known[request_id] = last
            self._fill(request_id, first, last)
            if last == num_tokens[slot]:
                asked.append(int(row_start[index + 1]) - 1)
                names.append(request_id)
                self._growth[request_id] = Growth(slot, last)
        if asked:
            wanted = hidden if len(asked) == len(hidden) else hidden[self._to(np.array(asked))]
            for name, ids, log_q in zip(names, *self._distributions(wanted), strict=True):
                self._roots[name] = ids, log_q
        reads = len(hidden) > MAX_NEW_TOKENS * len(parts)
        self.passes.append(Pass(time.perf_counter() - started, len(hidden), len(parts), reads))

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
        # A token the draft has no row for is one that no tokenizer gives.
        known = torch.where(tokens < self._vocab_size, tokens, 0)
        return self.model(input_ids=known, positions=positions, intermediate_tensors=None)

    def _logits(self, hidden: Any) -> Any:
        return self.model.compute_logits(hidden)
