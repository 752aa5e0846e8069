# SPDX-License-Identifier: Apache-2.0
"""Sends what the worker has counted to the API server, with vLLM's statistics of each step."""

from __future__ import annotations

import functools
from typing import Any

from vllm_ext.engine import counters, metrics, step_extras


class Counts:
    """Takes counts from the worker's outputs, and hands them on in the step's ``SchedulerStats``."""

    log_stats: bool  # vLLM's
    _is_started = False

    @functools.cached_property
    def _counted(self) -> dict[str, float]:
        """By name, what no statistics have taken yet."""
        return {}

    def has_requests(self) -> bool:
        """vLLM's. The engine begins with a step of no request, which brings what its start has counted."""
        return (self.log_stats and not self._is_started) or super().has_requests()  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._is_started = True
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        counters.merge(self._counted, step_extras.of(model_runner_output).counted)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; None where it keeps no statistics."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None and self._counted:
            metrics.put(stats, self._counted)
            self._counted.clear()
        return stats
