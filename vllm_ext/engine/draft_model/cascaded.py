# SPDX-License-Identifier: Apache-2.0
"""A separate draft model with a drafter of its own, in vLLM's V1 worker: its passes read ahead.

What a step has committed is read as the first rows of the growing tree, with guesses below them; they lie where
committed tokens lie anyway. Prompts, of which the draft has more to read, are read as without a cascade.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_ext.engine.draft_model.passes import Growth
from vllm_ext.engine.draft_model.separate import MAX_NEW_TOKENS, SeparateModel
from vllm_ext.kernels.ancestor_bits import MAX_ROWS
from vllm_ext.proposers.cascade import Cascade
from vllm_ext.proposers.draft_model import DraftModelOptions, Rows
from vllm_ext.proposers.sampled import ASKED_PER_NODE


class CascadedModel(SeparateModel):
    """See the module."""

    def __init__(self, vllm_config: Any, options: DraftModelOptions) -> None:
        super().__init__(vllm_config, options)
        most_asked = ASKED_PER_NODE * options.num_speculative_tokens
        self.cascade = Cascade(self._vocab_size, options.guesses, most_asked, self._places_left)

    def _places_left(self, request_id: str) -> int:
        growth = self._growth[request_id]
        places = min(self.room(growth.slot) - growth.context, MAX_ROWS)
        return places - len(growth.parents)

    def advance(self, num_tokens: Sequence[int], drafting: set[str]) -> None:
        """See `DraftPasses`."""
        self.spared = 0
        batch = self._runner.input_batch
        for slot, request_id in enumerate(batch.req_ids):
            if request_id in drafting:
                self.cascade.start(request_id, batch.token_ids_cpu[slot, : num_tokens[slot]])
        super().advance(num_tokens, drafting)

    def _read(self, parts: list[tuple[int, int, int]], num_tokens: Sequence[int]) -> None:
        """See `SeparateModel`."""
        names = [self._runner.input_batch.req_ids[slot] for slot, _, _ in parts]
        unread = [last - first for _, first, last in parts]
        rows = sum(unread) + len(parts) * self.cascade.most_guesses
        if (
            any(last != num_tokens[slot] for slot, _, last in parts)
            or sum(unread) > MAX_NEW_TOKENS * len(parts)
            or rows > self._target_config.scheduler_config.max_num_batched_tokens
        ):
            super()._read(parts, num_tokens)
            for name in names:
                if name in self._roots:
                    self.cascade.rooted(name, *self._roots[name])
            return
        for name, (slot, first, last) in zip(names, parts, strict=True):
            self._growth[name] = Growth(slot, first)
            self._known[name] = last
            self._fill(name, first, last)
        for name, ids, log_q in zip(names, *self.cascade.roots(names, unread, super().nodes), strict=True):
            self._roots[name] = ids, log_q

    def nodes(self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        """See `DraftModel`."""
        before = len(self.passes)
        found = self.cascade.nodes(request_ids, parents, tokens, super().nodes)
        self.spared += len(self.passes) == before
        return found

    def forget(self, request_id: str) -> None:
        """See `DraftPasses`."""
        super().forget(request_id)
        self.cascade.forget(request_id)

    def warm_up(self) -> None:
        """See `Companion`."""
        super().warm_up()
        self.cascade.warm_up()
