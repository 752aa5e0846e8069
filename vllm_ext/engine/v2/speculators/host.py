# SPDX-License-Identifier: Apache-2.0
"""Drafts of the V2 runner that a proposer on the host makes; verified like any others, on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_ext.engine.v2.speculators import tree_rows
from vllm_ext.engine.v2.speculators.base import StepRows, TreeSpeculator, to_host
from vllm_ext.engine.v2.speculators.host_drafter import HostDrafts, Verified
from vllm_ext.kernels.device_trees import EMPTY, SlotTrees
from vllm_ext.proposers.base import no_top
from vllm_ext.proposers.tree import Float32


class _Arriving(NamedTuple):
    """What a step has verified, on its way to the host."""

    values: torch.Tensor  # int32 of one dimension, see `HostSpeculator._unpacked`
    event: Any  # None on the CPU
    names: Sequence[str]  # ids of the step's requests
    row_start: np.ndarray[Any, Any]  # int32 [requests + 1]
    has_tree: np.ndarray[Any, Any]  # bool [requests]: rows behind the root are nodes, not padding
    most: int  # tokens of a request, at most
    with_tree: bool  # the step had drafts

    @property
    def is_here(self) -> bool:
        """Whether nothing would wait for it."""
        return self.event is None or bool(self.event.query())


class HostSpeculator(TreeSpeculator):
    """A proposer, and what goes to it and comes from it in a step: one copy each way."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        self.trees = SlotTrees.of_size(self.max_num_reqs, self.num_nodes, device)
        self.drafts = HostDrafts(vllm_config, self.settings, self.counts.count)
        self._width = self.drafts.proposer.verified_top_k
        self._sent: tuple[torch.Tensor, Any, int, bool] | None = None  # of the step that runs
        self._arriving: list[_Arriving] = []  # of steps, in order
        self.chances: dict[str, Float32] = {}

    @property
    def memory(self) -> tuple[int, str]:
        return self.drafts.proposer.memory_bytes, "host"

    def load(self, target: Any) -> None:
        self.drafts.load()

    def start(self, slot: int, request: Any, chain: bool, most_depth: int) -> None:
        if self.most_nodes[slot]:
            self.drafts.admit(request, chain, most_depth)

    def finish(self, request_ids: Iterable[str]) -> None:
        super().finish(request_ids)
        if request_ids:
            self._take(0, waits=False)
        self.drafts.finish(request_ids)
        for name in request_ids:
            self.chances.pop(name, None)

    def serve(self) -> None:
        self._arriving.clear()
        self.drafts.serve()

    def forget(self) -> None:
        self._arriving.clear()
        self.drafts.forget()

    def close(self) -> None:
        self.drafts.close()

    def learn(self, rows: StepRows) -> None:
        """Send the step's outcome to the host: all that a proposer may want of it, as one array."""
        verified, with_tree = rows.verified, rows.layout is not None
        parts = [verified.num_emitted, verified.emitted, verified.tokens]
        if rows.layout is not None:
            parts += [rows.layout.parents[: len(verified.tokens)], verified.accepted]
        if self._width:
            top_ids, top_logits = self.top(rows.logits, self._width)
            parts += [top_ids, top_logits.view(torch.int32)]
        packed = torch.cat([part.flatten().to(torch.int32) for part in parts])
        self._sent = *to_host(packed), verified.emitted.shape[1], with_tree

    def draft(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        number, level = input_batch.num_reqs, kwargs.get("num_speculative_tokens", self.num_nodes)
        nothing = torch.zeros((number, self.num_nodes), dtype=torch.int64, device=self.device)
        if dummy_run or self._sent is None:
            return nothing
        self._arriving.append(self._entry(input_batch))
        # Where nothing is drafted nothing is waited for: the proposer hears of the step in a later one.
        found = self._take(level, waits=level > 0)
        if not level or found is None:
            return nothing
        trees, roots = found
        self.chances.update(
            {name: tree.probabilities for name, tree in zip(input_batch.req_ids, trees, strict=True)}
        )
        packed = self.to_device(tree_rows.pack(trees, roots, self.num_nodes), torch.int32)
        # Ranks draft alike, but a proposer may fail on one alone, and drafts go to no scheduler here that would tell:
        # what they verify together is the first one's. Nothing on the host waits for it.
        packed = get_tp_group().broadcast(packed)
        return tree_rows.put(packed, input_batch.idx_mapping, self.trees)

    def _entry(self, input_batch: Any) -> _Arriving:
        assert self._sent is not None
        (values, event, most, with_tree), self._sent = self._sent, None
        row_start = np.asarray(input_batch.cu_num_logits_np, np.int32)
        done = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        has_tree = done - np.diff(row_start) >= input_batch.prefill_len_np
        return _Arriving(values, event, input_batch.req_ids, row_start, has_tree, most, with_tree)

    def _take(self, level: int, waits: bool) -> Any:
        """Tell the proposer of steps in order; the trees that it drafts behind the last, and their roots."""
        found = None
        while self._arriving and (waits or self._arriving[0].is_here):
            entry = self._arriving.pop(0)
            own_level = 0 if self._arriving else level
            found = self.drafts.step(entry.names, self._unpacked(entry), own_level)
        return found

    def _unpacked(self, entry: _Arriving) -> Verified:
        """What `learn` has packed."""
        # The one wait of a step that drafting on the host costs: until the device has verified, and has said what.
        values, row_start, number = self._wait(entry.values, entry.event), entry.row_start, len(entry.names)
        num_rows = row_start[-1]
        sizes = [number, number * entry.most, num_rows]
        sizes += [num_rows] * 2 * entry.with_tree + [num_rows * self._width] * 2
        num_sampled, sampled, tokens, *rest, top_ids, top_logits = np.split(values, np.cumsum(sizes)[:-1])
        parents, accepted = rest or (np.full(num_rows, EMPTY, np.int32), np.ones(num_rows, np.int32))
        parents = np.where(np.repeat(entry.has_tree, np.diff(row_start)), parents, EMPTY)
        top = no_top(num_rows)
        if self._width:
            shape = num_rows, self._width
            top = top_ids.reshape(shape), top_logits.view(np.float32).reshape(shape)
        return Verified(
            row_start,
            tokens,
            parents,
            parents != EMPTY,
            accepted != 0,
            *top,
            [
                row[:count].tolist()
                for row, count in zip(sampled.reshape(number, -1), num_sampled, strict=True)
            ],
        )
