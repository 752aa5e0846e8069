# SPDX-License-Identifier: Apache-2.0
"""Verify trees whose nodes were drawn from a draft model's distributions, for all rows at once, on the device.

Two laws: recursive rejection sampling, of children drawn without replacement, and SpecTr's k-SEQ, of the next tokens
of independent drafts. Either accepts one of a row's children, or leaves of the target's distribution what is to be
drawn from then. The token has the target's law in both cases.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vllm_ext.kernels.backends import Backend, choose

CHOSEN, RECURSIVE, K_SEQ = 0, 1, 2  # how a tree's nodes were found
MOST_SUPPORT = 32  # tokens of a distribution

# Where the hash of the uniform numbers starts. vLLM's Gumbel noise is a like hash that starts elsewhere.
DOMAIN = 0x64726177
BISECTIONS = 26  # of rho, in float32


class DrawnTrees(NamedTuple):
    """What verification knows of the trees of all slots. Row 0 is the root, row ``j`` node ``j - 1``."""

    kind: torch.Tensor  # int32 [slots] CHOSEN: not drawn; RECURSIVE: children stand in the order drawn; K_SEQ
    # int32 [slots, 1 + nodes] the row whose child this row is; -1: none. RECURSIVE: the tree's parent. K_SEQ: each
    # draft's token of each depth has a row of its own, and this names the first row that stands for its parent.
    child_of: torch.Tensor
    q_row: torch.Tensor  # int32 [slots, 1 + nodes] which distribution follows the row; -1: none
    ids: torch.Tensor  # int32 [slots, rows_of_q, support] token ids, distinct; -1: none
    q: torch.Tensor  # float32 [slots, rows_of_q, support] adds up to 1; 0 where there is no id

    @classmethod
    def of_size(
        cls, slots: int, nodes: int, rows_of_q: int, support: int, device: torch.device
    ) -> DrawnTrees:
        """Nothing drawn in any slot."""

        def full(value: int, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        return cls(
            full(CHOSEN, slots),
            full(-1, slots, 1 + nodes),
            full(-1, slots, 1 + nodes),
            full(-1, slots, rows_of_q, support),
            torch.zeros((slots, rows_of_q, support), dtype=torch.float32, device=device),
        )


def choose_drawn(
    logits: torch.Tensor,
    row_start: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    prefill_len: torch.Tensor,
    drawn: DrawnTrees,
    seeds: torch.Tensor,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Accept one of each row's drawn children, or make the row's logits what is left to draw from.

    A row's children are the rows behind it, of the same request, that name it in ``child_of``, in their order; each
    counts, those with equal tokens too. Rows that a cut tree lacks are nobody's children. The uniform number of a
    decision depends on the slot's seed, the row's position and the child's place among the row's children alone.

    Args:
        logits: float32 ``[rows, vocab]``, after all processors: the target draws from their softmax. Last dimension
            contiguous. Written to where children were drawn and none is accepted: the softmax is then what is left,
            also where rounding has left nothing, which keeps the row as it was.
        row_start: int32 ``[requests + 1]``; rows of request i are ``row_start[i]:row_start[i + 1]``, root first.
        slots: int64 ``[requests]``.
        tokens: int32 ``[rows]`` each row's input token.
        positions: int64 ``[rows]`` its position in the text.
        prefill_len: int32 ``[slots]``: behind a root that stands before this rows are padding.
        drawn: of all slots; contiguous. A child that its distribution does not have is rejected and changes nothing.
        seeds: int64 ``[slots]``.
        backend: "auto" is triton on CUDA, numba on the CPU, else torch.

    Returns:
        int64 ``[rows]``: the accepted child's token; -1: draw from the row's logits.
    """
    support = drawn.ids.shape[2]
    if not 0 < support <= MOST_SUPPORT:
        raise ValueError(f"support={support} must be 1 to {MOST_SUPPORT}")
    form: Any
    match choose(backend, logits):
        case "numba":
            from vllm_ext.kernels.drawn_rows_numba import choose_drawn_numba as form
        case "triton":
            from vllm_ext.kernels.drawn_rows_triton import choose_drawn_triton as form
        case _:
            from vllm_ext.kernels.drawn_rows_ref import choose_drawn_ref as form
    chosen: torch.Tensor = form(logits, row_start, slots, tokens, positions, prefill_len, drawn, seeds)
    return chosen
