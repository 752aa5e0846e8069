# SPDX-License-Identifier: Apache-2.0
"""What some rows attend to, block by block: how KV methods choose that keep what later tokens look at.

Attention kernels give sums of values and no weights; so the weights of the few rows that are asked are made again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vllm_ext.kernels.backends import Backend, choose


class AskedTrees(NamedTuple):
    """Where rows are nodes of trees, whose tokens lie behind what their roots see before themselves."""

    whole: torch.Tensor  # int32 [asked] how many tokens, the first, are seen whatever `bits` say
    bits: torch.Tensor  # int32 [asked, words] bit b of word w: token whole + 32 * w + b is seen


class AskedRows(NamedTuple):
    """Rows of a step that are asked what they attend to. Each is contiguous, of the table its rows."""

    table: torch.Tensor  # int32 [requests, blocks]
    request: torch.Tensor  # int32 [asked] whose each is: a row of the table
    row: torch.Tensor  # int32 [asked] its place in the query
    seen: torch.Tensor  # int32 [asked] tokens that it may see, itself included
    mass: torch.Tensor  # float32 [asked, blocks] added to
    trees: AskedTrees | None = None  # None: rows see all of these


def add_block_mass(
    query: torch.Tensor, keys: torch.Tensor, asked: AskedRows, scale: float, backend: Backend = "auto"
) -> None:
    """Add the weight that each row gives to each block, summed over its heads.

    The contract, with ``w[head]`` the softmax of ``scale * query[row, head] @ key`` over the tokens that the row sees,
    which are ``range(seen)``, of a node of a tree those of them that are before the tree or have their bit::

        asked.mass[i, block] += sum(w[head][token] for head in heads for token in block)

    Args:
        query: ``[rows, heads, head_size]``.
        keys: ``[num_blocks, kv_heads, block_size, head_size]``, of any strides; the step's own are in it.
        asked: the rows, and where their weights go.
        scale: of scores.
        backend: "auto" is triton on CUDA, else torch.
    """
    if not len(asked.row):
        return
    form: Any
    if choose(backend, query) == "triton":
        from vllm_ext.kernels.block_mass_triton import add_block_mass_triton as form
    else:
        from vllm_ext.kernels.block_mass_ref import add_block_mass_ref as form
    form(query, keys, asked, scale)
