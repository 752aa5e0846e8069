# SPDX-License-Identifier: Apache-2.0
"""Ends requests whose rule has failed (`engine.rule_faults`)."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from vllm_ext.engine import step_extras


class FaultyRequests:
    """A fault's request ends with an error, after its right tokens."""

    # vLLM's.
    requests: dict[str, Any]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's; what was sampled where a rule has failed is nobody's token."""
        faults = step_extras.of(model_runner_output).faults
        failed: dict[str, Any] = {}
        for name, (place, _) in faults.items():
            request = self.requests.get(name)
            if request is None or request.is_finished():
                continue
            failed[name] = request
            if (index := model_runner_output.req_id_to_index.get(name)) is not None:
                sampled = model_runner_output.sampled_token_ids[index]
                model_runner_output.sampled_token_ids[index] = sampled[
                    : max(place - request.num_output_tokens, 0)
                ]
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        left = [name for name, request in failed.items() if not request.is_finished()]
        if left:
            scheduler: Any = self
            scheduler.finish_requests(left, RequestStatus.FINISHED_ERROR)
        for name in left:
            request = failed[name]
            request.stop_reason = faults[name][1]
            of_client = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
            of_client.outputs.append(
                EngineCoreOutput(
                    request_id=name,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=request.stop_reason,
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )
        return outputs
