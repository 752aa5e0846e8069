# SPDX-License-Identifier: Apache-2.0
"""Early exits at start-up: what is refused, and what becomes of the options; no engine is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.engine.arg_utils import EngineArgs

from vllm_ext.engine.composed import scheduler
from vllm_ext.engine.models import exit_heads


def config_for(model_dir: str, method: dict[str, Any], **options: Any) -> Any:
    return EngineArgs(
        model=model_dir, dtype="float32", max_model_len=256, speculative_config=method, **options
    ).create_engine_config()


@pytest.mark.parametrize("method", ["layerskip", "del", "unified_skip"])
def test_drafts_have_slots(model_dir: str, method: str) -> None:
    assert config_for(model_dir, {"method": method}).scheduler_config.scheduler_cls == scheduler.path_of(
        ["DraftSlots", "DraftCounts", "DraftBlocks", "Counts"], ahead=False
    )


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (
            {"method": "layerskip", "exit_layer": 30},
            {},
            "an exit after 30 layers is not allowed; allowed: 1 to 29",
        ),
        ({"method": "del", "exits": [4, 31]}, {}, "an exit after 31 layers is not allowed; allowed: 1 to 29"),
        ({"method": "del", "exits": [4, 4]}, {}, "must be numbers of layers from 1, ascending"),
        ({"method": "layerskip", "heads": "/none"}, {}, "heads='/none' cannot be read"),
        ({"method": "layerskip"}, {"enable_lora": True}, "'layerskip' does not work with LoRA"),
        ({"method": "unified_skip"}, {"enable_lora": True}, "'unified_skip' does not work with LoRA"),
        ({"method": "del"}, {"scheduler_cls": "a.B"}, "scheduler_cls='a.B': it must be unset"),
        (
            {"method": "unified_skip", "speedup": 0.5},
            {},
            "speedup=0.5 is not allowed; allowed: number, 1.0 to 16.0",
        ),
    ],
)
def test_refusals(model_dir: str, method: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        config_for(model_dir, method, **options)
    assert message in str(caught.value)


def test_another_architecture(slice_dir: str, tmp_path: Path) -> None:
    for file in Path(slice_dir).iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    config |= {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_positions": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"GPT2LMHeadModel, the architecture of .* \(with LlamaForCausalLM, "
    ):
        config_for(str(tmp_path), {"method": "layerskip"})


def test_heads_of_another_model_and_exits_without_one(model_dir: str, slice_dir: str, tmp_path: Path) -> None:
    file = tmp_path / "heads.safetensors"
    exit_heads.save(file, {4: (torch.eye(8), torch.zeros(8))}, Path(slice_dir))
    method = {"method": "layerskip", "exit_layer": 4, "heads": str(file)}
    with pytest.raises(ValueError, match="was made for another model than"):
        config_for(model_dir, method)
    exit_heads.save(file, {4: (torch.eye(8), torch.zeros(8))}, Path(model_dir))
    config_for(model_dir, method)
    with pytest.raises(ValueError, match=r"has heads for exits after \[4\] layers, none after \[5\]"):
        config_for(model_dir, {**method, "exit_layer": 5})
