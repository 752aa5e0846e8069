# SPDX-License-Identifier: Apache-2.0
"""The contract of vLLM's ``flash_attn_varlen_func`` over a paged cache, in torch: what we call, and what comes back.

Written from its docstring (vllm_flash_attn/flash_attn_interface.py). Arguments that do something else are refused; rows
that no sequence has stay as they are.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    block_table: torch.Tensor,
    return_softmax_lse: bool,
    out: torch.Tensor,
    fa_version: int = 3,
    num_splits: int = 0,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each sequence's queries to its first ``seqused_k`` cached tokens.

    Args:
        q: ``[total_q, heads, head_size]``; sequence i has ``q[cu_seqlens_q[i]:cu_seqlens_q[i + 1]]``.
        k: ``[num_blocks, block_size, kv_heads, head_size]``.
        v: as ``k``.
        max_seqlen_q: no sequence has more queries.
        cu_seqlens_q: int32 ``[sequences + 1]``.
        max_seqlen_k: no sequence has more keys.
        seqused_k: int32 ``[sequences]``.
        softmax_scale: of the scores.
        causal: False here.
        block_table: int32 ``[sequences, blocks]``.
        return_softmax_lse: True here.
        out: as ``q``, written to.
        fa_version: 2 or 3.
        num_splits: of version 3.
        others: None, or the value that does nothing.

    Returns:
        ``out``, and float32 ``[heads, total_q]`` natural logarithms. Without keys ``out`` is 0 and the logarithm
        infinite, of either sign as versions 2 and 3 have it.
    """
    assert q.is_contiguous()
    assert not causal
    assert return_softmax_lse
    assert not any(value for value in others.values()), others
    assert num_splits <= 1 or fa_version == 3
    for name, tensor in (
        ("cu_seqlens_q", cu_seqlens_q),
        ("seqused_k", seqused_k),
        ("block_table", block_table),
    ):
        assert tensor.dtype == torch.int32, name
    assert len(cu_seqlens_q) == len(seqused_k) + 1 == len(block_table) + 1
    block_size, group = k.shape[1], q.shape[1] // k.shape[2]
    assert block_size % 16 == 0
    lse = torch.empty((q.shape[1], len(q)), dtype=torch.float32)
    for i, length in enumerate(seqused_k.tolist()):
        start, end = cu_seqlens_q[i : i + 2].tolist()
        assert end - start <= max_seqlen_q
        assert length <= max_seqlen_k
        if not length:
            out[start:end] = 0
            lse[:, start:end] = math.inf if fa_version == 2 else -math.inf
            continue
        blocks = block_table[i, : -(-length // block_size)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:length].transpose(0, 1).float().repeat_interleave(group, 0)
            for cache in (k, v)
        )
        scores = q[start:end].transpose(0, 1).float() @ keys.transpose(1, 2) * softmax_scale
        out[start:end] = (scores.softmax(-1) @ values).transpose(0, 1).to(out.dtype)
        lse[:, start:end] = scores.logsumexp(-1)
    return out, lse
