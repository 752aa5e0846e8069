# SPDX-License-Identifier: Apache-2.0
"""What the bench times inside a worker."""

from __future__ import annotations

import pytest

from vllm_ext.bench.draft_timer import DraftTimer


class Runner:
    vllm_ext_tap_seconds = 1.0

    def propose_draft_token_ids(self, value: int, *, twice: bool) -> int:
        self.vllm_ext_tap_seconds += 2.0
        return 2 * value if twice else value


def test_draft_timer() -> None:
    timer = DraftTimer()
    timer.model_runner = Runner()
    assert timer.vllm_ext_bench_draft_seconds() == 0.0
    assert timer.model_runner.propose_draft_token_ids(3, twice=True) == 6
    assert timer.vllm_ext_bench_draft_seconds() == pytest.approx(2.0, abs=0.1)
    assert timer.vllm_ext_bench_draft_seconds() == 0.0


def test_draft_timer_without_a_step_to_time() -> None:
    timer = DraftTimer()
    timer.model_runner = object()
    assert timer.vllm_ext_bench_draft_seconds() is None
