# SPDX-License-Identifier: Apache-2.0
"""Every backend of `top_k_ids` against the contract, integer for integer.

Without a GPU the triton form runs through triton's interpreter: see `test_triton_forms`.
"""

import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import IN_INTERPRETER
from top_k_cases import INF, NAN, contract, random_logits, special, strided, tied

from vllm_ext.kernels.top_k import top_k_ids

Backend = Literal["auto", "torch", "numba", "triton"]

BACKENDS: list[Backend] = ["torch", "numba"]
if IN_INTERPRETER:
    BACKENDS = ["triton"]
elif torch.cuda.is_available():
    BACKENDS.append("triton")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCABS = [1, 31, 33, 255, 256, 257, 999, 1024, 1025, 49152]
if IN_INTERPRETER:  # slow: a logit row of this size takes it half a second
    VOCABS = [1, 33, 1023, 1024, 1025, 5000]

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty comes filled with the largest integer: an entry nobody writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1, dtype=torch.int32).item() == 2**31 - 1
    yield
    torch.use_deterministic_algorithms(before)


def check(logits: torch.Tensor, k: int, backend: Backend) -> None:
    device = "cuda" if backend == "triton" and not IN_INTERPRETER else "cpu"
    # Strides must survive the move, so not .to(device) of a view.
    on_device = logits if device == "cpu" else strided(logits, logits.stride(0), device)
    ids = top_k_ids(on_device, k, backend)
    assert ids.dtype == torch.int32
    assert ids.device == on_device.device
    assert ids.shape == (logits.shape[0], k)
    assert ids.tolist() == contract(logits, k)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_random_rows_around_the_block_sizes(vocab: int, dtype: torch.dtype, backend: Backend) -> None:
    logits = random_logits(2, vocab, dtype)
    for k in sorted({1, min(8, vocab), min(32, vocab)}):
        check(logits, k, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [33, 1025, 3000])
def test_ties_go_to_the_lowest_index(vocab: int, dtype: torch.dtype, backend: Backend) -> None:
    logits = tied(vocab, dtype)
    check(logits, 8, backend)
    check(logits, 32, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rising_and_falling_rows(dtype: torch.dtype, backend: Backend) -> None:
    rising = torch.arange(-1000, 1000).to(dtype)  # every block beats the ones before it
    check(torch.stack([rising, rising.flip(0)]), 8, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype: torch.dtype, backend: Backend) -> None:
    for logits, k in special(dtype):
        check(logits, k, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [0x7FC0, 0x7F81, 0xFFC0, 0xFFFF - 2**15, 0xFFFF])
def test_every_nan_ranks_below_minus_infinity(bits: int, backend: Backend) -> None:
    row = torch.full((1, 600), -INF, dtype=torch.bfloat16)
    nan = torch.tensor([bits], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert nan.isnan().all()
    row[0, :300] = nan
    row[0, 7] = NAN  # ties with the others, whatever its payload
    check(row, 8, backend)
    row[0, 1:] = nan
    check(row, 8, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows(dtype: torch.dtype, backend: Backend) -> None:
    logits = random_logits(3, 1030, dtype)
    check(strided(logits, 1031), 8, backend)
    check(strided(logits, 2500), 8, backend)
    check(strided(logits[:1], 7), 8, backend)  # one row: its stride means nothing
    if backend != "triton" or IN_INTERPRETER:
        check(logits[:1].expand(3, -1), 8, backend)
    check(strided(logits[:, :1], 5), 1, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_batch(backend: Backend) -> None:
    check(torch.empty(0, 100), 8, backend)


def test_auto_takes_a_backend_for_the_device() -> None:
    logits = random_logits(2, 300, torch.float32).requires_grad_()
    assert top_k_ids(logits, 8).tolist() == contract(logits, 8)


def as_logits(bits: list[int], copies: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int16).repeat(copies).view(torch.bfloat16)[None]


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=20 if IN_INTERPRETER else 200, deadline=None)
@given(data=st.data())
def test_selected_are_sorted_distinct_and_unbeaten(backend: Backend, data: st.DataObject) -> None:
    # Any bit pattern, so every kind of NaN, zero and denormal; repeated, so ties in other blocks.
    bits = data.draw(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=300))
    logits = as_logits(bits, data.draw(st.integers(1, 5)))
    k = data.draw(st.integers(1, min(32, logits.shape[1])))
    on_device = logits.cuda() if backend == "triton" and not IN_INTERPRETER else logits
    ids = top_k_ids(on_device, k, backend)[0].tolist()

    def rank(i: int) -> tuple[bool, float, int]:
        value = logits[0, i].item()
        return math.isnan(value), 0.0 if math.isnan(value) else -value, i

    ranks = [rank(i) for i in ids]
    assert ranks == sorted(ranks)
    assert len(set(ids)) == k
    assert all(rank(i) > ranks[-1] for i in set(range(logits.shape[1])) - set(ids))


@pytest.mark.parametrize(
    ("logits", "k", "backend", "message"),
    [
        (torch.zeros(5), 1, "auto", r"logits\.shape=\(5,\) must be .*pass logits\[None\]"),
        (torch.zeros(2, 0), 1, "auto", r"logits\.shape=\(2, 0\) must be .*vocab >= 1"),
        (
            torch.zeros(2, 5, dtype=torch.float64),
            1,
            "auto",
            r"dtype=torch\.float64 must be float32",
        ),
        (torch.zeros(5, 2).T, 1, "auto", r"stride\(\)=\(1, 2\) must be 1 .*\.contiguous\(\)"),
        (torch.zeros(2, 5), 0, "auto", r"k=0 must be from 1 to min\(vocab=5, 32\)"),
        (torch.zeros(2, 5), 6, "auto", r"k=6 must be from 1 to min\(vocab=5, 32\)"),
        (torch.zeros(2, 50), 33, "auto", r"k=33 must be .*use torch\.topk"),
        (torch.zeros(2, 5), 1, "cuda", r"backend='cuda' must be 'auto', 'torch', 'numba' or"),
        (torch.zeros(2, 5, device="meta"), 1, "numba", r"'numba' takes CPU tensors, .*meta"),
    ],
)
def test_what_it_refuses(logits: torch.Tensor, k: int, backend: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        top_k_ids(logits, k, backend)


class TestInTheParentProcess:
    def test_triton_refuses_cpu_logits_without_the_interpreter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        with pytest.raises(ValueError, match=r"'triton' takes CUDA .* cpu; .*TRITON_INTERPRET=1"):
            top_k_ids(torch.zeros(2, 5), 1, "triton")

    def test_import_and_use_on_the_cpu_load_no_other_backend(self) -> None:
        code = """
import sys, torch
before = set(sys.modules)
from vllm_ext.kernels.top_k import top_k_ids
loaded = set(sys.modules) - before
assert not {m for m in loaded if m.startswith(("numba", "triton"))}, loaded
top_k_ids(torch.zeros(1, 9), 3)
assert "vllm_ext.kernels.top_k_numba" in sys.modules
assert "vllm_ext.kernels.top_k_triton" not in sys.modules
"""
        subprocess.run([sys.executable, "-c", code], check=True)
