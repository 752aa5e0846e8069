# SPDX-License-Identifier: Apache-2.0
"""The tap reads the largest logits of a step's rows, and totals of some, before a sampler writes into them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_ext.engine.drafting.logits_tap import LogitsTap


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [None, [], [1, 4]])
def test_totals_of_the_rows_asked_for(rows: list[int] | None, dtype: torch.dtype) -> None:
    logits = torch.randn(6, 90, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = logits.float().logsumexp(1).numpy()
    best = logits.float().topk(3)
    tap = LogitsTap(with_total=True)
    ids = tap.read(logits, 3, None if rows is None else np.array(rows, np.int64))
    tapped = tap.take()
    assert tapped is not None
    assert tapped.log_total is not None
    logits.zero_()
    for row in range(6):
        there = rows is None or row in rows
        assert tapped.log_total[row] == pytest.approx(wanted[row] if there else 0.0, abs=1e-5)
    np.testing.assert_allclose(tapped.top[1], best.values.numpy())
    assert tapped.top[0].tolist() == ids.tolist()
    assert tap.take() is None


def test_nobody_wants_totals() -> None:
    tap = LogitsTap(with_total=False)
    tap.read(torch.randn(2, 40), 1)
    tapped = tap.take()
    assert tapped is not None
    assert tapped.log_total is None
