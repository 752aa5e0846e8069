# SPDX-License-Identifier: Apache-2.0
"""Trees of structured requests, which the worker has made of what the grammar allows, and masks.

`engine.structured_output` is the worker's half of this agreement: `grammar` on V1, `known_trees` on V2.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from vllm.v1.outputs import DraftTokenIds

from vllm_ext.engine.structured_output import grammar


class StructuredDrafts:
    """Leaves drafts of structured requests to the worker: vLLM cuts drafts that are no legal chain."""

    # vLLM's.
    requests: dict[str, Any]
    structured_output_manager: Any
    vllm_config: Any

    @functools.cached_property
    def _worker_masks(self) -> bool:
        return grammar.in_worker(self.vllm_config)

    def add_request(self, request: Any) -> None:
        """vLLM's; the request says which backend it really has, which with ``auto`` is that of the first of all."""
        if request.use_structured_output:
            backend = type(self.structured_output_manager.backend).__name__
            request.sampling_params.structured_outputs._backend = grammar.BACKENDS[backend]
        super().add_request(request)  # type: ignore[misc]

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """vLLM's, which would cut a tree to the legal chain that it begins with."""
        stock: Any = super()
        if not self._worker_masks:
            stock.update_draft_token_ids(draft_token_ids)
            return
        others: tuple[list[str], list[list[int]]] = ([], [])
        for name, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(name)
            if (
                request is not None
                and request.use_structured_output
                and not (request.is_finished() or request.is_prefill_chunk)
            ):
                request.spec_token_ids = tokens
            else:
                others[0].append(name)
                others[1].append(tokens)
        stock.update_draft_token_ids(DraftTokenIds(*others))

    def update_draft_token_ids_in_output(self, draft_token_ids: DraftTokenIds, scheduler_output: Any) -> None:
        """vLLM's, of steps scheduled ahead, which would cut likewise. V2's worker asks for nobody's word."""
        if self._worker_masks:
            draft_token_ids = DraftTokenIds([], [])
        super().update_draft_token_ids_in_output(draft_token_ids, scheduler_output)  # type: ignore[misc]

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """vLLM's: on V1 of requests without drafts, on V2 of roots; -1 is what it fills rows up with."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if self._worker_masks and drafts:
            if self.vllm_config.use_v2_model_runner:
                unknown = {name: [-1] * len(tokens) for name, tokens in drafts.items()}
                scheduler_output = replace(scheduler_output, scheduled_spec_decode_tokens=unknown)
            else:
                scheduled = {
                    name: count
                    for name, count in scheduler_output.num_scheduled_tokens.items()
                    if drafts.get(name, [-1])[0] < 0
                }
                scheduler_output = replace(scheduler_output, num_scheduled_tokens=scheduled)
        return super().get_grammar_bitmask(scheduler_output)  # type: ignore[misc]
