# SPDX-License-Identifier: Apache-2.0
"""Times the drafting inside a worker, for ``vllm-ext bench``."""

from __future__ import annotations

import time
from typing import Any


class DraftTimer:
    """A ``worker_extension_cls``: vLLM mixes it into every engine's worker, plain's included."""

    model_runner: Any  # the worker's

    def vllm_ext_bench_draft_seconds(self) -> float | None:
        """Seconds spent drafting since the last call; the first call starts the clock.

        On a GPU this is the host's time: a drafter that only launches kernels looks too cheap.

        Returns:
            None when the runner has no such step to time (vLLM's V2 runner).
        """
        clock: _Clock | None = getattr(self, "_vllm_ext_bench_clock", None)
        if clock is None:
            if not hasattr(self.model_runner, "propose_draft_token_ids"):
                return None
            clock = _Clock(self.model_runner)
            self._vllm_ext_bench_clock = clock
        return clock.take()


class _Clock:
    """Stands in for the runner's ``propose_draft_token_ids`` and adds up its time."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._propose = runner.propose_draft_token_ids
        self._proposing_s = 0.0
        self._taken_s = self._total_s()
        runner.propose_draft_token_ids = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return self._propose(*args, **kwargs)
        finally:
            self._proposing_s += time.perf_counter() - started

    def take(self) -> float:
        """Seconds since the last call."""
        total_s = self._total_s()
        taken_s, self._taken_s = self._taken_s, total_s
        return total_s - taken_s

    def _total_s(self) -> float:
        # Our runner reads the logits before sampling, outside the proposal.
        tap_s: float = getattr(self._runner, "vllm_ext_tap_seconds", 0.0)
        return self._proposing_s + tap_s
