# SPDX-License-Identifier: Apache-2.0
"""`block_mass` as it is defined: the readable form the other is tested against."""

from __future__ import annotations

import torch

from vllm_ext.kernels.block_mass import AskedRows


def add_block_mass_ref(query: torch.Tensor, keys: torch.Tensor, asked: AskedRows, scale: float) -> None:
    """See `vllm_ext.kernels.block_mass.add_block_mass`."""
    _, kv_heads, block_size, head_size = keys.shape
    for place, (request, row, seen) in enumerate(zip(*(part.tolist() for part in asked[1:4]), strict=True)):
        blocks = -(-seen // block_size)
        of_request = keys[asked.table[request, :blocks].long()].float()
        flat = of_request.transpose(0, 1).reshape(kv_heads, blocks * block_size, head_size)
        heads = query[row].float().view(kv_heads, -1, head_size)
        scores = torch.einsum("hgd,htd->hgt", heads, flat) * scale
        scores[:, :, seen:] = -torch.inf
        if asked.trees is not None:
            whole = int(asked.trees.whole[place])
            for node in range(seen - whole):
                if not (int(asked.trees.bits[place, node // 32]) >> (node % 32)) & 1:
                    scores[:, :, whole + node] = -torch.inf
        weights = scores.softmax(-1).view(kv_heads, -1, blocks, block_size)
        asked.mass[place, :blocks] += weights.sum((0, 1, 3))
