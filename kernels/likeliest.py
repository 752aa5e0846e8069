# SPDX-License-Identifier: Apache-2.0
"""The most probable entries of rows of logits, with their log-probabilities over the whole row."""

from __future__ import annotations

import torch

from vllm_ext.kernels import backends
from vllm_ext.kernels.top_k import top_k_ids


def likeliest(
    logits: torch.Tensor, k: int, backend: backends.Backend = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids as of `top_k_ids`, and what each has of the softmax over its row.

    Args:
        logits: float32, bfloat16 or float16 ``[rows, vocab]``, last dimension contiguous.
        k: how many, 1 to ``min(vocab, MAX_K)``.
        backend: of `top_k_ids`; sums are numba's where that is, and torch's elsewhere.

    Returns:
        int32 ids, and float32 log-probabilities, both ``[rows, k]``, likeliest first.

    Raises:
        ValueError: see `top_k_ids`.
    """
    ids = top_k_ids(logits, k, backend)
    top = logits.gather(1, ids.long()).float()
    if backends.choose(backend, logits) == "numba":
        from vllm_ext.kernels.likeliest_numba import log_sum_exp_numba

        return ids, top - log_sum_exp_numba(logits, top[:, 0])[:, None]
    return ids, top - torch.logsumexp(logits.float(), 1, keepdim=True)
