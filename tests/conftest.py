# SPDX-License-Identifier: Apache-2.0
"""Session fixtures: an engine takes half a minute to start, so tests share a few."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import MAX_MODEL_LEN

# Read by vLLM when it is imported and inherited by every engine the tests start.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

ENGINE_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "disable_log_stats": False,
}


@pytest.fixture(scope="session")
def model_dir() -> str:
    """The embedded model, unpacked for real when the cache does not hold it."""
    from vllm_ext import demo_model

    return str(demo_model.ensure_model())


@pytest.fixture(scope="session")
def plain_llm(model_dir: str) -> Iterator[Any]:
    """A float32 engine without speculation: the reference of every comparison."""
    from vllm import LLM

    llm = LLM(model_dir, **ENGINE_OPTIONS)
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session")
def recycling_llm(model_dir: str) -> Iterator[Any]:
    """A float32 engine with Token Recycling."""
    from vllm import LLM

    # A fixed budget: the outcome of a test depends on no clock, and every tree is verified whole.
    method = {"method": "token_recycling", "num_speculative_tokens": 12, "budget": "fixed"}
    llm = LLM(model_dir, speculative_config=method, **ENGINE_OPTIONS)
    yield llm
    llm.llm_engine.engine_core.shutdown()
