# SPDX-License-Identifier: Apache-2.0
"""Draft models at start-up: what becomes of the options, and what is refused; no engine is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_idefics
import torch

pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import LinearBase

from vllm_ext.engine.composed import scheduler
from vllm_ext.engine.models import second_model
from vllm_ext.engine.steering.aux_logits import SecondModel
from vllm_ext.proposers.draft_model import DraftModelOptions


def config_for(model_dir: str, method: dict[str, Any], **options: Any) -> Any:
    return EngineArgs(
        model=model_dir,
        dtype="float32",
        max_model_len=256,
        speculative_config={"method": "dyspec", "num_speculative_tokens": 4, **method},
        **options,
    ).create_engine_config()


def test_a_slice_of_the_target(model_dir: str) -> None:
    made = config_for(model_dir, {"model": "self"})
    assert made.scheduler_config.scheduler_cls == scheduler.path_of(
        ["DraftSlots", "DraftCounts", "DraftBlocks", "Counts"], ahead=False
    )
    for layers, expected in ((None, 7), (3, 3), (30, 30)):
        options = DraftModelOptions(model="self", self_layers=layers)
        draft = second_model.second_model_config(made, options)
        assert draft.hf_config.num_hidden_layers == expected
        assert draft.model == made.model_config.model
        assert draft.dtype == made.model_config.dtype
    assert made.model_config.hf_config.num_hidden_layers == 30


def test_companions_of_rules_read_text_alone(slice_dir: str, tmp_path: Path) -> None:
    """A target that takes images has no token ids to read beside it: the first step would end the engine."""
    seeing = tiny_idefics.write(slice_dir, tmp_path)
    rules = {"contrastive": {"model": slice_dir}}

    def start(**options: Any) -> Any:
        given = {"additional_config": {"vllm_ext": {"rules": rules}}, "max_model_len": 256, **options}
        return EngineArgs(model=seeing, dtype="float32", **given).create_engine_config()

    with pytest.raises(ValueError, match=r"companion model reads text, .*--limit-mm-per-prompt, 0 of each"):
        start()
    with pytest.raises(ValueError, match="its tokenizer is not"):
        start(limit_mm_per_prompt={"image": 0})


def test_companions_have_one_place_of_a_token_with_m_rope() -> None:
    """Of text, its places in all dimensions are alike."""
    second, seen = object.__new__(SecondModel), []
    vars(second).update(
        _config=SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 9)),
        _model=lambda **given: seen.append(given["positions"].tolist()),
        hidden=None,
    )
    places = torch.tensor([4, 5, 5])
    for positions in (places, places.expand(3, -1)):
        second.forward(torch.tensor([1, 2, 3], dtype=torch.int32), positions)
    assert seen == [[4, 5, 5]] * 2


def test_another_model(slice_dir: str, tmp_path: Path) -> None:
    draft = str(shutil.copytree(slice_dir, tmp_path / "draft"))
    made = config_for(slice_dir, {"model": draft})
    assert second_model.second_model_config(made, DraftModelOptions(model=draft)).model == draft


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ({}, {}, "model is missing, and required: folder or hub name of a draft model"),
        ({"model": "/none"}, {}, "speculative_config.model='/none' cannot be used beside"),
        (
            {"model": "self", "self_layers": 31},
            {},
            "self_layers=31 is not allowed; allowed: 1 to 30",
        ),
        ({"model": "x", "self_layers": 2}, {}, "only model='self' has layers to choose; model='x'"),
        (
            {"model": "self"},
            {"enable_lora": True},
            "model='self' does not work with LoRA; name one",
        ),
        ({"model": "self"}, {"scheduler_cls": "a.B"}, "scheduler_cls='a.B': it must be unset"),
    ],
)
def test_refusals(model_dir: str, method: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        config_for(model_dir, method, **options)
    assert message in str(caught.value)


def test_experts_with_data_parallelism(model_dir: str) -> None:
    made = config_for(model_dir, {"model": "self"})
    options = DraftModelOptions(model="self")
    made.parallel_config.data_parallel_size = 2
    second_model.check(made, options)
    made.model_config.get_num_experts = lambda: 8
    with pytest.raises(
        ValueError, match=r"data_parallel_size=2: speculative_config.model works beside .* with 1 only"
    ):
        second_model.check(made, options)


def test_another_tokenizer_or_a_smaller_vocabulary(slice_dir: str, tmp_path: Path) -> None:
    other = shutil.copytree(slice_dir, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = list(vocabulary)[1000:1002]
    vocabulary[names[0]], vocabulary[names[1]] = vocabulary[names[1]], vocabulary[names[0]]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"its tokenizer is not .*'s; it must be the target's"):
        config_for(slice_dir, {"model": str(other)})
    cut = shutil.copytree(slice_dir, tmp_path / "cut")
    config = json.loads((cut / "config.json").read_text())
    (cut / "config.json").write_text(json.dumps({**config, "vocab_size": 4_000}))
    with pytest.raises(ValueError, match=r"its vocabulary has 4000 rows, the tokenizer 4096 tokens"):
        config_for(slice_dir, {"model": str(cut)})
    # Padding is fine.
    (cut / "config.json").write_text(json.dumps({**config, "vocab_size": 4_224}))
    config_for(slice_dir, {"model": str(cut)})


def test_bytes_of_weights_that_are_packed() -> None:
    """Found: half of what a draft holds, as layers on CPUs keep no weight once it is packed."""
    model = torch.nn.Sequential(torch.nn.Embedding(10, 6, dtype=torch.bfloat16))
    for rows in (8, 0, None):
        layer = LinearBase.__new__(LinearBase)
        torch.nn.Module.__init__(layer)
        layer.input_size, layer.output_size = 6, 16
        layer.output_size_per_partition = 8  # of two ranks
        if rows is not None:  # else quantised: no weight of that name
            layer.weight = torch.nn.Parameter(torch.empty(rows, 6, dtype=torch.bfloat16))
        model.append(layer)
    assert second_model.weight_bytes(model) == 2 * (60 + 48 + 48)
