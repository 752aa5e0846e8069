# SPDX-License-Identifier: Apache-2.0
"""vLLM's registry of attention backends has ours only while an engine of ours starts."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_ext import plugin
from vllm_ext.engine import backend_overrides
from vllm_ext.engine.attention import tree_backend, v2_backends
from vllm_ext.engine.kv_cache import encoded_cache
from vllm_ext.engine.worker_part import WorkerPart

CPU = AttentionBackendEnum.CPU_ATTN
THEIRS = "some.other.Backend"


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    backend_overrides.clear()
    yield
    backend_overrides.clear()
    for backend in AttentionBackendEnum:
        backend.clear_override()


def chosen() -> str:
    """The path that vLLM would give a layer."""
    return str(CPU.get_path())


def configure() -> None:
    """As a plain engine does."""
    args = SimpleNamespace(speculative_config=None, additional_config=None)
    assert plugin._create_engine_config(lambda *_: "configured", args) == "configured"


@pytest.mark.parametrize("first", [tree_backend, v2_backends, encoded_cache])
@pytest.mark.parametrize("second", [tree_backend, v2_backends, encoded_cache])
def test_each_engine_has_the_backend_that_it_registers(
    first: Any, second: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever one before it registered and did not live to take back."""
    cleared = []
    monkeypatch.setattr(
        selector, "_cached_get_attn_backend", SimpleNamespace(cache_clear=lambda: cleared.append(chosen()))
    )
    own = chosen()
    second.register()
    wanted = {backend: backend.get_path() for backend in AttentionBackendEnum if backend.is_overridden()}
    configure()
    first.register()
    configure()
    assert chosen() == own
    assert not any(backend.is_overridden() for backend in AttentionBackendEnum)
    second.register()
    assert {each: each.get_path() for each in AttentionBackendEnum if each.is_overridden()} == wanted
    # What vLLM has chosen is forgotten each time that the registry has changed, after it has.
    assert cleared == [wanted[CPU], own, cleared[2], own, wanted[CPU]]
    assert cleared[2].startswith("vllm_ext.")


def test_an_engine_that_has_started_leaves_nothing() -> None:
    class Worker:
        vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(rank=1))

        def compile_or_warm_up_model(self) -> str:
            assert chosen().startswith("vllm_ext.")
            return "times"

    own = chosen()
    tree_backend.register()
    started: Any = type("Started", (WorkerPart, Worker), {"HOOKS": ()})()
    assert started.compile_or_warm_up_model() == "times"
    assert chosen() == own


def test_what_others_have_registered_comes_back() -> None:
    register_backend(CPU, THEIRS)
    for _ in range(2):
        tree_backend.register()
    encoded_cache.register()
    backend_overrides.clear()
    assert chosen() == THEIRS
    backend_overrides.clear()
    assert chosen() == THEIRS


def test_what_others_register_later_stays() -> None:
    tree_backend.register()
    register_backend(CPU, THEIRS)
    backend_overrides.clear()
    assert chosen() == THEIRS
    assert not AttentionBackendEnum.FLASH_ATTN.is_overridden()
