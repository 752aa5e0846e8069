# SPDX-License-Identifier: Apache-2.0
"""Draft trees from the host as rows of the slots' buffers on the device: one array, and so one copy, for a step's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_ext.kernels.device_trees import EMPTY, WORDS, SlotTrees
from vllm_ext.proposers.tree import DraftTree, Int32


def pack(trees: Sequence[DraftTree], roots: Int32, num_nodes: int) -> Int32:
    """The rows of each tree; see `SlotTrees` for what they are, and for padding.

    Args:
        trees: of ``num_nodes`` nodes at most, each parent before its children.
        roots: int32 ``[requests]`` each request's last token, which stands instead of padding's tokens.
        num_nodes: room for each tree.

    Returns:
        int32 ``[requests, (1 + nodes) * (2 + WORDS) + nodes]``: parents, depths, bits, and the nodes' tokens.
    """
    shape = len(trees), 1 + num_nodes
    row = np.arange(1 + num_nodes, dtype=np.uint32)
    parents, depths = np.full(shape, EMPTY, np.int32), np.ones(shape, np.int32)
    depths[:, 0] = 0
    bits = np.zeros((*shape, WORDS), np.uint32)
    bits[:, row, row // 32] = np.uint32(1) << (row % 32)
    tokens = np.repeat(np.asarray(roots, np.int32)[:, None], num_nodes, 1)
    for place, tree in enumerate(trees):
        parents[place, 1 : 1 + len(tree)] = tree.parents + 1
        tokens[place, : len(tree)] = tree.tokens
    for node in range(1, 1 + max(map(len, trees), default=0)):
        there = np.flatnonzero(parents[:, node] >= 0)
        above = parents[there, node]
        depths[there, node] = depths[there, above] + 1
        bits[there, node] |= bits[there, above]
    flat = bits.view(np.int32).reshape(len(trees), (1 + num_nodes) * WORDS)
    return np.concatenate([parents, depths, flat, tokens], axis=1)


def put(packed: torch.Tensor, slots: torch.Tensor, trees: SlotTrees) -> torch.Tensor:
    """Write what `pack` made into the slots.

    Args:
        packed: int32 ``[requests, columns]``, on the device.
        slots: int ``[requests]``, no two alike.
        trees: written to at ``slots``.

    Returns:
        int64 ``[requests, nodes]`` the nodes' tokens.
    """
    rows = trees.parents.shape[1]
    bits_end = rows * (2 + WORDS)
    trees.parents[slots] = packed[:, :rows]
    trees.depths[slots] = packed[:, rows : 2 * rows]
    trees.bits[slots] = packed[:, 2 * rows : bits_end].reshape(-1, rows, WORDS)
    return packed[:, bits_end:].to(torch.int64)
