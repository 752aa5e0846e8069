# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with branches: requests that find out how the text of another would go on behind some token.

They are requests as any other, whose prompts are what the other has so far, and a token more: its cached blocks are
theirs too. Until all have ended the other one gets no token (`aux_logits.RuledRunner`) and asks again in each step;
then the worker is told which token it is. Nobody outside the engine hears of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from vllm.v1.request import Request

from vllm_ext.config import rules
from vllm_ext.data.model_files import ModelVocabulary
from vllm_ext.engine import paired_requests, sampling_params, step_extras
from vllm_ext.engine.v1.paired_scheduler import TwinScheduler
from vllm_ext.samplers.steering import Candidate, Pause, PausingRule


@dataclass
class _Branching:
    """A request that is paused."""

    at: int
    candidates: list[Candidate]
    behind: list[list[float]]  # by candidate
    running: dict[str, int] = field(default_factory=dict)  # of branches that have not ended, their candidate


class BranchScheduler(TwinScheduler):
    """Adds branches, and tells the worker what has come of them."""

    vllm_config: Any
    _pauses: Mapping[str, Pause | None] = MappingProxyType({})  # of the step; None: it waits, and comes again

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = rules.of_vllm_config(self.vllm_config)
        self._stops: list[int] = []  # tokens behind which no branch goes on
        if settings is not None and settings.pauses:
            loaded = rules.load(settings.as_json, ModelVocabulary.of(self.vllm_config.model_config))
            self._stops = [
                stop for rule in loaded.values() if isinstance(rule, PausingRule) for stop in rule.stops
            ]
        self._branching: dict[str, _Branching] = {}  # by request id
        self._trunks: dict[str, str] = {}  # by branch's request id, whose it is
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
        """vLLM's; of branches nothing is put out."""
        self._pauses = step_extras.of(model_runner_output).pauses
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._trunks:
            for of_client in outputs.values():
                for each in of_client.outputs:
                    if each.request_id in self._trunks:
                        self._take(each)
                of_client.outputs = [
                    each for each in of_client.outputs if each.request_id not in self._trunks
                ]
        for name, pause in self._pauses.items():
            request = self.requests.get(name)
            if (
                request is not None
                and pause is not None
                and not request.is_finished()
                and request.num_output_tokens == pause.at
                and name not in self._branching
                and name not in self._choices
            ):
                self._branch(request, pause)
        self._pauses = {}
        for name in [name for name in self._trunks if name not in self.requests]:
            del self._trunks[name]
        return outputs

    def _branch(self, request: Any, pause: Pause) -> None:
        """Add a branch for each candidate that there is something behind."""
        found = _Branching(pause.at, list(pause.candidates), [[] for _ in pause.candidates])
        self._branching[request.request_id] = found
        params = request.sampling_params
        ends = sampling_params.ends_of(params).union(self._stops)
        room = self.max_model_len - request.num_tokens - 1
        for index, candidate in enumerate(found.candidates):
            if candidate.token in ends or min(pause.lookahead, room) < 1:
                continue
            own = params.clone()
            own.max_tokens, own.min_tokens, own.logprobs = pause.lookahead, 0, 0
            own.stop_token_ids = sorted(end for end in ends if end is not None)
            own.prompt_logprobs = None
            own.extra_args = {paired_requests.TRUNK: request.request_id}
            name = f"{request.request_id}-branch-{pause.at}-{index}"
            branch = Request(
                request_id=name,
                prompt_token_ids=[*request.all_token_ids, candidate.token],
                sampling_params=own,
                pooling_params=None,
                client_index=request.client_index,
                arrival_time=request.arrival_time,
                lora_request=request.lora_request,
                cache_salt=request.cache_salt,
                priority=request.priority,
                block_hasher=request._block_hasher,
            )
            found.running[name] = index
            self._trunks[name] = request.request_id
            self.add_request(branch)
            # Before all that wait: somebody is waiting for it already.
            self.waiting.remove_request(branch)
            self.waiting.prepend_request(branch)
        self._num_stuck = 0
        self._choose(request.request_id)

    def _take(self, output: Any) -> None:
        """A branch has got some tokens, and may have ended."""
        trunk = self._trunks[output.request_id]
        found = self._branching.get(trunk)
        if found is None or output.request_id not in found.running:
            return
        if output.new_logprobs is not None:
            found.behind[found.running[output.request_id]] += output.new_logprobs.logprobs[:, 0].tolist()
        if output.finish_reason is not None:
            del found.running[output.request_id]
            self._choose(trunk)

    def _choose(self, trunk: str) -> None:
        """Where no branch runs any more, the token is known; of equal ones it is the likelier."""
        found = self._branching[trunk]
        if found.running:
            return
        del self._branching[trunk]
        scores = [PausingRule.score(*each) for each in zip(found.candidates, found.behind, strict=True)]
        self._choices[trunk] = found.at, found.candidates[scores.index(max(scores))].token

    @property
    def _adds(self) -> bool:
        return bool(self._pauses or self._branching or self._choices) or super()._adds

    def _half(self, name: str) -> Any:
        """Also a running request that waits for its branches."""
        if name in self._branching or name in self._pauses or name in self._choices:
            return self._running(name)
        return super()._half(name)

    def _other(self, request: Any) -> Any:
        """Also the first of a request's branches that does not run."""
        found = self._branching.get(request.request_id)
        if found is None:
            return super()._other(request)
        branches = [self.requests[name] for name in found.running if name in self.requests]
        return next((each for each in branches if self._running(each.request_id) is None), None)

    def _end_orphans(self) -> None:
        """End the branches of requests that are gone, too."""
        super()._end_orphans()
        for trunk in [name for name in self._branching if name not in self.requests]:
            for branch in self._branching.pop(trunk).running:
                self._end(branch)
        for trunk in [name for name in self._choices if name not in self.requests]:
            del self._choices[trunk]
