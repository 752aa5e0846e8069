# SPDX-License-Identifier: Apache-2.0
"""`linear8`: its forms are the reference to the bit, and the reference is near the exact product."""

from __future__ import annotations

import llvmlite.binding
import pytest
import torch
from linear_cases import SIZES, assert_rows_are_apart, assert_threads_and_shapes_change_nothing, case

from vllm_ext.kernels.linear import BLOCK
from vllm_ext.kernels.linear8 import MOST_INPUTS, linear8, pack8
from vllm_ext.kernels.linear8_numba import FORMS, linear8_numba

FEATURES = llvmlite.binding.get_host_cpu_features()
RUNNABLE = [
    form
    for form, needed in zip(FORMS, ("avx512vnni", "avx512bw", "avx2"), strict=True)
    if FEATURES.get(needed)
]


@pytest.mark.parametrize("form", RUNNABLE)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_forms_are_the_reference(form: str, size: tuple[int, int, int]) -> None:
    x, weight, bias = case(*size)
    packed = pack8(weight)
    wanted = linear8(x, packed, bias, "torch")
    assert torch.equal(linear8_numba(x, packed.codes, packed.scale, bias, form), wanted)
    # Another weight, scale or term, and it is another.
    codes = packed.codes.clone()
    codes[-1, -1, -1] += torch.where(codes[-1, -1, -1] > 0, -120, 120).to(torch.int8)
    assert not torch.equal(linear8_numba(x, codes, packed.scale, bias, form), wanted)
    assert not torch.equal(linear8_numba(x, packed.codes, packed.scale.roll(1), bias, form), wanted)
    assert not torch.equal(linear8_numba(x, packed.codes, packed.scale, bias.roll(1), form), wanted)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_near_the_product(size: tuple[int, int, int]) -> None:
    """By half a step of each weight and each input, and a rounding."""
    x, weight, bias = case(*size)
    exact = x.double() @ weight.double().T + bias.double()
    size_x, size_w = x.double().abs(), weight.double().abs()
    of_x = size_x.amax(1, keepdim=True) / 2047 / 2
    of_w = size_w.amax(1, keepdim=True) / 127 / 2
    bound = (
        size_x.sum(1, keepdim=True) @ of_w.T
        + of_x @ size_w.sum(1, keepdim=True).T
        + x.shape[1] * of_x @ of_w.T
    )
    error = (linear8(x, pack8(weight), bias).double() - exact).abs()
    assert (error <= bound + exact.abs() * 2**-8 + 1e-6).all()
    assert error.pow(2).sum() < 2e-4 * (exact - bias).pow(2).sum()


def test_sums_of_the_longest_rows_do_not_overflow() -> None:
    ones = torch.ones(2, MOST_INPUTS, dtype=torch.bfloat16)
    weight = torch.ones(BLOCK, MOST_INPUTS, dtype=torch.bfloat16)
    for form in RUNNABLE:
        got = linear8_numba(-ones, *pack8(weight), torch.zeros(BLOCK), form)
        assert (got == -MOST_INPUTS).all()
    with pytest.raises(ValueError, match=rf"{MOST_INPUTS + 2} columns: {MOST_INPUTS} at most"):
        pack8(torch.ones(BLOCK, MOST_INPUTS + 2, dtype=torch.bfloat16))


@pytest.mark.parametrize("form", RUNNABLE)
def test_a_row_does_not_depend_on_the_others(form: str) -> None:
    x, weight, bias = case(29, 570, 96)
    packed = pack8(weight)
    assert_rows_are_apart(lambda rows: linear8_numba(rows, *packed, bias, form), x)


def test_threads_and_shapes_change_nothing() -> None:
    x, weight, bias = case(12, 62, 160)
    packed = pack8(weight)
    assert_threads_and_shapes_change_nothing(lambda rows: linear8(rows, packed, bias), x)


def test_what_is_no_number_stays_in_its_row() -> None:
    x, weight, bias = case(5, 576, 96)
    packed = pack8(weight)
    clean = linear8(x, packed, bias)
    x[1, 3], x[2, 5], x[3] = float("inf"), float("nan"), 0.0
    for backend in ("numba", "torch"):
        got = linear8(x, packed, bias, backend)
        assert got[1:3].isnan().all()
        assert torch.equal(got[3], bias.bfloat16())
        assert torch.equal(got[[0, 4]], clean[[0, 4]])


def test_a_row_of_zeros_is_zero() -> None:
    weight = torch.zeros(BLOCK, 8, dtype=torch.bfloat16)
    assert (linear8(torch.ones(2, 8).bfloat16(), pack8(weight), torch.zeros(BLOCK)) == 0).all()


def test_wrong_arguments_are_refused() -> None:
    x, weight, bias = case(4, 64, 32)
    packed = pack8(weight)
    with pytest.raises(ValueError, match="take bfloat16 with 64"):
        linear8(x.float(), packed, bias)
    with pytest.raises(ValueError, match="take bfloat16 with 64"):
        linear8(x[:, :62], packed, bias)
    with pytest.raises(ValueError, match="must be float32"):
        linear8(x, packed, bias.double())
    with pytest.raises(ValueError, match="leave it to"):
        pack8(weight.float())
