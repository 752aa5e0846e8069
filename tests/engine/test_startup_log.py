# SPDX-License-Identifier: Apache-2.0
"""The log at start-up: a closing line, and none of vLLM's warnings that do not hold with our methods."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import envs, logger
from vllm.engine.arg_utils import EngineArgs

from vllm_ext import plugin
from vllm_ext.engine import startup_log
from vllm_ext.engine.startup_log import CUSTOM_CLASS, CUSTOM_SCHEDULER, MIN_P, Started, without


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What gets past loggers' filters. vLLM takes handlers away when it configures its log."""
    lines: list[str] = []
    monkeypatch.setattr(
        logging.Logger, "callHandlers", lambda self, record: lines.append(record.getMessage())
    )
    return lines


def test_our_environment_variables_are_known(
    monkeypatch: pytest.MonkeyPatch, log: list[str], slice_dir: str
) -> None:
    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    monkeypatch.setenv("VLLM_EXT_CACHE", "/somewhere")
    monkeypatch.setenv("VLLM_SOMEBODY_ELSES", "1")
    plugin.register()
    args = EngineArgs(model=slice_dir, dtype="float32", max_model_len=256)
    args.create_engine_config()
    unknown = [line for line in log if "Unknown vLLM environment variable" in line]
    assert [line.rpartition(" ")[2] for line in unknown] == ["VLLM_SOMEBODY_ELSES"]
    monkeypatch.delenv("VLLM_SOMEBODY_ELSES")
    args.fail_on_environ_validation = True
    args.create_engine_config()
    # Where our files are is no reason to compile a model again.
    assert envs.compile_factors()["VLLM_EXT_CACHE"] is None


def test_the_warning_of_a_custom_proposer_is_left_out_of_ours_alone(log: list[str], slice_dir: str) -> None:
    def configured(**method: Any) -> None:
        logger._print_warning_once.cache_clear()  # vLLM says it once
        args = EngineArgs(model=slice_dir, dtype="float32", max_model_len=256, speculative_config=method)
        args.create_engine_config()

    configured(method="token_recycling")
    assert not [line for line in log if CUSTOM_CLASS[1] in line]
    configured(method="custom_class", model="somebody.elses.Drafter", num_speculative_tokens=2)
    assert [line for line in log if CUSTOM_CLASS[1] in line]


def test_the_warning_of_custom_schedulers_is_left_out_of_ours_alone(log: list[str]) -> None:
    startup_log.trust_our_schedulers()
    startup_log.trust_our_schedulers()
    its = logging.getLogger(CUSTOM_SCHEDULER[0])
    assert its.filters.count(startup_log._not_of_ours) == 1
    for name in ("vllm_ext.engine.composed.scheduler.DraftCounts", "somebody.elses.Scheduler"):
        its.warning("Using custom scheduler class %s. And so on.", name)
    assert log == ["Using custom scheduler class somebody.elses.Scheduler. And so on."]


def test_a_warning_is_dropped_for_a_while(log: list[str]) -> None:
    its = logging.getLogger(MIN_P[0])
    with without(MIN_P):
        its.warning(f"{MIN_P[1]} decoding.")
        its.warning("another")
    its.warning(f"{MIN_P[1]} decoding.")
    assert log == ["another", f"{MIN_P[1]} decoding."]


@pytest.mark.parametrize("warning", [MIN_P, CUSTOM_CLASS, CUSTOM_SCHEDULER])
def test_vllm_still_says_so_there(warning: tuple[str, str]) -> None:
    """Else what drops it can go."""
    import importlib
    import inspect

    name, start = warning
    source = inspect.getsource(importlib.import_module(name))
    assert start in source.replace('"\n                "', "")


def test_the_closing_line() -> None:
    line = str(Started("hybrid", "V1", 16, "goodput", None, 63_000_000))
    assert line == (
        "vllm-ext is ready: hybrid drafts trees of up to 16 tokens (budget goodput) on vLLM's V1 runner, with 63.0 MB "
        "of host memory. To switch off: leave out --speculative-config. More: vllm-ext methods hybrid, docs/usage.md"
    )
    line = str(
        Started("rest", "V2", 8, "fixed", "there are sliding windows", 1, "device", ["dola", "cad"], "kivi")
    )
    assert "chains, not trees, as there are sliding windows: of up to 8 tokens (budget fixed)" in line
    assert "; sampling rules dola, cad; KV cache by kivi. " in line
    assert 'leave out --speculative-config and "vllm_ext" in --additional-config' in line
    line = str(Started(kv="kivi"))
    assert line.startswith('vllm-ext is ready: KV cache by kivi. To switch off: leave out "vllm_ext" in')
