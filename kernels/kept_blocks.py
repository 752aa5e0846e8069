# SPDX-License-Identifier: Apache-2.0
"""Block tables of the blocks alone that rows read: the first ones of a text and a window of the last, or a choice.

Keys have their positions in them, so that attention over a table without some blocks is attention without these: any
stock kernel takes it. All rows of one *part* read the same blocks before their own: a step's rows that decode are one
part a request, those of several tokens are cut where other blocks are read. Nothing of it is known on the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vllm_ext.kernels.backends import Backend, choose
from vllm_ext.kernels.device_trees import RowLayout


class Window(NamedTuple):
    """What a row reads besides its own block. A window that is longer than any text skips nothing."""

    sinks: int  # of the first blocks
    blocks: int  # of those before its own
    block_size: int

    def skipped(self, block: int) -> int:
        """How many blocks before its own a row of ``block`` does not read; they lie behind the sinks."""
        return max(block - self.blocks - self.sinks, 0)


NEVER = (1 << 31) - 1  # a position that no row has


class KeptParts(NamedTuple):
    """The parts of a step as attention takes them, in buffers that stay."""

    table: torch.Tensor  # int32 [parts, width]
    seq_lens: torch.Tensor  # int32 [parts]

    @classmethod
    def of_size(cls, parts: int, width: int, device: torch.device) -> KeptParts:
        """Room for so many."""
        return cls(
            torch.zeros(parts, width, dtype=torch.int32, device=device),
            torch.zeros(parts, dtype=torch.int32, device=device),
        )


def keep_blocks(
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    part_start: torch.Tensor,
    request: torch.Tensor | None,
    behind: torch.Tensor | None,
    window: Window,
    kept: KeptParts,
    gone: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Lay out the blocks that each part reads, its own among them.

    The contract, of a part whose rows end with the token ``end`` of its request and begin in ``block``::

        columns = [*range(window.sinks), *range(window.sinks + skipped, ...)]  # skipped = window.skipped(block)
        kept.table[part, i] = table[request, columns[i]]

    and with a choice, of a part whose first row stands at ``position``::

        columns = [i for i in range(...) if gone[slot, i] > position]  # skipped: how many are not among them

    and in both cases::

        kept.seq_lens[part] = min(end - skipped * window.block_size, width * window.block_size)

    Args:
        table: int32 ``[requests, blocks]``, all blocks of each.
        seq_lens: int32 ``[requests]`` tokens of each, its query's rows included.
        part_start: int32 ``[parts + 1]``; part i has the query rows ``part_start[i]:part_start[i + 1]``.
        request: int32 ``[parts]``; None: each request is one part.
        behind: int32 ``[parts]`` rows of the same request behind the part's; None: 0.
        window: of the rows.
        kept: written to.
        gone: int32 ``[slots, blocks]``: position of the first row that does not read a block, which is a block before
            that row's own; NEVER: all read it. None: there is no choice, and the window alone matters.
        slots: int64 ``[requests]``, where there is a choice. A part without rows needs none.
        backend: "auto" is triton on CUDA, else torch.
    """
    form: Any
    if choose(backend, seq_lens) == "triton":
        from vllm_ext.kernels.kept_blocks_triton import keep_blocks_triton as form
    else:
        from vllm_ext.kernels.kept_blocks_ref import keep_blocks_ref as form
    form(table, seq_lens, part_start, request, behind, window, kept, gone, slots)


def end_with_block(
    layout: RowLayout, positions: torch.Tensor, window: Window, backend: Backend = "auto"
) -> None:
    """Make padding of the nodes behind their root's block, and let contexts count the tokens that the root reads.

    Behind that block rows would read another window than their root's, which trees are attended with.

    Args:
        layout: of `lay_out`; ``parents``, ``groups`` and ``context`` are changed.
        positions: int64 ``[query rows]``.
        window: of the rows.
        backend: see `keep_blocks`.
    """
    form: Any
    if choose(backend, positions) == "triton":
        from vllm_ext.kernels.kept_blocks_triton import end_with_block_triton as form
    else:
        from vllm_ext.kernels.kept_blocks_ref import end_with_block_ref as form
    form(layout, positions, window)
