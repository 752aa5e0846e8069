# SPDX-License-Identifier: Apache-2.0
"""The wrapper on create_engine_config, on vLLM's real EngineArgs; no engine is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs

from vllm_ext import patches, plugin
from vllm_ext.compat import hooks
from vllm_ext.config import refusals
from vllm_ext.config.runners import RunnerChoice
from vllm_ext.engine import step_extras
from vllm_ext.engine.composed import worker
from vllm_ext.features import class_paths

METHOD = {"method": "token_recycling", "num_speculative_tokens": 4, "matrix_width": 2}


def config_for(model_dir: str, **options: Any) -> Any:
    return EngineArgs(model=model_dir, dtype="float32", max_model_len=256, **options).create_engine_config()


def test_a_method_becomes_options_vllm_knows(model_dir: str) -> None:
    args = EngineArgs(
        model=model_dir, speculative_config=dict(METHOD), additional_config={"mine": 1}, max_model_len=256
    )
    for _ in range(2):  # a second call finds the arguments as the user wrote them
        made = args.create_engine_config()
        assert made.speculative_config.method == "custom_class"
        assert made.speculative_config.model == class_paths.DRAFTER
        assert made.speculative_config.num_speculative_tokens == 4
        assert made.parallel_config.worker_cls == worker.path_of(["Speculation", "Counts"])
        assert made.additional_config["mine"] == 1
        assert made.additional_config["vllm_ext"]["speculation"].items() > METHOD.items()
        assert args.speculative_config == METHOD
        assert args.worker_cls == "auto"
        assert args.additional_config == {"mine": 1}


def test_drafts_come_with_tokens_where_workers_are_processes(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from vllm.v1.executor import Executor as AnyExecutor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from vllm_ext.engine.v1 import v1_executor

    made = config_for(model_dir, speculative_config=METHOD)
    assert AnyExecutor.get_class(made) is v1_executor.Executor
    assert made.parallel_config.distributed_executor_backend == class_paths.EXECUTOR
    users = config_for(model_dir, speculative_config=METHOD, distributed_executor_backend=MultiprocExecutor)
    assert AnyExecutor.get_class(users) is MultiprocExecutor
    assert config_for(model_dir).parallel_config.distributed_executor_backend == "mp"

    answers = [SimpleNamespace(vllm_ext=step_extras.StepExtras(drafts="new")), SimpleNamespace()]
    monkeypatch.setattr(MultiprocExecutor, "sample_tokens", lambda *_: answers.pop(0))
    monkeypatch.setattr(MultiprocExecutor, "take_draft_token_ids", lambda _: "asked for")
    executor = object.__new__(v1_executor.Executor)
    monkeypatch.setattr(executor, "shutdown", lambda: None)
    executor.sample_tokens(None)
    assert [executor.take_draft_token_ids() for _ in range(2)] == ["new", "asked for"]
    executor.sample_tokens(None)
    assert executor.take_draft_token_ids() == "asked for"


def test_a_state_folder_is_made_absolute_and_engines_get_time_to_end(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine import utils

    name = "get_engine_process_shutdown_timeout"
    stock = getattr(getattr(utils, name), "__wrapped__", getattr(utils, name))
    monkeypatch.setattr(utils, name, stock)
    monkeypatch.chdir(tmp_path)
    config_for(model_dir)
    assert getattr(utils, name) is stock
    config_for(
        model_dir, speculative_config=METHOD
    )  # its requests are ended, also where it has nothing to save
    assert getattr(utils, name).__wrapped__ is stock
    for _ in range(2):
        made = config_for(model_dir, speculative_config={**METHOD, "state_dir": "here"})
        assert made.additional_config["vllm_ext"]["speculation"]["state_dir"] == str(tmp_path / "here")
        assert (tmp_path / "here").is_dir()
        assert made.shutdown_timeout == 0  # requests are aborted at once, as without us
    timeout = getattr(utils, name)
    assert timeout.__wrapped__ is stock
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    assert timeout(0, 0) == 10
    # The user's own time, what is left of it, and vLLM's default are as they were.
    assert [timeout(60, 60), timeout(60, 0), timeout(0, None), timeout(0, 3)] == [60, 0, None, 3]
    assert pauses == [patches.FALL_ASLEEP_SECONDS] * 5  # before each SIGTERM
    monkeypatch.delattr(utils, name)
    config_for(
        model_dir, speculative_config={**METHOD, "state_dir": "here"}
    )  # another vLLM: said, not refused


def test_spec_tokens_flag_counts(model_dir: str) -> None:
    made = config_for(model_dir, speculative_config={"method": "token_recycling"}, spec_tokens=3)
    assert made.speculative_config.num_speculative_tokens == 3
    with pytest.raises(ValueError, match="give one of them"):
        config_for(model_dir, speculative_config=dict(METHOD), spec_tokens=3)


def test_register_twice_wraps_once() -> None:
    plugin.register()
    once = EngineArgs.create_engine_config
    plugin.register()
    assert EngineArgs.create_engine_config is once


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"speculative_config": {"method": "token_recyclin"}},
            r"'token_recyclin'.*Did you mean 'token_recycling'",
        ),
        (
            {"speculative_config": {**METHOD, "num_speculative_tokens": 0}},
            r"num_speculative_tokens=0.*1 to 128",
        ),
        ({"speculative_config": {**METHOD, "matrix_width": "8"}}, r"matrix_width='8'.*integer"),
        ({"speculative_config": {**METHOD, "prompt_lookup_max": 3}}, r"unknown option prompt_lookup_max=3"),
        (
            {"speculative_config": {**METHOD, "state_dir": "/dev/null"}},
            r"state_dir='/dev/null': nothing can be written there.*name a folder",
        ),
        ({"speculative_config": METHOD, "pipeline_parallel_size": 2}, r"pipeline_parallel_size=2.*must be 1"),
        (
            {"additional_config": {"vllm-ext": {"rules": {"dola": {}}}}},
            r"'vllm-ext'. Did you mean 'vllm_ext'",
        ),
        ({"additional_config": {"vllm_ext": []}}, r"=\[\] is not allowed; allowed: an object"),
        ({"speculative_config": {"method": ["token_recycling", "stand"]}}, r"one name.*hybrid"),
        ({"speculative_config": METHOD, "worker_cls": "my.Worker"}, r"worker_cls='my.Worker'.*'auto'"),
        ({"speculative_config": METHOD, "async_scheduling": True}, r"async_scheduling=True.*False"),
        ({"speculative_config": METHOD, "runner": "pooling"}, r"runner='pooling'.*generate"),
        (
            {"speculative_config": {"method": "dyspec", "model": "self"}, "kv_offloading_size": 1.0},
            r"'OffloadingConnector'.*must be unset: .*'token_recycling'",
        ),
    ],
)
def test_refusals_name_field_value_and_way_out(model_dir: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config_for(model_dir, **options)


def test_recurrent_models_with_prefix_caching_are_refused(tmp_path: Path) -> None:
    config = {
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "vocab_size": 100,
        "max_position_embeddings": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    given: dict[str, Any] = {"speculative_config": METHOD, "skip_tokenizer_init": True}
    with pytest.raises(
        ValueError,
        match=r"recurrent \(Mamba-like\) layers, and prefix caching: it needs --no-enable-prefix-caching",
    ):
        config_for(str(tmp_path), **given)
    config_for(str(tmp_path), **given, enable_prefix_caching=False)


def test_microbatching_is_refused(model_dir: str) -> None:
    vllm_config = config_for(model_dir, speculative_config=METHOD)
    vllm_config.parallel_config.enable_dbo = True  # afterwards: vLLM turns it off on a CPU
    with pytest.raises(ValueError, match=r"microbatching \(--enable-dbo\): it must be off"):
        refusals.check_vllm_config(vllm_config, "token_recycling", RunnerChoice("V1", "no Triton"))


def test_forced_v2_runner_is_refused(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match=r"VLLM_USE_V2_MODEL_RUNNER=1.*unset"):
        config_for(model_dir, speculative_config=METHOD)


def test_an_unsupported_vllm_is_refused_only_when_a_method_is_asked_for(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "vllm_version", lambda: "0.99.0")
    with pytest.raises(RuntimeError, match=r"vLLM 0\.99\.0 is not supported.*Install"):
        config_for(model_dir, speculative_config=METHOD)
    assert config_for(model_dir).speculative_config is None


@pytest.mark.parametrize(
    "speculative_config",
    [None, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}],
    ids=["none", "ngram"],
)
def test_unused_means_untouched(
    model_dir: str, speculative_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own configuration, field by field, is the one its own function makes."""
    wrapped = EngineArgs.create_engine_config
    ours = config_for(model_dir, speculative_config=speculative_config)
    monkeypatch.setattr(EngineArgs, "create_engine_config", wrapped.__wrapped__)
    theirs = config_for(model_dir, speculative_config=speculative_config)
    assert "custom_class" not in str(ours)
    assert ours.parallel_config.worker_cls == theirs.parallel_config.worker_cls
    assert ours.additional_config == theirs.additional_config == {}
    assert ours.compute_hash() == theirs.compute_hash()
    assert str(ours) == str(theirs)
