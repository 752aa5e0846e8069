# SPDX-License-Identifier: Apache-2.0
"""vLLM's layers with our product: which are taken over, and what becomes of the others."""

from __future__ import annotations

import platform
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers import utils

from vllm_ext.engine.models import cpu_linear


def layer(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Linear:
    return torch.nn.Linear(inputs, outputs, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("with_bias", [False, True])
def test_layers_multiply_as_before(with_bias: bool) -> None:
    made = layer(64, 48)
    bias = made.bias if with_bias else None
    x = torch.randn(3, 48).bfloat16()
    want = torch.nn.functional.linear(x, made.weight, bias)
    assert cpu_linear.take_over(made, remove_weight=True)
    assert made.weight.numel() == 0  # held once
    got = utils.cpu_unquantized_gemm(made, x, made.weight, bias)
    assert (got.float() - want.float()).abs().max() < 2e-2
    compiled = torch.compile(
        lambda x: utils.cpu_unquantized_gemm(made, x, made.weight, bias), backend="eager"
    )
    assert torch.equal(compiled(x), got)


def test_what_drafts_is_held_in_8_bits() -> None:
    made, wide = layer(64, 48), layer(32, 8194)
    x = torch.randn(3, 48).bfloat16()
    want = torch.nn.functional.linear(x, made.weight, made.bias).float()
    assert cpu_linear.take_over(made, remove_weight=True, bits=8)
    assert made.packed_bytes == 64 * 48 + 4 * 64
    got = utils.cpu_unquantized_gemm(made, x, made.weight, made.bias)
    assert 0.0 < (got.float() - want).abs().max() < 5e-2
    compiled = torch.compile(
        lambda x: utils.cpu_unquantized_gemm(made, x, made.weight, made.bias), backend="eager"
    )
    assert torch.equal(compiled(x), got)
    assert cpu_linear.take_over(wide, remove_weight=True, bits=8)  # sums in 8 bits would be too long
    assert wide.packed_bytes == 2 * 32 * 8194


@pytest.mark.parametrize(("chosen", "bits"), [("auto", 8), ("bfloat16", 16)])
def test_layers_know_that_they_draft(chosen: str, bits: int) -> None:
    method = {"method": "token_recycling", "linear_layers": chosen}
    config = SimpleNamespace(additional_config={"vllm_ext": {"speculation": method}})
    assert cpu_linear.bits_of_drafts(config) == bits
    assert cpu_linear._BITS.get() == 16
    with cpu_linear.drafts(config):
        assert cpu_linear._BITS.get() == bits
    assert cpu_linear._BITS.get() == 16


def test_weights_that_others_read_stay() -> None:
    made = layer(64, 48)
    assert cpu_linear.take_over(made, remove_weight=False)
    assert made.weight.shape == (64, 48)


@pytest.mark.parametrize("made", [layer(48, 48), layer(64, 47), layer(64, 48, torch.float32)], ids=str)
def test_other_layers_are_left_to_vllm(made: torch.nn.Linear) -> None:
    x = torch.randn(3, made.in_features, dtype=made.weight.dtype)
    want = torch.nn.functional.linear(x, made.weight)
    assert not cpu_linear.take_over(made, remove_weight=True)
    cpu_linear._Linear.__mro__[1].process_weights_after_loading(object(), made)
    got = utils.cpu_unquantized_gemm(made, x, made.weight)
    assert (got - want).abs().max() < 2e-2


def test_where_vllms_own_product_serves_better(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "float32" in str(cpu_linear.reason_against(torch.float32))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert "AMX" in str(cpu_linear.reason_against(torch.bfloat16))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    assert "AVX2" in str(cpu_linear.reason_against(torch.bfloat16))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "aarch64" in str(cpu_linear.reason_against(torch.bfloat16))
