# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_ext.kernels.token_mask import keep_tokens, mask_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    for vocab in (32, 40, 4096):
        logits = torch.from_numpy(rng.normal(size=(5, vocab))).to(dtype)
        before = logits.clone()
        allowed = rng.integers(0, 2, (3, vocab)).astype(np.bool_)
        bits = np.zeros((4, -(-vocab // 32) * 32), np.uint8)
        bits[:3, :vocab] = allowed
        words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        mask_rows(logits, [4, 0, 3], torch.from_numpy(words))
        for row, mask in zip((4, 0, 3), allowed, strict=True):
            assert (logits[row][mask] == before[row][mask]).all()
            assert (logits[row][~mask] == -torch.inf).all()
        assert (logits[[1, 2]] == before[[1, 2]]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_tokens(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(5, 70))).to(dtype)
    before = logits.clone()
    kept = [np.array(ids, dtype=np.int32) for ids in ([69, 0], list(range(70)), [3])]
    keep_tokens(logits, [], [])
    assert (logits == before).all()
    keep_tokens(logits, [4, 0, 3], kept)
    for row, ids in zip((4, 0, 3), kept, strict=True):
        assert (logits[row][ids] == before[row][ids]).all()
        assert set(torch.isfinite(logits[row]).nonzero().flatten().tolist()) == {*ids.tolist()}
    assert (logits[[1, 2]] == before[[1, 2]]).all()
