# SPDX-License-Identifier: Apache-2.0
"""Reflective verification: the target's distributions behind two copies of a chain, mixed. Lossy.

Source: arXiv 2505.18629; see `vllm_ext.proposers.reflection`.
"""

from __future__ import annotations

import torch


def mixed(first: torch.Tensor, again: torch.Tensor, weight: float) -> torch.Tensor:
    """Logits of ``(1 - weight) * p + weight * p_again``, on the scale of the first ones.

    Those of ``p`` are given back with what was taken from them to make them log-probabilities, so that penalties,
    which read logits, do to them what they do without a second copy.

    Args:
        first: ``[num_rows, vocab]`` logits of p.
        again: ``[num_rows, vocab]`` logits of p_again.
        weight: 0 to 1; with 0 the first are given back as they are.

    Returns:
        float32 ``[num_rows, vocab]``.
    """
    first = first.to(torch.float32)
    if weight == 0.0:
        return first
    total = first.logsumexp(-1, keepdim=True)
    p, p_again = (first - total).exp(), again.to(torch.float32).softmax(-1)
    return ((1.0 - weight) * p + weight * p_again).log() + total
