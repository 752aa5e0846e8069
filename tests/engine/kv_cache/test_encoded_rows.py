# SPDX-License-Identifier: Apache-2.0
"""Accepted drafts, moved to where a chain would have put them, in the bytes of blocks that are not full yet."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from encoded_caches import CODECS, Cache, draw, part, retrieving

from vllm_ext.engine.kv_cache.encoded_rows import EncodedMetadata, raw_mover


@pytest.mark.parametrize("name", ["kivi", "actqkv"])
@pytest.mark.parametrize("context", [330, 193])
def test_a_path_of_a_tree_becomes_a_chain(name: str, context: int) -> None:
    """What comes behind it reads what it would have read had the path come token by token."""
    codec, qkv, nodes = CODECS[name], draw(context, 3), draw(6, 9)
    last, reads = draw(2, 11), {num: retrieving(num) if name == "actqkv" else None for num in (1, 6)}
    path = [0, 2, 5]
    tree = Cache(codec, torch.float32, [context + 10], "torch")
    tree.step([0], [qkv])
    tree.step([context], [nodes], [1], [[-1, 0, 0, 1, 2, 2]], reads[6])
    metadata = EncodedMetadata(
        torch.tensor([0, 6], dtype=torch.int32),
        torch.tensor([context + 6], dtype=torch.int32),
        tree.table,
        codec,
        torch.float32,
    )
    move = raw_mover([tree.pages], codec, torch.float32)
    source, target = np.array(path[1:], np.int32), np.array([1, 2], np.int32)
    move(metadata.raw_slots(source), metadata.raw_slots(target))
    chain = Cache(codec, torch.float32, [context + 10], "torch")
    chain.step([0], [qkv])
    for depth, node in enumerate(path):
        chain.step([context + depth], [part(nodes, node, node + 1)], reading=reads[1])
    for row in range(2):
        found, expected = (
            cache.step([context + 3 + row], [part(last, row, row + 1)], reading=reads[1])[0]
            for cache in (tree, chain)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
