# SPDX-License-Identifier: Apache-2.0
"""A second model in vLLM's V1 worker: its KV lies in the same blocks as the target's, it reads what the target reads.

vLLM's own loader makes it, its attention layers get caches with the target's, and their slots are found by the same
block tables: what is shared by prefix caching, freed or preempted is so for both. What keeps it in step:

- Per request the number of tokens is known whose KV is right. It starts with what the prefix cache gave, also after a
  preemption, and ends with the last token put out.
- A request's tokens are read when it is drafted for, and at the latest in the step in which the target fills a block:
  full blocks may be another request's prefix from then on.
- Draft nodes lie behind the committed tokens, in slots that the scheduler reserves (`v1_scheduler`). They are read
  again once they are committed: one row more in a pass that takes place anyway, and nothing has to move.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config.utils import replace as replace_config
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger

from vllm_ext import companion_load, v1_attention
from vllm_ext.kernels.top_k import MAX_K, top_k_ids
from vllm_ext.kernels.tree_attention import TreeRows
from vllm_ext.proposers.draft_model import SELF, DraftModelOptions, Rows
from vllm_ext.proposers.sampled import ROOT
from vllm_ext.proposers.tree import Int32

logger = init_logger("vllm.vllm_ext")

PREFIX = "companion"  # of the layers' names


@dataclass(slots=True)
class _Growth:
    """One request's tree while it grows: what the model has read behind the committed tokens."""

    slot: int  # batch index
    num_tokens: int  # committed
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)


