# SPDX-License-Identifier: Apache-2.0
"""Lookahead requests: how the text of another request would go on behind some token.

They are requests as any other, whose prompts are what the other has so far, and a token more: its cached blocks are
theirs too. Until all have ended the other one's token is deferred, and it asks again in each step (`deferred`); then
the worker is told which token it is. Nobody outside the engine hears of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_ext.config import rules
from vllm_ext.data.model_files import ModelVocabulary
from vllm_ext.engine import paired_requests, sampling_params, step_extras
from vllm_ext.engine.scheduler.deferred import DeferredTokens, made_for
from vllm_ext.engine.scheduler.ruled import Ruled
from vllm_ext.samplers.steering import Candidate, Deferral, LookaheadRule


@dataclass
class _Lookahead:
    """A request whose token is deferred."""

    at: int
    candidates: list[Candidate]
    behind: list[list[float]]  # by candidate
    running: dict[str, int] = field(default_factory=dict)  # of requests that have not ended, their candidate


class LookaheadRequests(Ruled, DeferredTokens):
    """Adds them, and tells the worker what has come of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        loaded = rules.load(self._ruled.as_json, ModelVocabulary.of(self.vllm_config.model_config))
        # Tokens behind which none goes on.
        self._stops = [
            stop for rule in loaded.values() if isinstance(rule, LookaheadRule) for stop in rule.stops
        ]
        self._lookaheads: dict[str, _Lookahead] = {}  # by request id
        self._trunks: dict[str, str] = {}  # by lookahead request's id, whose it is
        self._choices: dict[str, tuple[int, int]] = {}  # by request id, what the worker is to be told

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        if self._choices:
            told = {
                name: self._choices.pop(name) for name in output.num_scheduled_tokens if name in self._choices
            }
            step_extras.set_of(output).choices = told
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for name, deferral in step_extras.of(model_runner_output).deferrals.items():
            request = self.requests.get(name)
            if (
                request is not None
                and deferral is not None
                and not request.is_finished()
                and request.num_output_tokens == deferral.at
                and name not in self._lookaheads
                and name not in self._choices
            ):
                self._look_ahead(request, deferral)
        for name in [name for name in self._trunks if name not in self.requests]:
            del self._trunks[name]
        return outputs

    def _look_ahead(self, request: Any, deferral: Deferral) -> None:
        """Add a request for each candidate that there is something behind."""
        found = _Lookahead(deferral.at, list(deferral.candidates), [[] for _ in deferral.candidates])
        self._lookaheads[request.request_id] = found
        scheduler: Any = self
        params = request.sampling_params
        ends = sampling_params.ends_of(params).union(self._stops)
        room = self.max_model_len - request.num_tokens - 1
        for index, candidate in enumerate(found.candidates):
            if candidate.token in ends or min(deferral.lookahead, room) < 1:
                continue
            own = params.clone()
            own.max_tokens, own.min_tokens, own.logprobs = deferral.lookahead, 0, 0
            own.stop_token_ids = sorted(end for end in ends if end is not None)
            own.prompt_logprobs = None
            own.extra_args = {paired_requests.TRUNK: request.request_id}
            name = f"{request.request_id}-ahead-{deferral.at}-{index}"
            ahead = made_for(request, name, [*request.all_token_ids, candidate.token], own)
            found.running[name] = index
            self._trunks[name] = request.request_id
            scheduler.add_request(ahead)
            # Before all that wait: somebody is waiting for it already.
            self.waiting.remove_request(ahead)
            self.waiting.prepend_request(ahead)
        self._num_stuck = 0
        self._choose(request.request_id)

    @property
    def _is_needed(self) -> bool:
        return bool(self._lookaheads or self._choices or self._trunks) or super()._is_needed

    def _takes(self, output: Any) -> bool:
        trunk = self._trunks.get(output.request_id)
        if trunk is None:
            return super()._takes(output)
        found = self._lookaheads.get(trunk)
        if found is not None and output.request_id in found.running:
            if output.new_logprobs is not None:
                values = output.new_logprobs.logprobs[:, 0].tolist()
                found.behind[found.running[output.request_id]] += values
            if output.finish_reason is not None:
                del found.running[output.request_id]
                self._choose(trunk)
        return True

    def _choose(self, trunk: str) -> None:
        """Where no lookahead request runs any more, the token is known; of equal ones it is the likelier."""
        found = self._lookaheads[trunk]
        if found.running:
            return
        del self._lookaheads[trunk]
        scores = [LookaheadRule.score(*each) for each in zip(found.candidates, found.behind, strict=True)]
        self._choices[trunk] = found.at, found.candidates[scores.index(max(scores))].token

    def _waits(self, request_id: str) -> bool:
        return request_id in self._lookaheads or request_id in self._choices or super()._waits(request_id)

    def _awaited(self, request: Any) -> Any:
        """The first of a request's lookahead requests that does not run."""
        found = self._lookaheads.get(request.request_id)
        if found is None:
            return super()._awaited(request)
        ahead = [name for name in found.running if name in self.requests]
        return next((self.requests[name] for name in ahead if not self._is_running(name)), None)

    def _end_orphans(self) -> None:
        """End the lookahead requests of requests that are gone."""
        super()._end_orphans()
        for trunk in [name for name in self._lookaheads if name not in self.requests]:
            for ahead in self._lookaheads.pop(trunk).running:
                self._end(ahead)
        for trunk in [name for name in self._choices if name not in self.requests]:
            del self._choices[trunk]
