# SPDX-License-Identifier: Apache-2.0
"""Engines of one process, of both runners, with KV methods and without: each has the attention that it asks for."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import V2_METHOD, v2_engine
from helpers import assert_same_outputs
from v2_requests import generate, sampling, tokens

pytestmark = [pytest.mark.v2, pytest.mark.quick]
OPTIONS: dict[str, Any] = {"logits_processors": None, "reasoning_config": None}
KIVI = {"method": "kivi", "group_size": 32}
SNAPKV = {"method": "snapkv", "budget": 96, "window": 32, "watched": 8}
PLAIN, TREE, ENCODED = "CPUAttentionBackendImpl", "TreeCPUAttentionImpl", "EncodedCPUAttentionImpl"
TEXT = [*range(100, 120)] * 8


def test_engines_of_one_process_have_their_own(
    v2_dir: str, v2_plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: a plain engine behind one with a KV method ended with an AssertionError."""
    from vllm import envs

    engines: list[tuple[str, Any, Any, str]] = [
        ("0", None, KIVI, ENCODED),
        ("1", None, None, PLAIN),
        ("0", None, SNAPKV, ENCODED),
        ("1", None, SNAPKV, TREE),
        ("0", None, None, PLAIN),
        ("1", V2_METHOD, None, TREE),
        ("1", None, None, PLAIN),
        ("0", None, KIVI, ENCODED),
    ]
    answers = []
    for on_v2, method, kv, impl in engines:
        envs.disable_envs_cache()
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", on_v2)
        llm = v2_engine(v2_dir, method, additional_config={"vllm_ext": {"kv": kv}} if kv else {}, **OPTIONS)
        config = llm.llm_engine.vllm_config
        assert config.use_v2_model_runner == (on_v2 == "1")
        layers = config.compilation_config.static_forward_context.values()
        assert {type(layer.impl).__name__ for layer in layers} == {impl}
        answers.append(tokens(generate(llm, [TEXT], [sampling(max_tokens=6)])))
    expected = tokens(generate(v2_plain, [TEXT], [sampling(max_tokens=6)]))
    for place in (1, 4, 5, 6):
        assert_same_outputs(expected, answers[place])
    assert_same_outputs(answers[2], answers[3])
    assert_same_outputs(answers[0], answers[7])


@pytest.fixture(autouse=True)
def v2_again() -> Any:
    """Engines after it are V2's again."""
    from vllm import envs

    yield
    envs.disable_envs_cache()
