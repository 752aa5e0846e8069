# SPDX-License-Identifier: Apache-2.0
"""What a drafter learns on V2 is there again at the next start, and changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import V2_HOST_METHOD, V2_METHOD, v2_engine
from helpers import assert_same_outputs
from v2_requests import counters, generate, prompts, sampling, tokens

pytestmark = pytest.mark.v2


@pytest.mark.parametrize("method", [V2_METHOD, V2_HOST_METHOD], ids=["device", "host"])
def test_a_second_start_is_warm_and_lossless(
    v2_dir: str, v2_plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any]
) -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    # An engine that goes takes the process groups of the others with it: only what is ours is shut down.
    monkeypatch.setattr(CPUWorker, "shutdown", lambda _: None)
    texts, params = prompts(3, seed=23), sampling(max_tokens=16)
    expected = tokens(generate(v2_plain, texts, params))
    accepted = []
    for start in range(2):
        llm = v2_engine(v2_dir, {**method, "state_dir": str(tmp_path)})
        assert_same_outputs(expected, tokens(generate(llm, texts, params)))
        totals = counters(llm)
        assert totals["state_loads"] == start
        assert totals["fallbacks:proposer_error"] == totals["state_set_aside"] == 0
        accepted.append(totals["spec_accepted_tokens"])
        llm.llm_engine.model_executor.driver_worker.worker.shutdown()
        assert len(list(tmp_path.iterdir())) == 1
    assert accepted[1] > accepted[0]
