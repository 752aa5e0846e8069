# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's model runners rules get, and what they are refused there. No engine is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm.config.vllm as vllm_config_module
import vllm.platforms
from vllm.config.compilation import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs

from vllm_ext.config import refusals, rules, runners
from vllm_ext.engine.composed import scheduler, worker
from vllm_ext.samplers.registry import RULES, load_rule

METHOD = {"method": "token_recycling", "num_speculative_tokens": 12}
SELF = {"model": "self", "self_layers": 1}
PIECEWISE: dict[str, Any] = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Triton had a driver for this machine: vLLM then runs V2."""
    monkeypatch.setattr(runners, "_has_triton", lambda: True)
    monkeypatch.setattr(vllm_config_module, "HAS_TRITON", True)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


def engine_of(model_dir: str, method: dict[str, Any] | None, **options: Any) -> Any:
    return EngineArgs(
        model=model_dir, speculative_config=method, dtype="float32", max_model_len=256, **options
    ).create_engine_config()


def given(**asked: Any) -> dict[str, Any]:
    return {"additional_config": {"vllm_ext": {"rules": asked}}}


def test_rules_that_steer_bring_their_parts_on_v2(model_dir: str, with_triton: None) -> None:
    for method, parts in ((METHOD, ["V2Speculation", "V2Rules", "Counts"]), (None, ["V2Rules"])):
        config = engine_of(model_dir, method, **given(dola={}, anchored=SELF))
        assert config.use_v2_model_runner
        assert config.parallel_config.worker_cls == worker.path_of(parts)
        assert scheduler.has(config, "RuleReports")
        assert scheduler.has(config, "CompanionBlocks")
        assert not config.scheduler_config.async_scheduling


@pytest.mark.parametrize("method", [METHOD, None])
def test_rules_that_put_tokens_off_have_them_come_again_on_v2(
    model_dir: str, with_triton: None, method: Any
) -> None:
    for name in ("awrs", "asap", "monitor"):
        config = engine_of(model_dir, method, **given(**{name: {}}))
        assert config.use_v2_model_runner
        assert not config.scheduler_config.async_scheduling
        assert scheduler.has(config, "DeferredTokens")
    # A grammar that the engine core has compiled is there.
    assert [rules.parse({"close_by_max_tokens": {}}).waits(on_v2) for on_v2 in (False, True)] == [True, False]
    own = {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}
    assert not scheduler.has(engine_of(model_dir, method, **given(monitor={}), **own), "DeferredTokens")


@pytest.mark.parametrize("name", [name for name in RULES if load_rule(name).why_v1])
def test_what_v2_has_no_place_for_takes_v1(model_dir: str, with_triton: None, name: str) -> None:
    asked = given(**{name: SELF if name == "lol" else {}})
    assert not engine_of(model_dir, METHOD, **asked).use_v2_model_runner
    with pytest.raises(ValueError, match=rf"'{name}' do not work.*{load_rule(name).why_v1}.*set VLLM_USE_V2"):
        engine_of(model_dir, None, **asked)


@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({}, True),
        ({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, True),
        (PIECEWISE, False),
        ({"enforce_eager": True}, False),
    ],
)
def test_second_models_and_graphs_of_whole_steps(
    model_dir: str, with_triton: None, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], whole: bool
) -> None:
    """Where a GPU would capture some, a method takes V1; what the finished configuration has is refused."""
    args = EngineArgs(model=model_dir, **options)
    assert not runners.captures_whole_steps(args)  # a CPU has no graphs
    monkeypatch.setattr(vllm.platforms, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert runners.captures_whole_steps(args) == whole


def test_graphs_of_whole_steps_are_refused(model_dir: str, with_triton: None) -> None:
    config = engine_of(model_dir, None, **given(contrastive=SELF))
    ruled = rules.of_vllm_config(config)
    assert ruled is not None
    refusals.check_rules_config(config, ruled, True)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    with pytest.raises(
        ValueError, match=r"cudagraph_mode=FULL_AND_PIECEWISE .* must be 'PIECEWISE' or 'NONE'"
    ):
        refusals.check_rules_config(config, ruled, True)
    refusals.check_rules_config(config, rules.parse({"dola": {}}), True)
    pairs, model = rules.parse({"cad": {}}), config.model_config
    recurrent = SimpleNamespace(runner_type="generate", skip_tokenizer_init=False, is_hybrid=True)
    for name in ("model", "tokenizer", "tokenizer_mode", "tokenizer_revision", "trust_remote_code"):
        setattr(recurrent, name, getattr(model, name))
    refusals.check_rules_config(config, pairs, True)
    config.model_config = recurrent
    with pytest.raises(ValueError, match=r"'cad' does not work with model .* recurrent"):
        refusals.check_rules_config(config, pairs, True)
    config.model_config = model
    config.parallel_config.enable_batch_sharded_sampling = True
    for name in ("dola", "awrs", "asap"):
        with pytest.raises(ValueError, match="do not work with enable_batch_sharded_sampling=True"):
            refusals.check_rules_config(config, rules.parse({name: {}}), True)
