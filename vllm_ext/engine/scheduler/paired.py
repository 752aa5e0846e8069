# SPDX-License-Identifier: Apache-2.0
"""Paired requests: the same answer behind another prompt; see `vllm_ext.engine.paired_requests`.

vLLM schedules both like any two requests; `deferred` keeps them in step.
"""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams

from vllm_ext.engine import paired_requests
from vllm_ext.engine.scheduler.deferred import DeferredTokens, made_for


class PairedRequests(DeferredTokens):
    """Adds the pairs of requests, and ends them with their primaries."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pairs: dict[str, str] = {}  # by primary's request id, the pair's
        self._primaries: dict[str, str] = {}  # by pair's request id, the primary's

    def add_request(self, request: Any) -> None:
        """vLLM's; behind a request that is to have a pair comes the pair."""
        stock: Any = super()
        params = request.sampling_params
        given = None if params is None else (params.extra_args or {}).get(paired_requests.PROMPT)
        if given is None:
            stock.add_request(request)
            return
        prompt, offsets = given
        name = f"{request.request_id}-pair"
        # The worker is to know that there is one, which it may see later.
        params.extra_args = {**params.extra_args, paired_requests.PAIR: name}
        del params.extra_args[paired_requests.PROMPT]
        stock.add_request(request)
        # Its tokens are given to it. What it would draw itself is to cost the sampler no more than its primary's.
        own = SamplingParams(
            temperature=params.temperature,
            max_tokens=self.max_model_len,
            ignore_eos=True,
            detokenize=False,
            extra_args={paired_requests.PRIMARY: request.request_id},
        )
        features = paired_requests.features_of(request.mm_features, offsets)
        pair = made_for(request, name, prompt, own, mm_features=features)
        self._pairs[request.request_id], self._primaries[name] = name, request.request_id
        stock.add_request(pair)

    @property
    def _is_needed(self) -> bool:
        return bool(self._pairs) or super()._is_needed

    def _takes(self, output: Any) -> bool:
        return output.request_id in self._primaries or super()._takes(output)

    def _waits(self, request_id: str) -> bool:
        return request_id in self._pairs or request_id in self._primaries or super()._waits(request_id)

    def _awaited(self, request: Any) -> Any:
        """A request's other half."""
        name = request.request_id
        return self.requests.get(self._pairs.get(name) or self._primaries.get(name, ""))

    def _primary(self, request_id: str) -> str:
        return self._primaries.get(request_id, request_id)

    def _end_orphans(self) -> None:
        """End the pairs of requests that are gone."""
        super()._end_orphans()
        for primary in [name for name in self._pairs if name not in self.requests]:
            pair = self._pairs.pop(primary)
            self._end(pair)
            del self._primaries[pair]
        # vLLM itself may end one, as where it has no room in the context that the primary still has.
        for primary in [primary for primary, pair in self._pairs.items() if pair not in self.requests]:
            self._end_with_error(
                primary,
                f"request {primary}: what a rule has read beside it has ended before it; it ends too.",
            )
