# SPDX-License-Identifier: Apache-2.0
"""Returns with a request what its rules have noted of its tokens.

In ``kv_transfer_params``, the one field of vLLM's outputs that takes what a scheduler wants to say, and that its HTTP
answers have.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from vllm_ext.engine import step_extras
from vllm_ext.engine.scheduler.ruled import Ruled

REPORT = "vllm_ext"  # the key of what a request's rules have to say


class RuleReports(Ruled):
    """Adds up what rules note of tokens."""

    # vLLM's.
    requests: dict[str, Any]

    @functools.cached_property
    def _notes(self) -> dict[str, dict[int, float]]:
        """By request id, by place in the output: rows whose token is thrown away (a prompt's parts) are replaced."""
        return {}

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        for name, notes in step_extras.of(model_runner_output).notes.items():
            if name in self.requests:
                self._notes.setdefault(name, {}).update(notes)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; called when a request ends, in whatever way."""
        params, others = super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
        notes = self._notes.pop(request.request_id, None)
        if notes is not None:
            # A step may have drawn tokens behind the one that ended the request.
            total = sum(value for place, value in notes.items() if place < request.num_output_tokens)
            report = self._ruled.report_of(request.sampling_params)
            params = {**(params or {}), REPORT: {report: total if math.isfinite(total) else None}}
        return params, others
