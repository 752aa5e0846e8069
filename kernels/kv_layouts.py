# SPDX-License-Identifier: Apache-2.0
"""The orders in which vLLM's CPU backend keeps a block of one KV head, as views of its cache.

A view has the dimensions ``[num_blocks, num_kv_heads, block_size, head_size]``, or six where both tokens and elements
are taken apart: ``[num_blocks, num_kv_heads, groups, tokens of a group, parts, elements of a part]``. The functions
here take either.
"""

import torch

PAIR, LINE = 2, 16  # an AMX tile's row is 16 pairs of 16-bit values


def vec_layout(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's "vec" and "vec16": the keys transposed, ``[head_size][block_size]``, then the values as they are.

    Args:
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.

    Returns:
        Key and value cache, both ``[num_blocks, num_kv_heads, block_size, head_size]``, sharing its memory.
    """
    num_blocks, num_kv_heads, block_size, width = kv_cache.shape
    shape = (num_blocks, num_kv_heads, block_size, width // 2)
    block, head = kv_cache.stride()[:2]
    start = kv_cache.storage_offset()
    keys = kv_cache.as_strided(shape, (block, head, 1, block_size), start)
    values = kv_cache.as_strided(shape, (block, head, shape[3], 1), start + block_size * shape[3])
    return keys, values


def amx_layout(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's "amx", which bfloat16 has on CPUs with AMX: B tiles of its matrix products, one behind the other.

    A tile's row is 16 columns of the product, each with two consecutive terms of the sum: for the keys 16 tokens with
    two elements each, for the values 16 elements of two tokens.

    Args:
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``; ``block_size`` and ``head_size`` are
            multiples of 16.

    Returns:
        Views that share its memory: keys ``[num_blocks, num_kv_heads, block_size / 16, 16, head_size / 2, 2]``, values
        ``[num_blocks, num_kv_heads, block_size / 2, 2, head_size / 16, 16]``.
    """
    num_blocks, num_kv_heads, block_size, width = kv_cache.shape
    head_size, (block, head) = width // 2, kv_cache.stride()[:2]
    start, row = kv_cache.storage_offset(), LINE * PAIR
    keys = kv_cache.as_strided(
        (num_blocks, num_kv_heads, block_size // LINE, LINE, head_size // PAIR, PAIR),
        (block, head, LINE * head_size, PAIR, row, 1),
        start,
    )
    values = kv_cache.as_strided(
        (num_blocks, num_kv_heads, block_size // PAIR, PAIR, head_size // LINE, LINE),
        (block, head, row, 1, LINE * block_size, PAIR),
        start + block_size * head_size,
    )
    return keys, values


def sizes(cache: torch.Tensor) -> tuple[int, int, int]:
    """``num_kv_heads``, ``block_size`` and ``head_size`` of a view."""
    if cache.dim() == 4:
        return cache.shape[1], cache.shape[2], cache.shape[3]
    heads, groups, tokens, parts, elements = cache.shape[1:]
    return heads, groups * tokens, parts * elements


def in_order(blocks: torch.Tensor) -> torch.Tensor:
    """Some blocks of a view as ``[num, num_kv_heads, block_size, head_size]``, a copy where they were taken apart."""
    return blocks if blocks.dim() == 4 else blocks.flatten(4).flatten(2, 3)


def token(block: torch.Tensor, offset: int) -> torch.Tensor:
    """One token of one block of a view, sharing its memory: ``[num_kv_heads, head_size]`` or with its parts apart."""
    return (
        block[:, offset] if block.dim() == 3 else block[:, offset // block.shape[2], offset % block.shape[2]]
    )


def tokens_at(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """A copy of single tokens: ``[num, num_kv_heads, head_size]``.

    Args:
        cache: a view.
        slots: int ``[num]``, each a block times the block size, plus the token's place in it.
    """
    _, block_size, _ = sizes(cache)
    blocks, offsets = slots // block_size, slots % block_size
    if cache.dim() == 4:
        return cache[blocks, :, offsets]
    tokens = cache.shape[3]
    return cache[blocks, :, offsets // tokens, offsets % tokens].flatten(2)
