# SPDX-License-Identifier: Apache-2.0
"""EAGLE heads at start-up: which method of vLLM's they are, and what is refused; no engine is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_eagle

pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs

from vllm_ext.engine.models import eagle_head


def config_for(model_dir: str, model: str, **method: Any) -> Any:
    return EngineArgs(
        model=model_dir,
        dtype="float32",
        max_model_len=256,
        speculative_config={"method": "eagle_tree", "num_speculative_tokens": 4, "model": model, **method},
    ).create_engine_config()


@pytest.mark.parametrize(
    ("changed", "method"),
    [
        ({}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"]}, "eagle3"),  # named by its vocabulary alone
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None, "eagle_config": None}, "eagle"),
    ],
)
def test_which_of_vllms_methods_a_checkpoint_is(
    slice_dir: str, tmp_path: Path, changed: dict[str, Any], method: str
) -> None:
    folder = Path(tiny_eagle.random(tmp_path / "head", Path(slice_dir), num_rows=64))
    config = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in {**config, **changed}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    made = config_for(slice_dir, str(folder))
    # The engine's own speculation stays ours; vLLM's classes get theirs.
    assert made.speculative_config.method == "custom_class"
    assert "DraftSlots" in made.scheduler_config.scheduler_cls
    theirs = eagle_head.vllms_config(made, str(folder))
    assert theirs.speculative_config.method == method
    assert theirs.compilation_config is made.compilation_config


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1},
            "its hidden_size is 64, that of",
        ),
        ({"vocab_size": 77}, "its vocab_size is 77, that of"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 40]}},
            r"reads the target after \[40\] layers; .* has",
        ),
        ({"architectures": ["NobodysModelEagle3"]}, "cannot be used beside"),
    ],
)
def test_heads_that_do_not_fit(slice_dir: str, tmp_path: Path, changed: dict[str, Any], problem: str) -> None:
    folder = Path(tiny_eagle.random(tmp_path / "head", Path(slice_dir)))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    message = f"speculative_config.model=.*{problem}.*train heads --kind eagle"
    with pytest.raises(ValueError, match=message):
        config_for(slice_dir, str(folder))
    fused = {"method": "hybrid", "drafters": [{"method": "eagle_tree", "model": str(folder)}]}
    alone = EngineArgs(model=slice_dir, max_model_len=256, speculative_config=fused)
    with pytest.raises(ValueError, match=message):
        alone.create_engine_config()


def test_there_is_no_such_head(slice_dir: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"speculative_config.model='.*nothing' cannot be used beside"):
        config_for(slice_dir, str(tmp_path / "nothing"))
