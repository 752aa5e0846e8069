# SPDX-License-Identifier: Apache-2.0
"""`tree_attention` as it is defined, one request at a time: the readable form the others are tested against."""

from typing import Any

import torch

from vllm_ext.kernels.kv_layouts import in_order, sizes
from vllm_ext.kernels.tree_attention import PLAIN, Scoring, TreeRows


def tree_attention_ref(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    trees: TreeRows,
    scale: float,
    prepared: dict[Any, Any] | None = None,
    scoring: Scoring = PLAIN,
) -> None:
    """See `vllm_ext.kernels.tree_attention.tree_attention`, which validates. Nothing is prepared."""
    num_heads, (num_kv_heads, block_size, _) = query.shape[1], sizes(key_cache)
    end = 0
    columns = (trees.first_row, trees.num_rows, trees.num_past, trees.context_len)
    for request, (first, rows, past, context) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        start, end = end, end + rows
        length = context + rows
        blocks = trees.block_table[request, : -(-length // block_size)].long()
        # [blocks, heads, block, head] -> [heads, length, head], each KV head repeated for its query heads.
        keys, values = (
            in_order(cache[blocks])
            .transpose(0, 1)
            .flatten(1, 2)[:, :length]
            .float()
            .repeat_interleave(num_heads // num_kv_heads, dim=0)
            for cache in (key_cache, value_cache)
        )
        visible = torch.zeros(rows, length, dtype=torch.bool)
        visible[:, :context] = True
        place = torch.arange(length)  # in the text
        for row, parent in enumerate(trees.parents[start:end].tolist()):
            if parent >= 0:
                visible[row, context:] = visible[parent, context:]
            visible[row, context + row] = True
            place[context + row] = context + int(visible[row, context:].sum()) - 1
        if scoring.window:
            visible &= place > place[context:, None] - scoring.window
        if scoring.chunk:
            visible &= place >= place[context:, None] // scoring.chunk * scoring.chunk
        asked = slice(first, first + rows - past)
        scores = query[asked].transpose(0, 1).float() @ keys.transpose(1, 2) * scale
        if scoring.soft_cap:
            scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
        scores.masked_fill_(~visible[past:].to(scores.device), float("-inf"))
        if scoring.sinks is not None:
            scores = torch.cat([scores, scoring.sinks[:, None, None].expand(-1, rows - past, 1)], 2)
        weights = scores.softmax(-1)[..., :length]
        # Blocks that nobody sees may be anyone's, and hold anything.
        values = values.masked_fill(~visible.any(0).to(values.device)[:, None], 0.0)
        output[asked] = (weights @ values).transpose(0, 1).to(output.dtype)
