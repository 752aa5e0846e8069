# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with twins of requests; see `vllm_ext.engine.paired_requests`.

vLLM schedules both like any two requests. Where only one of the two comes to its next token in a step, as the other one
still reads its prompt or has been preempted, the worker gives it none (`aux_logits.RuledRunner`), and here it is put
one token back, to ask again. So they are in step whatever happens to either.
"""

from __future__ import annotations

import time
from typing import Any

from vllm import SamplingParams
from vllm import outputs as vllm_outputs
from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler
from vllm.v1.request import Request, RequestStatus

from vllm_ext.engine import paired_requests

logger = init_logger("vllm.vllm_ext")


class TwinScheduler(StockScheduler):  # type: ignore[misc]  # vLLM is untyped to us
    """Adds twins, keeps them in step, and ends them with their owners."""

    # vLLM's.
    requests: dict[str, Any]
    running: list[Any]
    waiting: Any
    grammar_compile_error_reqs: Any
    max_model_len: int

    _num_stuck = 0  # steps on end whose requests have all waited for their other halves

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._twins: dict[str, str] = {}  # by owner's request id, the twin's
        self._owners: dict[str, str] = {}  # by twin's request id, the owner's

    def add_request(self, request: Any) -> None:
        """vLLM's; behind a request that is to have a twin comes the twin."""
        params = request.sampling_params
        given = None if params is None else (params.extra_args or {}).get(paired_requests.PROMPT)
        if given is None:
            super().add_request(request)
            return
        prompt, offsets = given
        name = f"{request.request_id}-twin"
        # The worker is to know that there is one, which it may see later.
        params.extra_args = {**params.extra_args, paired_requests.TWIN: name}
        del params.extra_args[paired_requests.PROMPT]
        super().add_request(request)
        # Its tokens are given to it. What it would draw itself is to cost the sampler nothing more than its owner's.
        own = SamplingParams(
            temperature=params.temperature,
            max_tokens=self.max_model_len,
            ignore_eos=True,
            detokenize=False,
            extra_args={paired_requests.OWNER: request.request_id},
        )
        twin = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=own,
            pooling_params=None,
            mm_features=paired_requests.features_of(request.mm_features, offsets),
            client_index=request.client_index,
            arrival_time=request.arrival_time,
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            priority=request.priority,
            block_hasher=request._block_hasher,
        )
        self._twins[request.request_id], self._owners[name] = name, request.request_id
        super().add_request(twin)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._num_stuck:
            self._make_room()
        return super().schedule(*args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's; of twins nothing is put out."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if not self._adds:
            self._num_stuck = 0
            return outputs
        for of_client in outputs.values():
            of_client.outputs = [each for each in of_client.outputs if each.request_id not in self._owners]
        num_held = 0
        for name in scheduler_output.num_scheduled_tokens:
            request = self._half(name)
            # Else its last token is new, and not yet computed.
            if request is not None and request.num_computed_tokens >= request.num_tokens:
                request.num_computed_tokens = request.num_tokens - 1
                num_held += 1
        stuck = 0 < num_held == len(scheduler_output.num_scheduled_tokens)
        self._num_stuck = self._num_stuck + 1 if stuck else 0
        self._end_orphans()
        return outputs

    @property
    def _adds(self) -> bool:
        """Whether there is any request that waits for another one."""
        return bool(self._twins)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        finished = super().finish_requests(request_ids, finished_status)
        self._end_orphans()
        return finished

    def _end_orphans(self) -> None:
        """End the twins of requests that are gone."""
        for owner in [name for name in self._twins if name not in self.requests]:
            twin = self._twins.pop(owner)
            self._end(twin)
            del self._owners[twin]
        # vLLM itself may end one, as where it has no room in the context that the owner still has.
        for owner in [owner for owner, twin in self._twins.items() if twin not in self.requests]:
            self._end_with_error(
                owner, f"request {owner}: what a rule has read beside it has ended before it; it ends too."
            )

    def _end(self, name: str) -> None:
        """End what nobody waits for any more."""
        super().finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _half(self, name: str) -> Any:
        """A running request that waits for another one, or another for it."""
        return self._running(name) if name in self._twins or name in self._owners else None

    def _running(self, name: str) -> Any:
        """A request, if it runs."""
        request = self.requests.get(name)
        return request if request is not None and request.status == RequestStatus.RUNNING else None

    def _make_room(self) -> None:
        """All that run wait for others that do not: let the first of them have its other half, or end it."""
        halves = {request: self._other(request) for request in self.running}
        alone = [
            request
            for request, other in halves.items()
            if other is not None and other.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        ]
        if not alone:
            return
        first = min(alone, key=lambda request: (request.priority, request.arrival_time))
        if len(self.running) == 1 and self._num_stuck > 1:
            owner = self._owners.get(first.request_id, first.request_id)
            self._end_with_error(
                owner,
                f"request {owner} and what a rule has read beside it need more KV blocks at once than there are; it "
                "ends. Raise gpu_memory_utilization or kv_cache_memory_bytes, or lower max_model_len.",
            )
            return
        for request in [each for each in self.running if each is not first]:
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
            self.waiting.remove_request(request)
            self.waiting.add_request(request)
        self.waiting.remove_request(halves[first])
        self.waiting.prepend_request(halves[first])

    def _end_with_error(self, name: str, why: str) -> None:
        """End a request with this step, by vLLM's list of those: ids, or from 0.33 on errors by id."""
        logger.error("vllm-ext: %s", why)
        ended = self.grammar_compile_error_reqs
        if isinstance(ended, dict):
            ended[name] = vllm_outputs.RequestError(code="validation_error", message=why)
        else:
            ended.add(name)

    def _other(self, request: Any) -> Any:
        """A request's other half; None where it has none."""
        name = request.request_id
        return self.requests.get(self._twins.get(name) or self._owners.get(name, ""))
