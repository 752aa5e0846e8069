# SPDX-License-Identifier: Apache-2.0
"""`rows` on the V2 runner: what is pending is known on the device alone, and no step asks for it on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ext.engine.recurrent.rows import RecurrentRows, as_rows
from vllm_ext.engine.tree_layers import recurrent_groups
from vllm_ext.engine.tree_layout import offsets, starts
from vllm_ext.kernels.device_trees import Walked


def to_device(array: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What the host knows, without waiting."""
    moved: torch.Tensor = async_tensor_h2d(array, dtype=dtype, device=device)
    return moved


class DeviceRows:
    """Of each slot the accepted rows of its last step.

    Args:
        slots: how many requests there can be.
        num_nodes: of a tree.
        device: of the states.
    """

    def __init__(self, slots: int, num_nodes: int, device: torch.device) -> None:
        self.pending = torch.zeros((slots, num_nodes), dtype=torch.int32, device=device)
        self.num_pending = torch.zeros(slots, dtype=torch.int32, device=device)
        self._columns = torch.arange(num_nodes, device=device)

    def note(self, slots: torch.Tensor, walked: Walked | None) -> None:
        """A step was verified.

        Args:
            slots: ``[requests]``.
            walked: of the step; None: it had no drafts.
        """
        if walked is None:
            self.num_pending[slots] = 0
            return
        self.pending[slots] = walked.path[:, 1:]
        self.num_pending[slots] = (walked.num_emitted - 1).clamp(min=0)

    def rows(
        self, slots: torch.Tensor, num_rows: Any, query_row: Any, parents: torch.Tensor, fresh: Any
    ) -> RecurrentRows:
        """A step of some requests.

        Args:
            slots: ``[requests]`` theirs.
            num_rows: int ``[requests]``, on the host: of each request, its root's and its drafts'.
            query_row: int ``[requests]``, on the host: where in the query the root is.
            parents: int32 ``[rows]`` inside the request; -1 for roots.
            fresh: int, on the host: those of them that have read nothing yet.
        """
        device, requests = parents.device, len(num_rows)

        def index(array: Any) -> torch.Tensor:
            return to_device(array, torch.int64, device)

        offset, owner = offsets(num_rows), np.repeat(np.arange(requests), num_rows)
        pending, num_pending = self.pending[slots], self.num_pending[slots]
        own = index(owner)
        packed_start = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        torch.cumsum(index(num_rows) + num_pending, 0, dtype=torch.int32, out=packed_start[1:])
        first = packed_start[:-1] + num_pending  # the roots
        verified = first[own].to(torch.int64) + index(offset)
        # As many as there can be, and one that nobody reads.
        nowhere = len(owner) + pending.numel()
        place = torch.arange(nowhere + 1, dtype=torch.int32, device=device)
        of = torch.searchsorted(packed_start[1:], place, right=True).clamp(max=requests - 1)
        packed_parents = place - packed_start[of] - 1
        packed_parents[verified] = parents + num_pending[own]
        there = self._columns < num_pending[:, None]
        read = torch.where(there, packed_start[:-1, None] + self._columns, nowhere)
        nodes = np.flatnonzero(offset)
        return RecurrentRows(
            own=as_rows(np.repeat(query_row, num_rows) + offset, index),
            row_start=to_device(starts(num_rows), torch.int32, device),
            parents=parents,
            pending=pending,
            num_pending=num_pending,
            packed_start=packed_start,
            packed_parents=packed_parents,
            certain=num_pending + 1,
            verified=verified,
            read=(
                read.flatten(),
                index(np.repeat(np.arange(requests), pending.shape[1])),
                pending.flatten().to(torch.int64),
            ),
            kept=(index(nodes), index(owner[nodes]), index(offset[nodes])),
            fresh=index(fresh) if len(fresh) else None,
            max_rows=int(num_rows.max()),
        )


class DeviceSteps:
    """Recurrent layers' part of a step on the V2 runner.

    Args:
        groups: the runner's ``attn_groups``, once the caches are bound.
        slots: how many requests there can be.
        num_nodes: of a tree.
        device: of the states.
    """

    def __init__(self, groups: Any, slots: int, num_nodes: int, device: torch.device) -> None:
        self.groups = recurrent_groups(groups)
        self.pending = DeviceRows(slots, num_nodes, device)

    def note(self, slots: torch.Tensor, walked: Walked | None) -> None:
        """See `DeviceRows.note`."""
        if self.groups:
            self.pending.note(slots, walked)

    def mark(
        self,
        input_batch: Any,
        parents: torch.Tensor | None,
        metadata: dict[str, Any],
        block_tables: Sequence[torch.Tensor],
        stock_of: Callable[[Any], tuple[dict[str, Any], Any]],
    ) -> None:
        """Give recurrent layers the step instead of vLLM's metadata.

        Args:
            input_batch: vLLM's.
            parents: int32 ``[rows]`` of all requests' verified rows; None: each is a root.
            metadata: by layer name, changed.
            block_tables: of each KV group.
            stock_of: of some requests, by their places in the batch, vLLM's metadata and their query rows.
        """
        if not self.groups:
            return
        lengths, drafts = input_batch.num_scheduled_tokens, input_batch.num_draft_tokens_per_req
        # vLLM may schedule made-up drafts behind a prompt's last token, even where it is the first.
        decoding = ~input_batch.is_prefilling_np | (lengths - (0 if drafts is None else drafts) == 1)
        ours = np.flatnonzero(decoding)
        if not len(ours):
            return
        device = block_tables[0].device
        index = to_device(ours, torch.int64, device)
        lengths = lengths[ours]
        if parents is None:
            parents = torch.full((int(lengths.sum()),), -1, dtype=torch.int32, device=device)
        else:
            verified = np.repeat(input_batch.cu_num_logits_np[ours], lengths) + offsets(lengths)
            parents = parents[to_device(verified, torch.int64, device)]
        slots = input_batch.idx_mapping[index]
        others = np.flatnonzero(~decoding)
        fresh = np.flatnonzero(input_batch.num_computed_tokens_np[ours] == 0)
        stock, stock_rows = stock_of(others) if len(others) else ({}, None)
        step = self.pending.rows(slots, lengths, input_batch.query_start_loc_np[ours], parents, fresh)
        for group_id, group in self.groups:
            rows = step.over(block_tables[group_id][index, 0], stock.get(group.layer_names[0]), stock_rows)
            for name in group.layer_names:
                metadata[name] = rows
