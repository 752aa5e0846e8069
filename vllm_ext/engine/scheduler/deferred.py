# SPDX-License-Identifier: Apache-2.0
"""Deferred tokens: requests that get no token in a step in which vLLM gave them one, and ask again in the next.

The worker gives none where a rule waits for work beside the engine, or where of requests that need each other's logits
(`paired`, `lookahead`) not all have come to their next token: one still reads its prompt, or has been preempted. Here
such a request is put one token back. So they are in step whatever happens to either.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from vllm import outputs as vllm_outputs
from vllm.logger import init_logger
from vllm.v1.request import Request, RequestStatus

from vllm_ext.engine import step_extras

logger = init_logger("vllm.vllm_ext")


class DeferredTokens:
    """Puts requests back, and lets those run that others wait for. Its subclasses say who waits for whom."""

    # vLLM's.
    requests: dict[str, Any]
    running: list[Any]
    waiting: Any
    grammar_compile_error_reqs: Any
    max_model_len: int

    _deferred: Mapping[str, Any] = MappingProxyType({})  # by request of the step; None: a rule waits
    _held: Sequence[str] = ()  # requests that got no token in the last step
    _num_stuck = 0  # steps on end whose requests have all waited for others

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        # Their other halves may come with no drafts, or with others; V2's worker gives some to all.
        for name in self._held:
            if name in self.requests:
                self.requests[name].spec_token_ids = []
        if self._num_stuck:
            self._make_room()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's; requests of the engine's own put out nothing."""
        self._deferred = step_extras.of(model_runner_output).deferrals
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if self._is_needed:
            for of_client in outputs.values():
                of_client.outputs = [each for each in of_client.outputs if not self._takes(each)]
            self._put_back(scheduler_output.num_scheduled_tokens)
            self._end_orphans()
        else:
            self._num_stuck, self._held = 0, ()
        self._deferred = {}
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        finished = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        self._end_orphans()
        return finished

    @property
    def _is_needed(self) -> bool:
        """Whether any request waits, or another for it."""
        return bool(self._deferred)

    def _takes(self, output: Any) -> bool:
        """Whether vLLM's EngineCoreOutput is of a request of the engine's own; it is dealt with then."""
        return False

    def _waits(self, request_id: str) -> bool:
        """Whether a request may have got no token in this step."""
        return request_id in self._deferred

    def _awaited(self, request: Any) -> Any:
        """The request that a request waits for; None where it waits for none."""
        return None

    def _primary(self, request_id: str) -> str:
        """The user's request behind one."""
        return request_id

    def _end_orphans(self) -> None:
        """End requests of the engine's own that nobody waits for any more."""

    def _end(self, name: str) -> None:
        """End a request of the engine's own."""
        super().finish_requests(name, RequestStatus.FINISHED_ABORTED)  # type: ignore[misc]

    def _is_running(self, name: str) -> bool:
        request = self.requests.get(name)
        return request is not None and request.status == RequestStatus.RUNNING

    def _put_back(self, scheduled: Mapping[str, int]) -> None:
        """One token, each request of the step that waits and got none."""
        held = []
        for name in scheduled:
            if self._waits(name) and self._is_running(name):
                request = self.requests[name]
                # Else its last token is new, and not yet computed.
                if request.num_computed_tokens >= request.num_tokens:
                    request.num_computed_tokens = request.num_tokens - 1
                    held.append(name)
        self._held, stuck = held, 0 < len(held) == len(scheduled)
        self._num_stuck = self._num_stuck + 1 if stuck else 0

    def _make_room(self) -> None:
        """All that run wait for others that do not: let the first of them have the other, or end it."""
        awaited = {request: self._awaited(request) for request in self.running}
        alone = [
            request
            for request, other in awaited.items()
            if other is not None and other.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        ]
        if not alone:
            return
        first = min(alone, key=lambda request: (request.priority, request.arrival_time))
        if len(self.running) == 1 and self._num_stuck > 1:
            primary = self._primary(first.request_id)
            self._end_with_error(
                primary,
                f"request {primary} and what a rule has read beside it need more KV blocks at once than there are; it "
                "ends. Raise gpu_memory_utilization or kv_cache_memory_bytes, or lower max_model_len.",
            )
            return
        scheduler: Any = self
        for request in [each for each in self.running if each is not first]:
            self.running.remove(request)
            scheduler._preempt_request(request, time.monotonic())
            self.waiting.remove_request(request)
            self.waiting.add_request(request)
        self.waiting.remove_request(awaited[first])
        self.waiting.prepend_request(awaited[first])

    def _end_with_error(self, name: str, why: str) -> None:
        """End a request with this step, by vLLM's list of those: ids, or from 0.33 on errors by id."""
        logger.error("vllm-ext: %s", why)
        ended = self.grammar_compile_error_reqs
        if isinstance(ended, dict):
            ended[name] = vllm_outputs.RequestError(code="validation_error", message=why)
        else:
            ended.add(name)


def made_for(request: Any, name: str, tokens: Sequence[int], params: Any, **more: Any) -> Request:
    """A request of the engine's own, in the queue where the user's request is.

    Args:
        request: the user's, vLLM's Request.
        name: its id.
        tokens: its prompt.
        params: its SamplingParams.
        more: of vLLM's Request.
    """
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=params,
        pooling_params=None,
        client_index=request.client_index,
        arrival_time=request.arrival_time,
        lora_request=request.lora_request,
        cache_salt=request.cache_salt,
        priority=request.priority,
        block_hasher=request._block_hasher,
        **more,
    )
