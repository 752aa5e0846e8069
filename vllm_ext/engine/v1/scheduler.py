# SPDX-License-Identifier: Apache-2.0
"""Subclasses of vLLM's scheduler, named in ``scheduler_cls``.

`RulesScheduler` returns what sampling rules report, keeps blocks that a second model has read apart from those it has
not, and frees blocks that a KV method has given up. `GrammarScheduler` also leaves drafts of structured requests to the
worker: vLLM cuts drafts that are no legal chain. `Scheduler` also reserves KV slots for a draft model: vLLM does so
only for its own draft models, by method name.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

from vllm.v1.outputs import DraftTokenIds

from vllm_ext.config import kv_cache, rules
from vllm_ext.engine import grammar, step_extras
from vllm_ext.engine.ended_requests import EndsFaulty
from vllm_ext.engine.v1.lookahead_scheduler import BranchScheduler
from vllm_ext.proposers.sampled import ASKED_PER_NODE

REPORT = "vllm_ext"  # the key of what a request's rules have to say


class RulesScheduler(EndsFaulty, BranchScheduler):
    """Adds up what sampling rules note of a request's tokens, and returns it with the request; and lets the KV cache's
    manager know what the worker has forgotten.

    In ``kv_transfer_params``, the one field of vLLM's outputs that takes what a scheduler wants to say, and that its
    HTTP answers have.
    """

    @functools.cached_property
    def _ruled(self) -> rules.RuleSettings | None:
        return rules.of_vllm_config(self.vllm_config)

    @functools.cached_property
    def _selects(self) -> bool:
        """Whether the worker tells which blocks are read no more."""
        settings = kv_cache.from_config(self.vllm_config)
        return settings is not None and settings.answers_read_less

    @functools.cached_property
    def _notes(self) -> dict[str, dict[int, float]]:
        """By request id, by place in the output: rows whose token is thrown away (a prompt's parts) are replaced."""
        return {}

    def add_request(self, request: Any) -> None:
        """vLLM's. What a second model reads along with shares cached blocks only with its like: others lack its KV."""
        if self._ruled is not None and self._ruled.reads_companion(request.sampling_params):
            request.cache_salt = f"{request.cache_salt or ''} vllm-ext companion"
            request.block_hashes.clear()
            request.update_block_hashes()
        super().add_request(request)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        """vLLM's; a step with no real draft is none that drafted."""
        if (num_invalid_spec_tokens or {}).get(request_id) == num_draft_tokens:
            return spec_decoding_stats
        return super().make_spec_decoding_stats(
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's. It counts as drafts what it has filled a request's rows up with, unless it is told not to."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if filled := {name: len(tokens) for name, tokens in drafts.items() if tokens and tokens[0] < 0}:
            known = scheduler_output.num_invalid_spec_tokens or {}
            scheduler_output.num_invalid_spec_tokens = {**known, **filled}
        extras = step_extras.of(model_runner_output)
        for name, notes in extras.notes.items():
            if name in self.requests:
                self._notes.setdefault(name, {}).update(notes)
        for name, forgotten in extras.forgotten.items():
            if name in self.requests:
                for manager in self.kv_cache_manager.coordinator.single_type_managers:
                    manager.forget(name, forgotten)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; called when a request ends, in whatever way."""
        params, others = super()._free_request(request, *args, **kwargs)
        if self._selects:
            for manager in self.kv_cache_manager.coordinator.single_type_managers:
                manager.recall(request.request_id)
        notes = self._notes.pop(request.request_id, None)
        if notes is not None and self._ruled is not None:
            # A step may have drawn tokens behind the one that ended the request.
            total = sum(value for place, value in notes.items() if place < request.num_output_tokens)
            report = self._ruled.report_of(request.sampling_params)
            params = {**(params or {}), REPORT: {report: total if math.isfinite(total) else None}}
        return params, others


class GrammarScheduler(RulesScheduler):
    """Structured requests have trees, which the worker has made of what the grammar allows, and masks."""

    structured_output_manager: Any

    def add_request(self, request: Any) -> None:
        """vLLM's; the request says which backend it really has, which with ``auto`` is that of the first of all."""
        if request.use_structured_output:
            backend = type(self.structured_output_manager.backend).__name__
            request.sampling_params.structured_outputs._backend = grammar.BACKENDS[backend]
        super().add_request(request)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """vLLM's, which would cut a tree to the legal chain that it begins with."""
        if not grammar.in_worker(self.vllm_config):
            super().update_draft_token_ids(draft_token_ids)
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
        super().update_draft_token_ids(DraftTokenIds(*others))

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """vLLM's, of requests without drafts; -1 is what it fills rows up with."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if grammar.in_worker(self.vllm_config) and drafts:
            scheduled = {
                name: count
                for name, count in scheduler_output.num_scheduled_tokens.items()
                if drafts.get(name, [-1])[0] < 0
            }
            scheduler_output = replace(scheduler_output, num_scheduled_tokens=scheduled)
        return super().get_grammar_bitmask(scheduler_output)


class Scheduler(RulesScheduler):
    """Reserves a slot for each node that the draft model reads and for the token before them."""

    @property
    def num_lookahead_tokens(self) -> int:
        """KV slots behind the tokens the target computes.

        A step may put out one token more than it had rows for, which is the root of the next tree.
        """
        return 1 + ASKED_PER_NODE * int(self.vllm_config.speculative_config.num_speculative_tokens)

    @num_lookahead_tokens.setter
    def num_lookahead_tokens(self, value: int) -> None:
        """vLLM's constructor sets 0."""
