# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of prompt tokens, a longer table of embeddings, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_prompts
import torch

from vllm_ext.engine.models.prompt_embeddings import MORE_ROWS, check, extend, load

VOCAB, WIDTH, COUNT = 70, 16, 3  # a table of 128 rows: vLLM fills it up


@pytest.fixture
def folder(tmp_path: Path) -> str:
    draw = torch.Generator().manual_seed(0)
    return tiny_prompts.write(tmp_path / "prompts", torch.randn(COUNT, WIDTH, generator=draw), VOCAB)


def target(**other: Any) -> Any:
    values = {"ranks": 1, "lora": None, "hidden": WIDTH, "vocab": VOCAB, **other}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="m", get_hidden_size=lambda: values["hidden"], get_vocab_size=lambda: values["vocab"]
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=values["ranks"]),
        lora_config=values["lora"],
    )


@pytest.mark.parametrize(
    ("other", "asked", "message"),
    [
        ({"ranks": 2}, COUNT, "tensor_parallel_size=2 .* must be 1"),
        ({"lora": object()}, COUNT, "enable_lora=True .* must be off"),
        ({"hidden": 32}, COUNT, "its hidden_size is 16, that of m 32"),
        ({"vocab": 71}, COUNT, "its vocab_size is 70, that of m 71"),
        ({}, COUNT + 1, "num_prompt_tokens=4 is not allowed: .* has 3"),
    ],
)
def test_what_does_not_fit_is_refused(folder: str, other: dict[str, Any], asked: int, message: str) -> None:
    check(target(), folder, COUNT)
    with pytest.raises(ValueError, match=message):
        check(target(**other), folder, asked)


def test_what_is_no_checkpoint_is_refused(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        load(str(tmp_path / "nothing"))
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text())
    for change, message in (
        ({"architectures": ["MedusaModel"]}, "no checkpoint of prompt tokens"),
        ({"num_prompt_tokens": None}, "num_prompt_tokens=None"),
        ({"num_prompt_tokens": 4}, r"prompt_embeddings is \[3, 16\].* must be finite \[4, 16\]"),
    ):
        file.write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=message):
            load(folder)
    file.write_text(json.dumps(config))
    tiny_prompts.write(Path(folder), torch.full((COUNT, WIDTH), torch.nan), VOCAB)
    with pytest.raises(ValueError, match="must be finite"):
        load(folder)


class Model(torch.nn.Module):
    """vLLM's layers at both ends of a model, whose middle is nothing."""

    def __init__(self, tied: bool, vocab_size: int = VOCAB) -> None:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.logits_processor import LogitsProcessor
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            ParallelLMHead,
            VocabParallelEmbedding,
        )

        super().__init__()
        with set_current_vllm_config(VllmConfig()):
            self.embed = VocabParallelEmbedding(vocab_size, WIDTH, disable_tp=True)
            self.head = ParallelLMHead(vocab_size, WIDTH, disable_tp=True)
            self.logits = LogitsProcessor(vocab_size)
        draw = torch.Generator().manual_seed(0)
        for layer in (self.embed, self.head):
            layer.weight_loader(layer.weight, torch.randn(vocab_size, WIDTH, generator=draw))
        if tied:
            self.head = self.head.tie_weights(self.embed)
        for layer in (self.embed, self.head):
            layer.quant_method.process_weights_after_loading(layer)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.logits._get_logits(self.embed(ids), self.head, None)
        return found


@pytest.mark.parametrize("tied", [False, True])
def test_the_table_grows_and_the_rest_stays(folder: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers import logits_processor

    monkeypatch.setattr(logits_processor, "get_tensor_model_parallel_world_size", lambda: 1, raising=False)
    model, embeddings = Model(tied), load(folder)
    ids = torch.arange(VOCAB)
    before_rows, before = model.embed(ids), model(ids)
    old = model.embed.weight
    extend(model, embeddings, VOCAB)
    assert len(model.embed.weight) == len(old) + MORE_ROWS
    assert torch.equal(model.embed(ids), before_rows)
    assert torch.equal(model.embed(torch.arange(VOCAB, VOCAB + COUNT)), embeddings.to(old))
    assert torch.equal(model(ids), before)
    assert model.head.weight.shape == old.shape
    # No weight is held twice, and what vLLM has noted of it for loading is there.
    same = model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert same == tied
    assert model.embed.weight.weight_loader == old.weight_loader


def test_tables_that_cannot_grow_are_refused(folder: str) -> None:
    embeddings = load(folder)
    with pytest.raises(ValueError, match="has 71 rows on 1 ranks, not 70 on one"):
        extend(Model(False, VOCAB + 1), embeddings, VOCAB)
    two = torch.nn.ModuleList([Model(False), Model(False)])
    with pytest.raises(ValueError, match=r"has 2 tables of embeddings \(0.embed, 1.embed\), not one"):
        extend(two, embeddings, VOCAB)
    with pytest.raises(ValueError, match=r"0 tables of embeddings \(none of vLLM's own kind\)"):
        extend(torch.nn.Embedding(VOCAB, WIDTH), embeddings, VOCAB)
    quantised = Model(False)
    quantised.embed.quant_method = object()
    with pytest.raises(ValueError, match="embed is quantised"):
        extend(quantised, embeddings, VOCAB)
