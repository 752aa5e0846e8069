# SPDX-License-Identifier: Apache-2.0
"""Weights of a served draft by the names of its checkpoint: where they lie, and how others get there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_ext.engine.models.draft_weights import DraftWeights, apply
from vllm_ext.kernels.linear import pack
from vllm_ext.kernels.linear8 import pack8

HIDDEN = 64


class Layer(torch.nn.Module):
    """A linear layer as vLLM has it."""

    def __init__(self, weight: torch.Tensor, kind: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        self.cpu_linear: Any = None
        if kind in ("8 bits", "16 bits"):
            self.packed = pack8(weight) if kind == "8 bits" else (pack(weight),)
        if kind != "plain":
            self.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)


def served(checkpoint: dict[str, torch.Tensor], kind: str) -> Any:
    model = torch.nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj"]}  # type: ignore[assignment]
    model.attn = torch.nn.Module()
    model.attn.qkv_proj = Layer(
        torch.cat([checkpoint["attn.q_proj.weight"], checkpoint["attn.k_proj.weight"]]), kind
    )
    model.norm = Layer(checkpoint["norm.weight"], "plain")
    return model


@pytest.fixture
def checkpoint(tmp_path: Path) -> dict[str, torch.Tensor]:
    # k before q, as a file may have them.
    made = {
        "attn.k_proj.weight": torch.randn(32, HIDDEN).bfloat16(),
        "attn.q_proj.weight": torch.randn(64, HIDDEN).bfloat16(),
        "norm.weight": torch.randn(HIDDEN).bfloat16(),
        "embed_tokens.weight": torch.randn(8, HIDDEN).bfloat16(),
    }
    save_file(made, tmp_path / "model.safetensors")
    return made


@pytest.mark.parametrize("kind", ["plain", "8 bits", "16 bits", "oneDNN"])
def test_weights_are_copied_into_their_places(
    checkpoint: dict[str, torch.Tensor], tmp_path: Path, kind: str
) -> None:
    model = served(checkpoint, kind)
    weights = DraftWeights(model, tmp_path, torch.bfloat16, "model")
    assert weights.names == {"attn.k_proj.weight", "attn.q_proj.weight", "norm.weight"}
    layer = model.attn.qkv_proj
    into = layer.packed if kind in ("8 bits", "16 bits") else (layer.weight,)
    memory = [part.data_ptr() for part in into]
    new = {name: torch.randn_like(checkpoint[name]).float() for name in weights.names}
    prepared = weights.prepare(new)
    joined = torch.cat([new["attn.q_proj.weight"], new["attn.k_proj.weight"]]).bfloat16()
    expected: tuple[torch.Tensor, ...] = (joined,)
    if kind in ("8 bits", "16 bits"):
        expected = pack8(joined) if kind == "8 bits" else (pack(joined),)
    assert not all(torch.equal(a, b) for a, b in zip(into, expected, strict=True))  # not before `apply`
    apply(prepared)
    assert all(torch.equal(a, b) for a, b in zip(into, expected, strict=True))
    assert [part.data_ptr() for part in into] == memory
    assert torch.equal(model.norm.weight, new["norm.weight"].bfloat16())
    if kind == "oneDNN":
        x = torch.randn(2, HIDDEN).bfloat16()
        assert torch.equal(layer.cpu_linear(x, layer.weight, None), x @ joined.T)


def test_what_does_not_fit_is_refused(checkpoint: dict[str, torch.Tensor], tmp_path: Path) -> None:
    weights = DraftWeights(served(checkpoint, "plain"), tmp_path, torch.bfloat16, "model")
    good = {name: checkpoint[name] for name in weights.names}
    weights.prepare(good)
    with pytest.raises(ValueError, match=r"other weights than the draft: norm\.weight"):
        weights.prepare({name: good[name] for name in good if name != "norm.weight"})
    with pytest.raises(ValueError, match=r"norm\.weight is \(3,\), and must be \(64,\)"):
        weights.prepare({**good, "norm.weight": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"norm\.weight have values that are no numbers"):
        weights.prepare({**good, "norm.weight": good["norm.weight"] * torch.nan})


def test_a_model_that_is_laid_out_otherwise_is_refused(
    checkpoint: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = served(checkpoint, "plain")
    model.packed_modules_mapping = {"qkv_proj": ["k_proj", "q_proj"]}
    with pytest.raises(
        ValueError, match=r"model: its weights cannot be replaced .* attn\.qkv_proj\.weight is not"
    ):
        DraftWeights(model, tmp_path, torch.bfloat16, "model")
    model.packed_modules_mapping = {}
    with pytest.raises(ValueError, match=r"as it has no attn\.k_proj\.weight\. Remove 'online'"):
        DraftWeights(model, tmp_path, torch.bfloat16, "model")
