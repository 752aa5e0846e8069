# SPDX-License-Identifier: Apache-2.0
"""Two judgements of a token as one distribution."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_ext.samplers.reflective import mixed


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mixture_is_the_papers(weight: float, dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(0)
    first, again = (torch.randn(3, 7, generator=noise).mul(4).add(9).to(dtype) for _ in range(2))
    found = mixed(first, again, weight)
    p = [[math.exp(x) for x in row] for row in first.double().tolist()]
    q = [[math.exp(x) for x in row] for row in again.double().tolist()]
    for row, ps, qs in zip(found.softmax(-1).tolist(), p, q, strict=True):
        wanted = [(1 - weight) * a / sum(ps) + weight * b / sum(qs) for a, b in zip(ps, qs, strict=True)]
        assert row == pytest.approx(wanted, abs=1e-6)
    assert found.logsumexp(-1).tolist() == pytest.approx(first.float().logsumexp(-1).tolist(), abs=1e-4)


def test_without_weight_logits_are_what_they_were() -> None:
    first = torch.randn(2, 5)
    assert torch.equal(mixed(first, torch.full((2, 5), torch.nan), 0.0), first)
