# SPDX-License-Identifier: Apache-2.0
"""Sampling rules as a logits processor of vLLM's V2 runner, without speculation and in the walk down a tree.

Most rules are functions of a row's tokens, which here are on the device: a step with a request under such a rule waits
for them, other steps do not, and none does for requests under `trie` alone (`trie_rows`). Rules that read no tokens
are applied to all rows of a tree at once, beside what `steering_runner` has kept of the step. `rule_requests` says how
vLLM comes by the class. Tokens that rules put off are taken back when they have been sampled (`step_deferrals`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from vllm_ext.config import rules
from vllm_ext.config.asked import asked_of
from vllm_ext.config.rules import Asking, RuleSettings
from vllm_ext.data.model_files import ModelVocabulary
from vllm_ext.engine import paired_requests, rule_faults, rule_requests
from vllm_ext.engine.recurrent.device_rows import to_device
from vllm_ext.engine.rule_requests import Configured
from vllm_ext.engine.steering.step_deferrals import StepDeferrals
from vllm_ext.engine.v2.trie_rows import TrieRows
from vllm_ext.samplers.base import Asked, Row
from vllm_ext.samplers.steering import CompanionOptions, Deferral, SteeringRule
from vllm_ext.samplers.trie import TrieParams

if TYPE_CHECKING:
    from vllm_ext.engine.steering.aux_logits import StepAuxLogits
    from vllm_ext.engine.v2.speculators.base import TreeSpeculator


@dataclass(slots=True)
class _Request:
    """One that is under rules."""

    reads_tokens: bool  # whether one of them does
    asking: list[Asking]
    asked: Asked
    end: int
    kept: dict[str, dict[int, Any]]  # by rule, see `Row.kept`
    faults: dict[int, str]  # see `Row.faults`
    notes: dict[int, float]  # see `Row.notes`
    prompt: list[int] | None = None  # None: not read yet
    output: list[int] | None = None  # what the host has read of it


class Unread(Sequence[int]):
    """Tokens of a request that are read when somebody asks for one, which waits for the device.

    Args:
        read: gives all of them.
    """

    def __init__(self, read: Callable[[], list[int]]) -> None:
        self._read = read

    def __len__(self) -> int:
        return len(self._read())

    def __getitem__(self, place: Any) -> Any:
        return self._read()[place]


class RuleProcessor(LogitsProcessor):  # type: ignore[misc]  # vLLM is untyped to us
    """The rules of one server; a subclass has their settings."""

    settings: ClassVar[RuleSettings]
    speculator: TreeSpeculator | None = None  # set by a runner that has one
    aux_logits: StepAuxLogits | None = None  # set by the runner where rules steer

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """HTTP 400 for what the rules refuse."""
        rule_requests.validate(cls.settings, sampling_params)

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._rules = rules.load(self.settings.as_json, ModelVocabulary.of(vllm_config.model_config))
        self._states = req_states
        self._patience = rule_faults.patience_of(vllm_config)
        self.deferrals = StepDeferrals()
        self._requests: dict[int, _Request] = {}  # by slot; none of those that are masked on the device
        self._tries = TrieRows.of(self._rules, req_states)
        # Slots of pairs that a second model is to read along with their primaries.
        self._pairs: set[int] = set()
        paired = [self.settings.options[name] for name in self.settings.paired_rules]
        self._pairs_are_read = any(isinstance(options, CompanionOptions) for options in paired)

    def is_under(self, slot: int) -> bool:
        """Whether the request in a slot is under a rule that reads its tokens, on the host."""
        request = self._requests.get(slot)
        return request is not None and request.reads_tokens

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """See vLLM's; whether the request is under a rule."""
        self._requests.pop(req_idx, None)
        self._pairs.discard(req_idx)
        if self._pairs_are_read and paired_requests.primary_of(sampling_params) is not None:
            self._pairs.add(req_idx)
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
        reads = any(self._rules[name].reads_tokens for name, _ in asking)
        kept: dict[str, dict[int, Any]] = {name: {} for name, _ in asking}
        self._requests[req_idx] = _Request(reads, asking, asked, end, kept, {}, {})
        return True

    def apply_staged_writes(self) -> None:
        """See vLLM's."""
        if self._tries is not None:
            self._tries.apply_staged_writes()

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """See vLLM's: of a request one of whose rules reads tokens, its rows stand behind each other, a chain."""
        called = None if self.speculator is None else self.speculator.called
        if self._tries is not None:
            paths = None if self.speculator is None else self.speculator.verifying
            self._tries.apply(logits, ctx, None if paths is None else paths.bits)
        slots = ctx.idx_mapping_np.tolist()
        if self._requests.keys().isdisjoint(slots):
            return logits
        if self.aux_logits is not None:
            self.aux_logits.call(None if called is None else _index(called.rows, logits.device))
        tokens: list[int] = []
        if reading := [slot for slot in slots if self.is_under(slot)]:
            self._read(reading)
            tokens = ctx.input_ids.tolist()
        found: dict[str, dict[int, Row]] = {name: {} for name in self._rules}
        failing: dict[int, Row] = {}
        slot_of: dict[int, int] = {}
        first = 0
        for slot, count in zip(slots, [1] * len(slots) if called is None else called.counts, strict=True):
            request = self._requests.get(slot)
            if request is not None and slot not in self.deferrals.unread:
                # Of chains the rows before the last have been drawn from.
                chained = called is not None and called.chains
                for index in range(first + (count - 1) * chained, first + count):
                    slot_of[index] = slot
                    # The first row's token is the last one of the output; those behind it are drafts.
                    drafts = tokens[first + 1 : index + 1]
                    if min(drafts, default=0) < 0:
                        break  # behind the end of a path: nobody takes what is drawn there
                    for name, row in self._rows(slot, request, drafts):
                        found[name][index] = failing[index] = row
            first += count
        assert first == len(logits)
        for name, all_rows in found.items():
            rows = {index: row for index, row in all_rows.items() if not row.faults}
            if rows:
                put_off = self._apply(name, logits, rows)
                self.deferrals.found |= {slot_of[index]: deferral for index, deferral in put_off.items()}
        # Of a request's rows those before the first fault have been drawn from, and are right.
        rule_faults.end(
            logits,
            {i: row for i, row in failing.items() if row.faults and min(row.faults) <= len(row.output)},
        )
        return logits

    def _rows(self, slot: int, request: _Request, drafts: list[int]) -> Iterator[tuple[str, Row]]:
        """A row of a request's for each of its rules, behind some drafts where one of them reads tokens."""
        prompt: Sequence[int] = Unread(lambda: self._text(slot).prompt or [])
        output: Sequence[int] = Unread(lambda: self._text(slot).output or [])
        if request.reads_tokens:
            assert request.prompt is not None
            assert request.output is not None
            prompt, output = request.prompt, request.output + drafts
        for name, its in request.asking:
            yield (
                name,
                Row(
                    prompt,
                    output,
                    request.end,
                    its,
                    request.asked,
                    kept=request.kept[name],
                    faults=request.faults,
                    notes=request.notes,
                ),
            )

    def _apply(self, name: str, logits: torch.Tensor, rows: Mapping[int, Row]) -> dict[int, Deferral | None]:
        """Apply a rule to some rows, by index, in place; those whose token it puts off."""
        rule, places = self._rules[name], list(rows)
        aux_logits = self.aux_logits if isinstance(rule, SteeringRule) else None
        if aux_logits is not None:
            rule.aux_logits = aux_logits  # type: ignore[attr-defined]
            aux_logits.rows_are(places)
        index = to_device(places, torch.int64, logits.device)
        part = logits[index]
        rule.patience = self._patience

        def at(some: Sequence[int]) -> None:
            if aux_logits is not None:
                aux_logits.rows_are([places[row] for row in some])

        put_off = rule_faults.apply(name, rule, part, list(rows.values()), at)
        logits[index] = part
        if self._patience == rule_faults.SHORT_PATIENCE:
            put_off = rule_faults.wait_no_longer(name, list(rows.values()), put_off)
        return {places[row]: deferral for row, deferral in put_off.items()}

    def keep(self, slot: int, kept: dict[str, dict[int, Any]]) -> None:
        """Go on with what was kept of the request in a slot, by rule, and keep what comes there; see `Row.kept`."""
        if (request := self._requests.get(slot)) is not None:
            for name, its in request.kept.items():
                request.kept[name] = kept.setdefault(name, its)

    def reads_companion(self, slots: Iterable[int]) -> bool:
        """Whether a request in one of these slots is under a rule that reads the second model, or the pair of one."""
        return any(
            slot in self._pairs
            or any(
                isinstance(self.settings.options[name], CompanionOptions)
                for name, _ in (self._requests[slot].asking if slot in self._requests else ())
            )
            for slot in slots
        )

    def take_notes(self, slots: Mapping[str, int]) -> dict[str, dict[int, float]]:
        """What rules have noted of tokens since the last call, by request id; see `Row.notes`.

        Args:
            slots: by request id.
        """
        if not self.settings.reports:
            return {}
        found = {}
        for name, slot in slots.items():
            if slot in self._requests and (notes := self._requests[slot].notes):
                found[name], self._requests[slot].notes = notes, {}
        return found

    def take_faults(self, slots: Mapping[str, int]) -> dict[str, tuple[int, str]]:
        """What rules have raised for some requests, by request id: a place in the output, and the reason.

        Args:
            slots: by request id.
        """
        if not any(request.faults for request in self._requests.values()):
            return {}
        found = {name: self._requests[slot].faults for name, slot in slots.items() if slot in self._requests}
        return {name: fault for name, faults in found.items() for fault in faults.items()}

    def _text(self, slot: int) -> _Request:
        """A request, whose tokens have been read by now; waits for them."""
        self._read([slot])
        return self._requests[slot]

    def _read(self, slots: list[int]) -> None:
        """Catch up with the requests' tokens."""
        lengths = self._states.total_len.gpu[slots].tolist()
        for slot, length in zip(slots, lengths, strict=True):
            request, text = self._requests[slot], self._states.all_token_ids.gpu[slot]
            start = int(self._states.prompt_len.np[slot])
            if request.prompt is None or request.output is None:
                request.prompt, request.output = text[:start].tolist(), []
            request.output += text[start + len(request.output) : length].tolist()


def _index(rows: slice | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Rows as int64."""
    return torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, slice) else rows


configured = Configured(RuleProcessor)
