# SPDX-License-Identifier: Apache-2.0
"""The rows that a step verifies are those that vLLM itself would pick."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_ext.engine.v1.model_runner import SpeculativeRunner

MOST_ROWS = 400
REQUEST = st.tuples(st.integers(0, 20), st.integers(0, 9))  # drafts, rows of its prompt before the root


@given(st.lists(REQUEST, min_size=1, max_size=12))
def test_rows_are_vllms(requests: list[tuple[int, int]]) -> None:
    """Of batches with and without drafts, and with prompts in them."""
    runner: Any = SimpleNamespace(
        device=torch.device("cpu"),
        input_ids=SimpleNamespace(gpu=torch.arange(MOST_ROWS, dtype=torch.int32)),
        arange_np=np.arange(MOST_ROWS),
        _arange_scratch=np.zeros(MOST_ROWS, dtype=np.int32),
    )
    runner._get_cumsum_and_arange = lambda *args, **kwargs: GPUModelRunner._get_cumsum_and_arange(
        runner, *args, **kwargs
    )
    drafts = np.array([drafts for drafts, _ in requests], dtype=np.int32)
    ends = np.cumsum([1 + drafts + prompt for drafts, prompt in requests], dtype=np.int32)
    theirs = GPUModelRunner._calc_spec_decode_metadata(runner, drafts, ends)
    ours = SpeculativeRunner._calc_spec_decode_metadata(runner, drafts, ends)
    assert ours.logits_indices.dtype == theirs.logits_indices.dtype
    assert ours.logits_indices.tolist() == theirs.logits_indices.tolist()
    assert ours.num_draft_tokens == theirs.num_draft_tokens
    assert ours.max_spec_len == theirs.max_spec_len