class Companion:
    """The model, its place in the caches, and forward passes. See `vllm_ext.proposers.draft_model.DraftModel`."""

    def __init__(self, vllm_config: Any, options: DraftModelOptions) -> None:
        self._target_config, self._options = vllm_config, options
        self.config: Any = None
        self.model: Any = None
        self.layers: list[str] = []  # names of its attention layers
        self._runner: Any = None
        self._groups: list[tuple[Any, list[str]]] = []  # attention groups with its layers, and these
        self._group_id = 0
        self._known: dict[str, int] = {}  # by request id, tokens whose KV is right
        self._roots: dict[str, tuple[Any, Any]] = {}  # by request id, the distribution after its last token
        self._growth: dict[str, _Growth] = {}
        self._vocab_size: int = vllm_config.model_config.get_vocab_size()
        # Of the passes since `advance`: seconds, rows, requests.
        self.passes: list[tuple[float, int, int]] = []

    def load(self, target: Any) -> None:
        """Build it and load its weights; its layers then take part in vLLM's sizing of the caches."""
        from vllm.compilation.backends import set_model_tag
        from vllm.model_executor.model_loader import get_model

        model_config = companion_load.draft_model_config(self._target_config, self._options)
        self.config = replace_config(self._target_config, model_config=model_config, quant_config=None)
        context = self._target_config.compilation_config.static_forward_context
        before = set(context)
        with set_model_tag(PREFIX):
            if self._options.model == SELF:
                self.model = companion_load.first_layers(self.config, target, PREFIX)
            else:
                self.model = get_model(vllm_config=self.config, prefix=PREFIX)
        self.layers = [name for name in context if name not in before]
        own = sum(p.numel() * p.element_size() for p in self.model.parameters())
        shared = 0
        if self._options.model == SELF:
            shared, own = own, 0
        self._vocab_size = min(self._vocab_size, model_config.get_vocab_size())
        logger.info(
            "vllm-ext: draft model %s: %d layers, %.1f MB of weights of its own (%.1f MB are the target's); its KV is "
            "counted with the target's",
            self._options.model,
            len(self.layers),
            own / 1e6,
            shared / 1e6,
        )

    def bind(self, runner: Any) -> None:
        """After vLLM has bound the caches.

        Raises:
            ValueError: its layers cannot attend over trees, or lie in several groups of caches.
        """
        self._runner = runner
        context = self._target_config.compilation_config.static_forward_context
        for name in self.layers:
            if problem := v1_attention.layer_problem(context[name]):
                raise ValueError(
                    f"speculative_config.model={self._options.model!r}: {problem}. Choose another draft model, or a "
                    "method without one: `vllm-ext methods`."
                )
        found = [
            (group_id, group, names)
            for group_id, groups in enumerate(runner.attn_groups)
            for group in groups
            if (names := [name for name in group.layer_names if name in self.layers])
        ]
        if len({group_id for group_id, _, _ in found}) != 1:
            raise ValueError(
                f"speculative_config.model={self._options.model!r}: its layers need several KV cache groups; "
                "choose a draft model whose layers all have full attention."
            )
        self._group_id = found[0][0]
        self._groups = [(group, names) for _, group, names in found]
        v1_attention.warm_up(context[self.layers[0]])

    def begin_step(self, scheduler_output: Any) -> None:
        """Before the target's step: note what the prefix cache gave requests that come, or come back."""
        for new in scheduler_output.scheduled_new_reqs:
            self._known[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                self._known[request_id] = computed

    def forget(self, request_id: str) -> None:
        """A request is gone."""
        self._known.pop(request_id, None)
        self._growth.pop(request_id, None)
        self._roots.pop(request_id, None)

    def advance(self, computed: Sequence[int], num_tokens: Sequence[int], drafting: set[str]) -> None:
        """Read what the target's step has committed, as far as it is needed now.

        Args:
            computed: by batch index, tokens whose target KV is there after the step.
            num_tokens: by batch index, tokens that are known; one more than ``computed`` where one was sampled.
            drafting: requests that are drafted for.
        """
        batch = self._runner.input_batch
        block_size = batch.block_table[self._group_id].block_size
        self._roots.clear()
        self._growth.clear()
        self.passes.clear()
        parts: list[tuple[int, int, int]] = []  # batch index, first and last token
        for slot, request_id in enumerate(batch.req_ids):
            known = self._known[request_id]
            if request_id in drafting:
                # The last token is read again where it was before, for what follows it.
                parts.append((slot, min(known, num_tokens[slot] - 1), num_tokens[slot]))
            elif computed[slot] // block_size > known // block_size:
                parts.append((slot, known, computed[slot]))
        limit = self._target_config.scheduler_config.max_num_batched_tokens
        while parts:
            taken, rows = 0, 0
            while taken < len(parts) and (not taken or rows + parts[taken][2] - parts[taken][1] <= limit):
                rows += parts[taken][2] - parts[taken][1]
                taken += 1
            self._read(parts[:taken], drafting)
            parts = parts[taken:]

    def _read(self, parts: list[tuple[int, int, int]], drafting: set[str]) -> None:
        """One pass over stretches of committed tokens."""
        started = time.perf_counter()
        batch = self._runner.input_batch
        slots = np.array([part[0] for part in parts])
        start, end = (np.array([part[i] for part in parts], np.int32) for i in (1, 2))
        lengths = end - start
        query_start = np.zeros(len(parts) + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        owner = np.repeat(np.arange(len(parts)), lengths)
        positions = np.arange(query_start[-1], dtype=np.int32) - query_start[owner] + start[owner]
        tokens = batch.token_ids_cpu[slots[owner], positions]
        kv_slots = self._kv_slots(slots[owner], positions)
        common = replace(
            self._runner.step_common,
            query_start_loc=self._to(query_start),
            query_start_loc_cpu=torch.from_numpy(query_start),
            seq_lens=self._to(end),
            num_reqs=len(parts),
            num_actual_tokens=len(tokens),
            max_query_len=int(lengths.max()),
            max_seq_len=int(end.max()),
            block_table_tensor=self._block_table(slots),
            slot_mapping=kv_slots,
            positions=self._to(positions.astype(np.int64)),
            is_prefilling=None,
            seq_lens_cpu_upper_bound=torch.from_numpy(end),
        )
        metadata = {
            name: built
            for group, names in self._groups
            for built in [group.get_metadata_builder(0).build(0, common)]
            for name in names
        }
        hidden = self._forward(tokens, positions, kv_slots, metadata)
        asked = []
        for index, (slot, _, last) in enumerate(parts):
            request_id = batch.req_ids[slot]
            self._known[request_id] = last
            if request_id in drafting:
                asked.append(int(query_start[index + 1]) - 1)
                self._growth[request_id] = _Growth(slot, last)
        if asked:
            names = [name for slot, _, _ in parts if (name := batch.req_ids[slot]) in drafting]
            for name, ids, log_q in zip(names, *self._distributions(hidden, asked), strict=True):
                self._roots[name] = ids, log_q
        self.passes.append((time.perf_counter() - started, len(tokens), len(parts)))

    def roots(self, request_ids: Sequence[str]) -> Rows:
        """See `DraftModel`."""
        found = [self._roots[request_id] for request_id in request_ids]
        return Rows(np.stack([ids for ids, _ in found]), np.stack([log_q for _, log_q in found]))

    def nodes(self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        """See `DraftModel`."""
        started = time.perf_counter()
        growing: dict[str, int] = {}  # by request, its nodes before this pass
        owners: list[_Growth] = []
        places: list[int] = []
        for request_id, parent in zip(request_ids, parents, strict=True):
            growth = self._growth[request_id]
            growing.setdefault(request_id, len(growth.parents))
            owners.append(growth)
            places.append(growth.num_tokens + len(growth.parents))
            growth.depths.append(growth.depths[parent] + 1 if parent != ROOT else 0)
            growth.parents.append(parent)
        requests = [self._growth[request_id] for request_id in growing]
        past = np.array(list(growing.values()), np.int32)
        rows = np.array([len(growth.parents) for growth in requests], np.int32)
        positions = np.array(
            [
                growth.num_tokens + depth
                for growth, before in zip(requests, growing.values(), strict=True)
                for depth in growth.depths[before:]
            ],
            np.int32,
        )
        kv_slots = self._kv_slots(np.array([growth.slot for growth in owners]), np.array(places, np.int32))
        trees = TreeRows(
            block_table=self._block_table(np.array([growth.slot for growth in requests])),
            first_row=self._to(np.cumsum([0, *(rows - past)[:-1]]).astype(np.int32)),
            num_rows=self._to(rows),
            num_past=self._to(past),
            context_len=self._to(np.array([growth.num_tokens for growth in requests], np.int32)),
            parents=self._to(np.concatenate([np.array(growth.parents, np.int32) for growth in requests])),
        )
        metadata = SimpleNamespace(**{v1_attention.TREES: v1_attention.TreeMetadata(trees, None, None)})
        hidden = self._forward(
            np.array(tokens, np.int32), positions, kv_slots, dict.fromkeys(self.layers, metadata)
        )
        found = self._distributions(hidden, range(len(tokens)))
        self.passes.append((time.perf_counter() - started, len(tokens), len(requests)))
        return found

    def calibration_pass(self, rows: int) -> None:
        """A pass of so many rows, without attention, as vLLM's own dummy runs."""
        zeros = np.zeros(rows, np.int32)
        hidden = self._forward(zeros, zeros, None, None)
        self._distributions(hidden, range(rows))

    def _forward(self, tokens: Int32, positions: Int32, kv_slots: torch.Tensor | None, metadata: Any) -> Any:
        # A token the draft has no row for is one that no tokenizer gives.
        tokens = np.where(tokens < self._vocab_size, tokens, 0)
        with (
            torch.inference_mode(),
            set_forward_context(
                metadata,
                self.config,
                num_tokens=len(tokens),
                slot_mapping=dict.fromkeys(self.layers, kv_slots) if kv_slots is not None else {},
            ),
        ):
            return self.model(
                input_ids=self._to(tokens.astype(np.int32)),
                positions=self._to(positions.astype(np.int64)),
                intermediate_tensors=None,
            )

    def _distributions(self, hidden: Any, rows: Sequence[int]) -> Rows:
        with torch.inference_mode():
            wanted = hidden if len(rows) == len(hidden) else hidden[torch.tensor(rows, device=hidden.device)]
            logits = self.model.compute_logits(wanted)[:, : self._vocab_size]
            ids = top_k_ids(logits, min(MAX_K, self._vocab_size))
            total = torch.logsumexp(logits.float(), 1, keepdim=True)
            log_q = logits.gather(1, ids.long()).float() - total
        return Rows(ids.cpu().numpy(), log_q.cpu().numpy())

    def _kv_slots(self, slots: Any, index: Int32) -> torch.Tensor:
        """int64 ``[num_rows]``: where the KV of a request's token or node number ``index`` lies."""
        table = self._runner.input_batch.block_table[self._group_id]
        blocks = table.get_numpy_array()[slots, index // table.block_size].astype(np.int64)
        return self._to(blocks * table.block_size + index % table.block_size)

    def _block_table(self, slots: Any) -> torch.Tensor:
        """int32 ``[num_requests, max_blocks]``."""
        table = self._runner.input_batch.block_table[self._group_id]
        device: torch.Tensor = table.get_device_tensor(self._runner.input_batch.num_reqs)
        return device[self._to(slots)]

    def _to(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._runner.device)
