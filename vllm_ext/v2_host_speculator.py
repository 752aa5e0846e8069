# SPDX-License-Identifier: Apache-2.0
"""Drafts of the V2 runner that a proposer on the host makes; verified like any others, on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_ext import tree_rows
from vllm_ext.host_drafts import HostDrafts, Verified
from vllm_ext.kernels.device_trees import EMPTY, SlotTrees
from vllm_ext.proposers.base import no_top
from vllm_ext.v2_speculator import StepRows, TreeSpeculator


class HostSpeculator(TreeSpeculator):
    """A proposer, and what goes to it and comes from it in a step: one copy each way."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        self.trees = SlotTrees.of_size(self.max_num_reqs, self.num_nodes, device)
        self.drafts = HostDrafts(vllm_config, self.settings, self.counts.count)
        self._width = self.drafts.proposer.verified_top_k
        # Of the step that runs, on its way to the host: int32 of one dimension, and what is in it.
        self._arriving: tuple[torch.Tensor, Any] | None = None
        self._most_sampled, self._has_drafts = 0, False

    def load(self) -> None:
        """See the base class."""
        self.drafts.load()

    def start(self, slot: int, request: Any, chain: bool, most_depth: int) -> None:
        """See the base class."""
        self.drafts.admit(request, chain, most_depth)

    def finish(self, request_ids: Iterable[str]) -> None:
        """See the base class."""
        self.drafts.finish(request_ids)

    def serve(self) -> None:
        """See the base class."""
        self.drafts.serve()

    def close(self) -> None:
        """See the base class."""
        self.drafts.close()

    def learn(self, rows: StepRows) -> None:
        """Send the step's outcome to the host: all that a proposer may want of it, as one array."""
        parts = [rows.num_sampled, rows.sampled, rows.tokens]
        self._most_sampled, self._has_drafts = rows.sampled.shape[1], rows.drafted is not None
        if rows.drafted is not None and rows.parents is not None:
            parts += [rows.drafted, rows.parents, rows.accepted]
        if self._width:
            top_ids, top_logits = self.top(rows.logits, self._width)
            parts += [top_ids, top_logits.view(torch.int32)]
        packed = torch.cat([part.flatten().to(torch.int32) for part in parts])
        event: Any = None
        moved = packed.to("cpu", non_blocking=True)  # into memory that PyTorch has pinned for it
        if packed.is_cuda:
            # One that sleeps: another thread of this process may have something to do.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
        self._arriving = moved, event

    def propose(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        """vLLM's: int64 ``[requests, nodes]`` in batch order, after the step's tokens were taken over."""
        number, level = input_batch.num_reqs, kwargs.get("num_speculative_tokens", self.num_nodes)
        nothing = torch.zeros((number, self.num_nodes), dtype=torch.int64, device=self.device)
        if dummy_run or self._arriving is None:
            return nothing
        verified = self._verified(self._wait(), number, np.asarray(input_batch.cu_num_logits_np, np.int32))
        trees, roots = self.drafts.step(input_batch.req_ids, verified, level)
        if not level:
            return nothing
        packed = self.to_device(tree_rows.pack(trees, roots, self.num_nodes), torch.int32)
        # Ranks draft alike, but a proposer may fail on one alone, and drafts go to no scheduler here that would tell:
        # what they verify together is the first one's. Nothing on the host waits for it.
        packed = get_tp_group().broadcast(packed)
        return tree_rows.put(packed, input_batch.idx_mapping, self.trees)

    def _wait(self) -> np.ndarray[Any, Any]:
        """The one wait of a step that drafting on the host costs: until the device has verified, and has said what."""
        assert self._arriving is not None
        (moved, event), self._arriving = self._arriving, None
        if event is not None:
            event.synchronize()
        return moved.numpy()

    def _verified(self, values: np.ndarray[Any, Any], number: int, row_start: Any) -> Verified:
        """What `learn` has packed: int32 of one dimension."""
        num_rows = row_start[-1]
        sizes = [number, number * self._most_sampled, num_rows]
        sizes += [num_rows] * 3 * self._has_drafts + [num_rows * self._width] * 2
        num_sampled, sampled, tokens, *rest, top_ids, top_logits = np.split(values, np.cumsum(sizes)[:-1])
        if not rest:
            ones = np.ones(num_rows, np.int32)
            rest = [0 * ones, EMPTY * ones, ones]
        drafted, parents, accepted = rest
        top = no_top(num_rows)
        if self._width:
            shape = num_rows, self._width
            top = top_ids.reshape(shape), top_logits.view(np.float32).reshape(shape)
        return Verified(
            row_start,
            tokens,
            parents,
            drafted != 0,
            accepted != 0,
            *top,
            [
                row[:count].tolist()
                for row, count in zip(sampled.reshape(number, -1), num_sampled, strict=True)
            ],
        )
