# SPDX-License-Identifier: Apache-2.0
"""Heads of early exits on a small Llama whose early layers say what the last ones do, turned."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from vllm_ext.data.answers import Answer
from vllm_ext.engine.models import exit_heads
from vllm_ext.training.early_exits import agreement, closed_form, distil, features

VOCAB, TOP_K, HIDDEN, LAYERS = 64, 8, 32, 3


def nothing(*_: Any) -> None:
    """No progress bar."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    made = LlamaForCausalLM(config).eval()
    made.save_pretrained(tmp_path_factory.mktemp("model"))
    return made


@torch.no_grad()
def answers(model: Any, count: int) -> list[Answer]:
    """Random text, with the model's own distributions."""
    made = []
    for tokens in np.random.default_rng(0).integers(VOCAB, size=(count, 40)):
        logp = model(torch.from_numpy(tokens[None])).logits[0, 3:-1].log_softmax(1)
        top = logp.topk(TOP_K)
        made.append(
            Answer(tokens.astype(np.int32), 4, top.indices.numpy().astype(np.int32), top.values.numpy())
        )
    return made


def test_least_squares_finds_an_affine_map() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 8, generator=generator)
    weight, bias = torch.randn(8, 8, generator=generator), torch.randn(8, generator=generator)
    found = closed_form(x, x @ weight.T + bias)
    torch.testing.assert_close(found[0], weight, atol=0.02, rtol=0.0)
    torch.testing.assert_close(found[1], bias, atol=0.02, rtol=0.0)


def test_features_are_the_models(model: Any) -> None:
    given = answers(model, 3)
    of = features(model, given, [1, 2], 10**6, nothing)
    assert of.last.shape == (3 * 36, HIDDEN)
    with torch.no_grad():
        logp = model.lm_head(of.last).log_softmax(1)
    torch.testing.assert_close(logp.gather(1, of.top_ids), of.top_logp, atol=1e-4, rtol=0.0)
    # An exit is the model with so many layers.
    short = copy.deepcopy(model)
    short.model.layers = short.model.layers[:1]
    again = features(short, given, [], 10**6, nothing)
    torch.testing.assert_close(of.exits[1], again.last)
    with pytest.raises(ValueError, match=r"exits \[3\] are not allowed; allowed: 1 to 2"):
        features(model, given, [1, 3], 100, nothing)


def test_heads_make_an_exit_agree_more(model: Any) -> None:
    of, test = (features(model, part, [2], 10**6, nothing) for part in _halves(answers(model, 120)))
    bare = agreement(model, test, 2, None)
    fitted = agreement(model, test, 2, distil(model, of, 2, 0, 0.0, 0, nothing))
    trained = agreement(model, test, 2, distil(model, of, 2, 20, 3e-3, 0, nothing))
    assert fitted.greedy > bare.greedy
    assert trained.greedy > fitted.greedy - 0.02
    assert trained.sampled > fitted.sampled > bare.sampled


def _halves(whole: list[Answer]) -> tuple[list[Answer], list[Answer]]:
    return whole[::2], whole[1::2]


def test_a_file_of_heads_belongs_to_one_model(model: Any, tmp_path: Path) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    model.save_pretrained(ours)
    with torch.no_grad():
        model.lm_head.weight[5, 5] += 1.0
    model.save_pretrained(other)
    with torch.no_grad():
        model.lm_head.weight[5, 5] -= 1.0
    file = tmp_path / "folder" / "heads.safetensors"
    weight, bias = torch.randn(HIDDEN, HIDDEN), torch.randn(HIDDEN)
    exit_heads.save(file, {1: (weight, bias), 2: (weight.T, bias)}, ours)
    exit_heads.check(str(file), [1, 2], ours)
    loaded = exit_heads.load(str(file), [2], torch.float32, torch.device("cpu"))
    rows = torch.randn(3, HIDDEN)
    torch.testing.assert_close(loaded[2](rows), rows @ weight + bias)
    with pytest.raises(
        ValueError, match=r"was made for another model than .*other\. Make one: `vllm-ext train exits"
    ):
        exit_heads.check(str(file), [1], other)
    with pytest.raises(ValueError, match=r"has heads for exits after \[1, 2\] layers, none after \[4\]"):
        exit_heads.check(str(file), [1, 4], ours)
    with pytest.raises(ValueError, match="cannot be read"):
        exit_heads.check(str(tmp_path / "none"), [1], ours)
    with pytest.raises(ValueError, match="is no file of exit heads"):
        exit_heads.check(str(ours / "model.safetensors"), [1], ours)
