# SPDX-License-Identifier: Apache-2.0
"""Learned state over restarts of real engines: warm, lossless, and never in the way of a start."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from conftest import SHUTDOWN_SECONDS, engine
from helpers import assert_same_outputs, own_prompts
from vllm import SamplingParams

from vllm_ext.bench import local_server
from vllm_ext.demo import servers

pytestmark = pytest.mark.engine

# A fixed budget: how many steps it takes depends on no clock.
METHOD: dict[str, Any] = {"method": "hybrid", "num_speculative_tokens": 12, "budget": "fixed"}


def chat(llm: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=40)
    chats: Any = [[{"role": "user", "content": prompt}] for prompt in own_prompts()[:6]]
    outputs = llm.chat(chats, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def run(model: str, method: dict[str, Any], folder: Path) -> tuple[list[list[int]], dict[str, int]]:
    """Answers and counters of one engine, from its start to its end, which comes right behind its last answer."""
    engines = engine(model, {**method, "state_dir": str(folder)}, own_core=True)
    llm = next(engines)
    answers = chat(llm)
    (counters,) = llm.collective_rpc("vllm_ext_counters")
    started = time.monotonic()
    assert next(engines, None) is None
    assert time.monotonic() - started < SHUTDOWN_SECONDS
    return answers, counters


@pytest.mark.slow
def test_a_second_start_is_warm_and_lossless(
    model_dir: str,
    plain_llm: Any,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    tested_method: dict[str, Any],
) -> None:
    chosen = bool(request.config.getoption("--method"))
    method = tested_method if chosen else METHOD
    expected = chat(plain_llm)
    answers, cold = run(model_dir, method, tmp_path / "state")
    assert_same_outputs(expected, answers)
    (file,) = (tmp_path / "state").iterdir()
    answers, warm = run(model_dir, method, tmp_path / "state")
    assert_same_outputs(expected, answers)
    assert (cold["state_loads"], warm["state_loads"]) == (0, 1)
    assert (
        warm["state_set_aside"] == cold["fallbacks:proposer_error"] == warm["fallbacks:proposer_error"] == 0
    )
    assert warm["spec_emitted_tokens"] == cold["spec_emitted_tokens"]
    # The same answers again: most of their tokens are known. Some methods learn only how far to trust themselves.
    assert warm["spec_steps"] < cold["spec_steps"] * (1.1 if chosen else 0.6)
    assert [path.name for path in (tmp_path / "state").iterdir()] == [file.name]


@pytest.mark.parametrize("twice", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_server_saves_when_it_is_terminated(slice_dir: str, tmp_path: Path, twice: bool) -> None:
    """With vLLM's own shutdown timeout of 0, with which it kills its engines at once; in the middle of an answer.

    Found: saved within a second, then the processes freed their memory until they were killed.
    """
    method = {**METHOD, "state_dir": str(tmp_path)}
    prompt = "Name three colours."

    def serve() -> tuple[servers.Server, dict[str, float], str]:
        server = servers.Server("tested", slice_dir, "float32", method)
        with server:
            for _ in local_server.wait_until_ready([server]):
                pass
            *_, answer = server.stream(prompt, 40)
            assert isinstance(answer, servers.Answer)
            names = ("spec_steps", "state_loads")
            counted = {name: server.metric(f"vllm_ext:{name}_total") for name in names}
            in_flight = server.stream(prompt, 400)
            next(in_flight)
        return server, counted, answer.text

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "INFO")
        server, cold, text = serve()
        log = server.log.read_text()
        assert "aborting in-flight requests count=1" in log
        assert "all workers exited gracefully" in log
        assert "force killing" not in log
        assert cold["state_loads"] == 0
        (file,) = tmp_path.iterdir()
        if not twice:
            return
        server, warm, again = serve()
        assert again == text
        assert warm["state_loads"] == 1
        assert warm["spec_steps"] < cold["spec_steps"]
        assert f"loaded what was learnt from {file}" in server.log.read_text()
