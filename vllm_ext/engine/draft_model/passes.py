# SPDX-License-Identifier: Apache-2.0
"""Forward passes over the nodes of growing draft trees, in vLLM's V1 worker: what draft models have in common.

A tree grows behind a request's tokens. The keys and values of its nodes lie in slots that the scheduler reserves
(`scheduler`), in the order in which the nodes were asked for; each sees the tokens before the tree, its ancestors
and itself.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.forward_context import set_forward_context

from vllm_ext.engine import tree_layers
from vllm_ext.engine.attention import tree_backend
from vllm_ext.engine.tree_layout import StepTrees, offsets
from vllm_ext.kernels.likeliest import likeliest
from vllm_ext.kernels.top_k import MAX_K
from vllm_ext.kernels.tree_attention import TreeRows
from vllm_ext.proposers.draft_model import Rows
from vllm_ext.proposers.tree import DraftTree, Int32


@dataclass(slots=True)
class Growth:
    """One request's tree while it grows."""

    slot: int  # batch index
    context: int  # tokens before the first node
    parents: list[int] = field(default_factory=list)  # an earlier node, or -1
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def add(self, parent: int, token: int, depth: int) -> int:
        """A node more; gives its place among them."""
        self.parents.append(parent)
        self.tokens.append(token)
        self.depths.append(depth)
        return len(self.parents) - 1


class Pass(NamedTuple):
    """What one took."""

    seconds: float
    rows: int
    num_requests: int
    reads: bool = False  # more tokens of a request than steps commit: a prompt's


def stacked(found: Sequence[tuple[Any, Any]]) -> Rows:
    """Rows of token ids and log-probabilities ``[support]`` each."""
    return Rows(np.stack([ids for ids, _ in found]), np.stack([log_q for _, log_q in found]))


class Companion(ABC):
    """What runs beside the target on each step: passes of ours, or a proposer of vLLM's."""

    def __init__(self) -> None:
        self.own_layers: list[str] = []  # names of the attention layers it runs that are not the target's
        self._runner: Any = None

    @property
    def aux_layers(self) -> Sequence[int]:
        """Once it is made: after how many of the target's layers it reads hidden states (`hidden_states`)."""
        return ()

    @abstractmethod
    def load(self, target: Any) -> None:
        """Make it; ``target`` is vLLM's model, loaded."""

    def bind(self, runner: Any) -> None:
        """After vLLM has bound the caches."""
        self._runner = runner

    def begin_step(self, scheduler_output: Any) -> None:
        """Before the target's step."""

    def room(self, row: int) -> int:
        """How many tokens and nodes of a request of the batch it can read: as many as one wishes, without a cache."""
        return sys.maxsize

    @abstractmethod
    def warm_up(self) -> None:
        """Compile what would else stall the first request."""

    def close(self) -> None:
        """The worker ends; may be called again."""


