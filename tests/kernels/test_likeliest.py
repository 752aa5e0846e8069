# SPDX-License-Identifier: Apache-2.0
"""`likeliest` against softmax in float64."""

from __future__ import annotations

import pytest
import torch

from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.likeliest import likeliest
from vllm_ext.kernels.likeliest_numba import log_sum_exp_numba
from vllm_ext.kernels.top_k import top_k_ids

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def logits_of(rows: int, vocab: int, dtype: torch.dtype, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * vocab)
    return (spread * torch.randn(rows, vocab, generator=generator)).to(dtype)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 40, 8192])
def test_it_is_softmax(backend: Backend, dtype: torch.dtype, vocab: int) -> None:
    for rows in (0, 1, 5):
        logits = logits_of(rows, vocab, dtype)
        wide = torch.cat([logits, torch.full_like(logits, 40.0)], 1)[
            :, :vocab
        ]  # what is beside does not count
        k = min(vocab, 9)
        for given in (logits, wide):
            ids, log_q = likeliest(given, k, backend)
            assert torch.equal(ids, top_k_ids(logits, k))
            wanted = logits.double().log_softmax(1).gather(1, ids.long())
            assert log_q.dtype == torch.float32
            assert torch.allclose(log_q.double(), wanted, atol=2e-6)


def test_far_from_the_largest_nothing_counts() -> None:
    logits = torch.full((2, 100), -1e4)
    logits[0, 3], logits[1] = 2.0, -torch.inf
    logits[1, 7] = 5.0
    for backend in ("numba", "torch"):
        ids, log_q = likeliest(logits, 1, backend)
        assert ids[:, 0].tolist() == [3, 7]
        assert log_q.abs().max() == 0.0


def test_what_is_not_finite_is_told() -> None:
    largest = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    found = log_sum_exp_numba(torch.ones(4, 20), largest)
    assert not found[:3].isfinite().any()
    assert found[3].isfinite()
