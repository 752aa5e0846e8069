# SPDX-License-Identifier: Apache-2.0
"""Sampling rules as a logits processor of vLLM's V2 runner, without speculation and in the walk down a tree.

Rules are functions of a row's tokens, which here are on the device: a step with a request under a rule waits for them,
other steps do not, and none does for requests under `trie` alone (`trie_rows`). `rule_requests` says how vLLM comes by
the class. Rules that note, keep or read more than tokens and logits need more of the engine than a logits processor
has, and run on V1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from vllm_ext.config import rules
from vllm_ext.config.asked import asked_of
from vllm_ext.config.rules import Asking, RuleSettings
from vllm_ext.data.model_files import ModelVocabulary
from vllm_ext.engine import rule_faults, rule_requests
from vllm_ext.engine.rule_requests import Configured
from vllm_ext.engine.v2.trie_rows import TrieRows
from vllm_ext.samplers.base import Asked, Row
from vllm_ext.samplers.trie import TrieParams

if TYPE_CHECKING:
    from vllm_ext.engine.v2.speculators.base import TreeSpeculator


@dataclass(slots=True)
class _Request:
    """One that is under rules."""

    asking: list[Asking]
    asked: Asked
    end: int
    kept: dict[str, dict[int, Any]]  # by rule, see `Row.kept`
    faults: dict[int, str]  # see `Row.faults`
    prompt: list[int] | None = None  # None: not read yet
    output: list[int] | None = None  # what the host has read of it


class RuleProcessor(LogitsProcessor):  # type: ignore[misc]  # vLLM is untyped to us
    """The rules of one server; a subclass has their settings."""

    settings: ClassVar[RuleSettings]
    speculator: TreeSpeculator | None = None  # set by a runner that has one

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """HTTP 400 for what the rules refuse."""
        rule_requests.validate(cls.settings, sampling_params)

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._rules = rules.load(self.settings.as_json, ModelVocabulary.of(vllm_config.model_config))
        self._states = req_states
        # Ranks have different clocks, and must have the same rows.
        several = vllm_config.parallel_config.world_size > 1
        self._patience = None if several else rule_faults.SHORT_PATIENCE
        self._requests: dict[int, _Request] = {}  # by slot; none of those that are masked on the device
        self._tries = TrieRows.of(self._rules, req_states)

    def is_under(self, slot: int) -> bool:
        """Whether the request in a slot is under a rule on the host."""
        return slot in self._requests

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """See vLLM's; whether the request is under a rule."""
        self._requests.pop(req_idx, None)
        if self._tries is not None:
            self._tries.drop(req_idx)
        asking = self.settings.of_request(sampling_params)
        if not asking:
            return False
        first = asking[0][1]
        if self._tries is not None and len(asking) == 1 and isinstance(first, TrieParams):
            self._tries.put(req_idx, first.trie, sampling_params.eos_token_id)
            return True
        asked, end = asked_of(sampling_params), sampling_params.eos_token_id
        self._requests[req_idx] = _Request(asking, asked, end, {name: {} for name, _ in asking}, {})
        return True

    def apply_staged_writes(self) -> None:
        """See vLLM's."""
        if self._tries is not None:
            self._tries.apply_staged_writes()

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """See vLLM's: of a request under rules on the host its rows stand behind each other, a chain."""
        if self._tries is not None:
            paths = None if self.speculator is None else self.speculator.verifying
            self._tries.apply(logits, ctx, None if paths is None else paths.bits)
        slots = [slot for slot in ctx.idx_mapping_np.tolist() if slot in self._requests]
        if not slots:
            return logits
        self._read(slots)
        row_slots, offsets = ctx.expanded_idx_mapping.tolist(), ctx.expanded_local_pos.tolist()
        tokens = ctx.input_ids.tolist()
        found: dict[str, dict[int, Row]] = {name: {} for name in self._rules}
        failing: dict[int, Row] = {}
        for index, (slot, offset) in enumerate(zip(row_slots, offsets, strict=True)):
            if (request := self._requests.get(slot)) is None:
                continue
            assert request.prompt is not None
            assert request.output is not None
            # The first row's token is the last one of the output; those behind it are drafts.
            drafts = tokens[index - offset + 1 : index + 1]
            if min(drafts, default=0) < 0:
                continue  # behind the end of a path: nobody takes what is drawn there
            output = request.output + drafts
            for name, its in request.asking:
                kept, faults = request.kept[name], request.faults
                row = Row(request.prompt, output, request.end, its, request.asked, kept=kept, faults=faults)
                found[name][index] = failing[index] = row
        for name, all_rows in found.items():
            rows = {index: row for index, row in all_rows.items() if not row.faults}
            if rows:
                place = torch.tensor(list(rows), device=logits.device)
                part = logits[place]
                self._rules[name].patience = self._patience
                late = rule_faults.apply(name, self._rules[name], part, list(rows.values()))
                rule_faults.wait_no_longer(name, list(rows.values()), late)
                logits[place] = part
        # Of a request's rows those before the first fault have been drawn from, and are right.
        rule_faults.end(
            logits,
            {index: row for index, row in failing.items() if min(row.faults, default=0) <= len(row.output)},
        )
        return logits

    def take_faults(self, slots: Mapping[str, int]) -> dict[str, tuple[int, str]]:
        """What rules have raised for some requests, by request id: a place in the output, and the reason.

        Args:
            slots: by request id.
        """
        if not any(request.faults for request in self._requests.values()):
            return {}
        found = {name: self._requests[slot].faults for name, slot in slots.items() if slot in self._requests}
        return {name: fault for name, faults in found.items() for fault in faults.items()}

    def _read(self, slots: list[int]) -> None:
        """Catch up with the requests' tokens."""
        lengths = self._states.total_len.gpu[slots].tolist()
        for slot, length in zip(slots, lengths, strict=True):
            request, text = self._requests[slot], self._states.all_token_ids.gpu[slot]
            start = int(self._states.prompt_len.np[slot])
            if request.prompt is None or request.output is None:
                request.prompt, request.output = text[:start].tolist(), []
            request.output += text[start + len(request.output) : length].tolist()


configured = Configured(RuleProcessor)
