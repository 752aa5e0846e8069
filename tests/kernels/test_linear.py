# SPDX-License-Identifier: Apache-2.0
"""`linear` against its reference in float64, in all of numba's forms that this CPU runs."""

from __future__ import annotations

import llvmlite.binding
import pytest
import torch
from linear_cases import SIZES, assert_rows_are_apart, assert_threads_and_shapes_change_nothing, case

from vllm_ext.kernels.linear import BLOCK, linear, pack, problem
from vllm_ext.kernels.linear_numba import FORMS, linear_numba

PAIRS = bool(llvmlite.binding.get_host_cpu_features().get("avx512bf16"))
RUNNABLE = [form for form in FORMS if form != "pairs" or PAIRS]


def wrong(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> bool:
    """Whether any value is further from the exact one than sums in float32 and one rounding can be."""
    exact = x.double() @ weight.double().T + bias.double()
    terms = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    bound = exact.abs() * 2**-8 + terms * 2**-23 * x.shape[1] ** 0.5 * 4
    return bool(((got.double() - exact).abs() > bound).any())


@pytest.mark.parametrize("form", RUNNABLE)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_right(form: str, size: tuple[int, int, int]) -> None:
    x, weight, bias = case(*size)
    packed = pack(weight)
    assert not wrong(linear(x, packed, bias, "torch"), x, weight, bias)
    assert not wrong(linear_numba(x, packed, bias, form), x, weight, bias)
    # One input less, or a row's weights at another place: the bound tells.
    short = packed.clone()
    short[:, -1] = 0
    assert wrong(linear_numba(x, short, bias, form), x, weight, bias)
    assert wrong(linear_numba(x, packed.roll(1, 2), bias, form), x, weight, bias)
    assert wrong(linear_numba(x, packed, torch.zeros_like(bias), form), x, weight, bias)


@pytest.mark.parametrize("form", RUNNABLE)
def test_a_row_does_not_depend_on_the_others(form: str) -> None:
    x, weight, bias = case(29, 570, 96)
    packed = pack(weight)
    assert_rows_are_apart(lambda rows: linear_numba(rows, packed, bias, form), x)


def test_threads_and_shapes_change_nothing() -> None:
    x, weight, bias = case(12, 62, 160)
    packed = pack(weight)
    assert_threads_and_shapes_change_nothing(lambda rows: linear(rows, packed, bias), x)


def test_infinities_and_nan_stay_in_their_row() -> None:
    x, weight, bias = case(5, 576, 96)
    clean = linear(x, pack(weight), bias)
    x[1, 3], x[2, 5] = float("inf"), float("nan")
    got = linear(x, pack(weight), bias)
    assert got[1].isinf().all()
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 3, 4]], clean[[0, 3, 4]])


def test_what_it_does_not_take_is_said() -> None:
    x, weight, bias = case(4, 6, 32)
    assert problem(weight) is None
    for other in (weight.float(), weight[: BLOCK // 2], weight[:, :5], weight[None]):
        assert problem(other) is not None
        with pytest.raises(ValueError, match=r"weight: .*leave it to torch"):
            pack(other)
    packed = pack(weight)
    with pytest.raises(ValueError, match=r"x is torch.float32 .*bfloat16 with 6"):
        linear(x.float(), packed, bias)
    with pytest.raises(ValueError, match="x is"):
        linear(x[:, :4], packed, bias)
    with pytest.raises(ValueError, match=r"bias is .*float32 \(32,\)"):
        linear(x, packed, bias[:16])
