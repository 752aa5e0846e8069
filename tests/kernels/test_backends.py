# SPDX-License-Identifier: Apache-2.0
"""What the kernels have in common."""

from __future__ import annotations

from typing import Any

import numba
import pytest
import torch

from vllm_ext.kernels import backends


@pytest.mark.parametrize("compiler", [numba.njit, lambda **options: numba.cfunc("int64(int64)", **options)])
def test_code_is_compiled_where_nothing_can_be_cached(compiler: Any) -> None:
    asked: list[bool] = []

    def no_locator(*, cache: bool = False) -> Any:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compiler()

    def increment(number: int) -> int:
        return number + 1

    compiled = backends.compile_cached(no_locator)(increment)
    assert getattr(compiled, "ctypes", compiled)(41) == 42
    assert asked == [True, False]


def test_the_form_is_chosen_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu, meta = torch.empty(1), torch.empty(1, device="meta")
    assert [backends.choose("auto", tensor) for tensor in (cpu, meta)] == ["numba", "torch"]
    with pytest.raises(ValueError, match=r"backend='numba' takes CPU tensors, not meta; .*'auto'"):
        backends.choose("numba", meta)
    with pytest.raises(ValueError, match=r"backend='triton' takes CUDA tensors, not cpu; .*TRITON_INTERPRET"):
        backends.choose("triton", cpu)
    with pytest.raises(ValueError, match=r"backend='cuda' must be 'auto', 'torch'"):
        backends.choose("cuda", cpu)  # type: ignore[arg-type]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backends.choose("triton", cpu) == "triton"