class ModelPasses(Companion):
    """A draft model or heads, and their passes. See `vllm_ext.proposers.draft_model.DraftModel`."""

    depths_a_pass = 1  # of a tree, that each pass tells

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[str] = []  # names of the attention layers it runs
        self.passes: list[Pass] = []  # since `advance`
        self.spared = 0  # likewise, calls of `nodes` that needed none
        self.blind: set[str] = set()  # requests that it can say nothing of

    def verified(self, trees: StepTrees) -> None:
        """After the target's step, before `advance`: which of its rows were accepted."""

    def unread(self, request_ids: Sequence[str], num_tokens: Sequence[int]) -> list[int]:
        """Of requests with so many tokens those that it must read first: the last one, of all that keep nothing."""
        return [1] * len(request_ids)

    def forget(self, request_id: str) -> None:
        """A request is gone."""

    def renew(self) -> bool:
        """Between verification and the next drafts: take over weights that were learnt; whether there were any."""
        return False

    @abstractmethod
    def advance(self, num_tokens: Sequence[int], drafting: set[str]) -> None:
        """After the target's step: what was drafted before is of no use any more.

        Args:
            num_tokens: by batch index, tokens that are known.
            drafting: requests that are drafted for.
        """

    @abstractmethod
    def roots(self, request_ids: Sequence[str]) -> Rows:
        """See `DraftModel`."""

    @abstractmethod
    def nodes(self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        """See `DraftModel`."""

    def settle(self, request_ids: Sequence[str], trees: Sequence[DraftTree]) -> None:
        """These are the trees that the target will verify, those without nodes left out."""

    def warm_up(self) -> None:
        """See `Companion`.

        Not with one row: the code would be for one row alone, and vLLM, which checks no guards, would run it with any
        number.
        """
        self.calibration_pass(16)

    @abstractmethod
    def calibration_pass(self, rows: int) -> None:
        """A pass of so many rows, without attention, as vLLM's own dummy runs."""


class DraftPasses(ModelPasses):
    """A model with a place in the caches.

    Args:
        vllm_config: the target's.
        what: how errors name the model.
    """

    what_next: str  # what an error says of layers that do not fit

    def __init__(self, vllm_config: Any, what: str) -> None:
        super().__init__()
        self._target_config, self._what = vllm_config, what
        self.config: Any = vllm_config  # vLLM's, of the model that drafts
        self._groups: list[tuple[Any, list[str]]] = []  # attention groups with its layers, and these
        self._group_id = 0
        self._growth: dict[str, Growth] = {}
        self._vocab_size: int = vllm_config.model_config.get_vocab_size()  # of the language head's rows
        self._token_map: torch.Tensor | None = None  # int64, which tokens these are; None: all, in order

    def bind(self, runner: Any) -> None:
        """See `ModelPasses`.

        Raises:
            ValueError: its layers cannot attend over trees, or lie in several groups of caches.
        """
        super().bind(runner)
        tree_layers.check_draft(self.layers, self._target_config, self._what, self.what_next)
        groups = ([name for group in of_kv for name in group.layer_names] for of_kv in runner.attn_groups)
        self._group_id = tree_layers.only_group(self.layers, groups, self._what, self.what_next)
        self._groups = [
            (group, names)
            for group in runner.attn_groups[self._group_id]
            if (names := [name for name in group.layer_names if name in self.layers])
        ]
        context = self._target_config.compilation_config.static_forward_context
        tree_backend.warm_up([context[name] for name in self.layers])

    def room(self, row: int) -> int:
        """See `Companion`."""
        table = self._runner.input_batch.block_table[self._group_id]
        return int(table.num_blocks_per_row[row]) * int(table.block_size)

    def forget(self, request_id: str) -> None:
        """See `ModelPasses`."""
        self._growth.pop(request_id, None)

    def nodes(self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        """See `DraftModel`."""
        started = time.perf_counter()
        hidden = self._grow(request_ids, parents, tokens)
        found = self._distributions(hidden)
        self._timed(started, request_ids)
        return found

    def _timed(self, started: float, request_ids: Sequence[str]) -> None:
        self.passes.append(Pass(time.perf_counter() - started, len(request_ids), len(set(request_ids))))

    def _grow(self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Any:
        """Add nodes, those of a request next to each other, and run the model over them: ``[num_nodes, hidden]``."""
        growing: dict[str, int] = {}
        for request_id, parent, token in zip(request_ids, parents, tokens, strict=True):
            growth = self._growth[request_id]
            growing.setdefault(request_id, len(growth.parents))
            growth.add(parent, token, growth.depths[parent] + 1 if parent >= 0 else 0)
        return self._pass_over(growing)

    def _pass_over(self, growing: dict[str, int]) -> Any:
        """Run the model over the nodes that requests have behind so many: ``[num_nodes, hidden]``, by request."""
        requests = [self._growth[request_id] for request_id in growing]
        past = np.array(list(growing.values()), np.int32)
        rows = np.array([len(growth.parents) for growth in requests], np.int32)
        context = np.array([growth.context for growth in requests], np.int32)
        slots = np.array([growth.slot for growth in requests])
        owner = np.repeat(np.arange(len(requests)), rows - past)

        def new(of_each: Sequence[list[int]]) -> Int32:
            return np.array(
                [n for each, before in zip(of_each, past, strict=True) for n in each[before:]], np.int32
            )

        kv_slots = self._kv_slots(slots[owner], offsets(rows - past) + (context + past)[owner])
        trees = TreeRows(
            block_table=self._block_table(slots),
            first_row=self._to(np.cumsum([0, *(rows - past)[:-1]]).astype(np.int32)),
            num_rows=self._to(rows),
            num_past=self._to(past),
            context_len=self._to(context),
            parents=self._to(np.concatenate([np.array(growth.parents, np.int32) for growth in requests])),
            max_rows=int(rows.max()),
        )
        metadata = SimpleNamespace(**{tree_backend.TREES: tree_backend.TreeMetadata(trees, None, None)})
        return self._forward(
            new([growth.tokens for growth in requests]),
            new([growth.depths for growth in requests]) + context[owner],
            kv_slots,
            dict.fromkeys(self.layers, metadata),
        )

    def _forward(self, tokens: Int32, positions: Int32, kv_slots: torch.Tensor | None, metadata: Any) -> Any:
        """``[num_rows, hidden]``, what the head wants; without slots and metadata nothing is written or attended."""
        with forward_context(self.config, self.layers, len(tokens), kv_slots, metadata):
            return self._run(self._to(tokens.astype(np.int32)), self._to(positions.astype(np.int64)))

    @abstractmethod
    def _run(self, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
        """The model itself, in vLLM's forward context; int32 and int64 ``[num_rows]``."""

    @abstractmethod
    def _logits(self, hidden: Any) -> Any:
        """``[num_rows, vocab]``."""

    def _distributions(self, hidden: Any) -> Rows:
        with torch.inference_mode():
            logits = self._logits(hidden)[:, : self._vocab_size]
            ids, log_q = likeliest(logits, min(MAX_K, self._vocab_size))
            if self._token_map is not None:
                ids = self._token_map[ids.long()].to(torch.int32)
        return Rows(ids.cpu().numpy(), log_q.cpu().numpy())

    def calibration_pass(self, rows: int) -> None:
        """See `ModelPasses`."""
        self._distributions(self._forward(self._random_tokens(rows), np.zeros(rows, np.int32), None, None))

    def _random_tokens(self, rows: int) -> Int32:
        """Of the vocabulary, so that rows go to the experts that they would."""
        return np.random.default_rng(0).integers(self._vocab_size, size=rows, dtype=np.int32)

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


@contextmanager
def forward_context(
    config: Any, layers: Sequence[str], num_rows: int, kv_slots: torch.Tensor | None, metadata: Any
) -> Iterator[None]:
    """vLLM's, of a pass of a model that drafts; without slots and metadata nothing is written or attended.

    Args:
        config: vLLM's, of that model.
        layers: names of its attention layers.
        num_rows: of the pass.
        kv_slots: int64 ``[num_rows]``.
        metadata: by layer.
    """
    slot_mapping = dict.fromkeys(layers, kv_slots) if kv_slots is not None else {}
    with (
        torch.inference_mode(),
        set_forward_context(metadata, config, num_tokens=num_rows, slot_mapping=slot_mapping),
    ):
        yield
