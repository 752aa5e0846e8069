# SPDX-License-Identifier: Apache-2.0
"""`attend_nodes` as it is defined, one request at a time, and attention over the context alone, which it continues."""

import torch

from vllm_ext.kernels.kv_layouts import in_order, sizes
from vllm_ext.kernels.tree_attention import TreeRows


def attend_nodes_ref(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    context_output: torch.Tensor,
    context_lse: torch.Tensor,
    output: torch.Tensor,
    trees: TreeRows,
    scale: float,
) -> None:
    """See `vllm_ext.kernels.attend_nodes.attend_nodes`, which validates."""
    end = 0
    for request, rows in enumerate(trees.num_rows.tolist()):
        start, end = end, end + rows
        past, context = int(trees.num_past[request]), int(trees.context_len[request])
        first = int(trees.first_row[request])
        visible = torch.eye(rows, dtype=torch.bool)
        for row, parent in enumerate(trees.parents[start:end].tolist()):
            if parent >= 0:
                visible[row] |= visible[parent]
        keys, values = (
            _tokens(cache, trees.block_table[request], context, context + rows, query.shape[1])
            for cache in (key_cache, value_cache)
        )
        asked = slice(first, first + rows - past)
        scores = query[asked].transpose(0, 1).to(keys.dtype) @ keys.transpose(1, 2) * scale
        scores.masked_fill_(~visible[past:].to(scores.device), float("-inf"))
        result, lse = scores.softmax(-1) @ values, scores.logsumexp(-1)  # [heads, rows, head], [heads, rows]
        if context:
            before = context_output[start + past : end].transpose(0, 1).to(keys.dtype)
            # The part of its weight that each row has in the context.
            share = (context_lse[:, start + past : end].to(keys.dtype) - lse).sigmoid()[..., None]
            result = before * share + result * (1 - share)
        output[asked] = result.transpose(0, 1).to(output.dtype)


def attend_context_ref(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, trees: TreeRows, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `attend_nodes` continues: ``context_output`` and ``context_lse`` as it takes them; NaN without a context."""
    total, (heads, head_size) = len(trees.parents), query.shape[1:]
    output = query.new_full((total, heads, head_size), float("nan"))
    lse = torch.full((heads, total), float("nan"), dtype=torch.float32, device=query.device)
    end = 0
    for request, rows in enumerate(trees.num_rows.tolist()):
        start, end = end, end + rows
        past, context = int(trees.num_past[request]), int(trees.context_len[request])
        if context:
            first = int(trees.first_row[request])
            keys, values = (
                _tokens(cache, trees.block_table[request], 0, context, heads)
                for cache in (key_cache, value_cache)
            )
            rows_asked = query[first : first + rows - past].transpose(0, 1).to(keys.dtype)
            scores = rows_asked @ keys.transpose(1, 2) * scale
            output[start + past : end] = (scores.softmax(-1) @ values).transpose(0, 1).to(output.dtype)
            lse[:, start + past : end] = scores.logsumexp(-1).float()
    return output, lse


def _tokens(cache: torch.Tensor, table: torch.Tensor, begin: int, end: int, num_heads: int) -> torch.Tensor:
    """float32, or float64 of such a cache, ``[num_heads, end - begin, head_size]``: each query head's KV head."""
    num_kv_heads, block_size, _ = sizes(cache)
    blocks = table[: -(-end // block_size)].long()
    tokens = in_order(cache[blocks]).transpose(0, 1).flatten(1, 2)[:, begin:end]
    tokens = tokens if tokens.dtype == torch.float64 else tokens.float()
    return tokens.repeat_interleave(num_heads // num_kv_heads, dim=0)
