# SPDX-License-Identifier: Apache-2.0
"""An EAGLE head in vLLM's V1 worker: passes over what the target's steps have committed, and over growing trees.

The target's hidden states are there in the step that computes them, and never again. So those of committed tokens are
taken in every step, whether the request is drafted for or not, and read, a row each, when it is drafted for, or when
they fill a block that other requests may come to share. Row ``i`` takes token ``i + 1``: the last token's row is the
root's.

Of a block that the prefix cache gives and that the head has not read to its end, the hidden states are lost: such a
request gets no drafts of the head, and is counted. It takes a cache that others fill, across engines.
The last row of a shared block was read with the token that followed in the request that filled it; for another
request that row alone may be off, which no output depends on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_ext.engine.draft_model.own_caches import OwnCaches, packed
from vllm_ext.engine.draft_model.passes import Growth, Pass
from vllm_ext.engine.draft_model.separate import MAX_NEW_TOKENS
from vllm_ext.engine.models.eagle_head import FIRST_READ, EagleHead
from vllm_ext.engine.models.node_states import NodeStates
from vllm_ext.engine.tree_layout import StepTrees, offsets
from vllm_ext.proposers.draft_model import Rows
from vllm_ext.proposers.eagle import EagleOptions
from vllm_ext.proposers.tree import Int32

MOST_UNREAD = 64  # rows of a request that wait at most


@dataclass(slots=True)
class _Unread:
    """Features of committed tokens that wait to be read, next to each other."""

    first: int  # place of the first
    count: int
    parts: list[torch.Tensor]


class EaglePasses(OwnCaches):
    """See `vllm_ext.proposers.draft_model.DraftModel`.

    Args:
        vllm_config: the target's.
        options: which head.
        count: adds one to a counter.
    """

    what_next = "Choose another head, or a method without one: `vllm-ext methods`."

    def __init__(self, vllm_config: Any, options: EagleOptions, count: Callable[[str], None]) -> None:
        super().__init__(vllm_config, f"speculative_config.model={options.model!r}")
        self._options, self._count = options, count
        self._head: EagleHead | None = None
        self._num_tokens = self._vocab_size  # of the target's vocabulary
        self._unread: dict[str, _Unread] = {}
        self._step: list[tuple[int, int, Int32]] = []  # batch index, first place, rows of the step's query
        self._streams = NodeStates()  # of this step's passes, what rows below take
        self._features: torch.Tensor | None = None  # of the pass to come

    @property
    def head(self) -> EagleHead:
        """Once it is loaded."""
        assert self._head is not None
        return self._head

    @property
    def _again(self) -> int:
        """Rows before a text's last one that are read again behind it."""
        return self.depths_a_pass - 1

    @property
    def aux_layers(self) -> Sequence[int]:
        """See `ModelPasses`."""
        return self.head.layers

    def load(self, target: Any) -> None:
        """See `ModelPasses`."""
        self._head = EagleHead(self._target_config, self._options.model, target)
        self.config, self.model = self._head.config, self._head.model
        self.layers = self.own_layers = self._head.attention
        self._token_map = self._head.token_map
        if self._token_map is not None:
            self._vocab_size = len(self._token_map)

    def verified(self, trees: StepTrees) -> None:
        """See `ModelPasses`: the rows that are committed, those of prompts too."""
        query_start = self._runner.query_start_loc.np
        accepted = trees.accepted or [[]] * len(trees.query_row)
        self._step = []
        for slot, (row, context, path) in enumerate(
            zip(trees.query_row.tolist(), trees.context.tolist(), accepted, strict=False)
        ):
            start = int(query_start[slot])
            rows = np.array([*range(start, row + 1), *(row + offset for offset in path)], np.int32)
            self._step.append((slot, context - (row - start), rows))

    def forget(self, request_id: str) -> None:
        """See `ModelPasses`."""
        super().forget(request_id)
        self._unread.pop(request_id, None)
        self.blind.discard(request_id)

    def _begin(self, request_id: str, blocks: Any, computed: int) -> None:
        super()._begin(request_id, blocks, computed)
        self._unread.pop(request_id, None)
        self.blind.discard(request_id)

    def advance(self, num_tokens: Sequence[int], drafting: set[str]) -> None:
        """See `ModelPasses`: take what the step has committed, and read what has to be."""
        self._growth.clear()
        self.passes.clear()
        self._roots.clear()
        self._streams.clear()
        self._take(num_tokens)
        parts: list[tuple[int, int, int]] = []
        # Who comes first in a text that several share reads it first.
        for slot in sorted(range(len(self._step)), key=lambda slot: self._step[slot][1]):
            name = self._runner.input_batch.req_ids[slot]
            unread = self._unread.get(name)
            if unread is None or name in self.blind:
                continue
            end = unread.first + unread.count
            if self._read_of(name) < unread.first:
                self.blind.add(name)
                del self._unread[name]
                continue
            fills = end // self._block_size > unread.first // self._block_size
            if name in drafting or fills or unread.count >= MOST_UNREAD:
                parts.append((slot, unread.first, end))
                self._known[name] = end
                self._fill(name, unread.first, end)
        for _ in drafting & self.blind:
            self._count("fallbacks:hidden_states_missing")
        limit = self._target_config.scheduler_config.max_num_batched_tokens
        limit = max(limit - self._again * len(drafting), 1)
        for stretches in packed(parts, limit):
            self._read(stretches, num_tokens, drafting)
        for slot, _, _ in parts:
            self._unread.pop(self._runner.input_batch.req_ids[slot], None)

    def _take(self, num_tokens: Sequence[int]) -> None:
        """Put the features of the step's committed rows behind those that wait."""
        names = self._runner.input_batch.req_ids
        taken, counts = [], []
        for slot, first, rows in self._step:
            # The token behind the last one is not known yet.
            count = min(len(rows), num_tokens[slot] - 1 - first)
            counts.append(max(count, 0))
            taken.append(rows[: counts[-1]])
        features = torch.split(self._features_of(np.concatenate(taken)), counts)
        for (slot, first, _), part, count in zip(self._step, features, counts, strict=True):
            if not count or names[slot] in self.blind:
                continue
            unread = self._unread.setdefault(names[slot], _Unread(first, 0, []))
            if first != unread.first + unread.count:  # the step was done again, or one is missing
                unread = self._unread[names[slot]] = _Unread(first, 0, [])
            unread.parts.append(part)
            unread.count += count

    def _features_of(self, rows: Int32) -> torch.Tensor:
        """``[num_rows, hidden_size]`` of rows of the step's query."""
        index = self._to(rows.astype(np.int64))
        layers = self.head.layers
        if not layers:
            return self.head.features(self._runner.step_hidden[index])
        streams = [self._runner.step_streams[self._runner.aux_layers.index(layer)][index] for layer in layers]
        return self.head.features(torch.cat(streams, 1))

    def _read(self, parts: list[tuple[int, int, int]], num_tokens: Sequence[int], drafting: set[str]) -> None:
        """One pass over stretches of committed tokens; those that reach their request's end have roots then."""
        started = time.perf_counter()
        batch = self._runner.input_batch
        slots, start, end = (np.array(column, np.int32) for column in zip(*parts, strict=True))
        known = np.array(num_tokens, np.int32)
        features, again = [], np.zeros(len(parts), np.int32)
        for index, (slot, first, last) in enumerate(parts):
            name = batch.req_ids[slot]
            unread = self._unread[name]
            whole = unread.parts[0] if len(unread.parts) == 1 else torch.cat(unread.parts)
            features.append(whole[first - unread.first : last - unread.first])
            before = self._features_before(name, features[-1])
            if name in drafting and last == num_tokens[slot] - 1:
                again[index] = self._again
                features.append(before)
                self._growth[name] = Growth(slot, last)
        self._features = torch.cat(features)
        if self.head.num_before:
            whose = np.repeat(slots, end - start)
            places = offsets(end - start) + np.repeat(start, end - start)
            self._features = self.head.beside(self._features, self._tokens_before(whose, places + 1))
        (normed, stream), row_start = self._pass(
            slots,
            start,
            end + again,
            lambda owners, places: batch.token_ids_cpu[owners, places + 1],
            # Behind the last row stands the one before it, read again.
            lambda owners, places: np.where(places < known[owners] - 1, places, np.maximum(places - 2, 0)),
        )
        roots = [
            (index, name)
            for index, (slot, *_) in enumerate(parts)
            if (name := batch.req_ids[slot]) in self._growth
        ]
        if roots:
            # What is read again comes first: it says the token before.
            asked = [
                row_start[index + 1] - 1 - row for index, _ in roots for row in range(self.depths_a_pass)
            ]
            wanted = self._to(np.array(asked))
            self._plant([name for _, name in roots], normed[wanted], stream[wanted])
        reads = len(normed) > MAX_NEW_TOKENS * len(parts)
        self.passes.append(Pass(time.perf_counter() - started, len(normed), len(parts), reads))

    def _tokens_before(self, owners: Any, places: Int32) -> torch.Tensor:
        """int64 ``[num_rows, num_before]`` before the tokens at these places of requests' texts; see `FIRST_READ`."""
        back = places[:, None] - np.arange(self.head.num_before, 0, -1)
        found = self._runner.input_batch.token_ids_cpu[owners[:, None], np.maximum(back, FIRST_READ)]
        return self._to(np.where(found < self._num_tokens, found, 0).astype(np.int64))

    def _features_before(self, name: str, features: torch.Tensor) -> torch.Tensor:
        """``[depths_a_pass - 1, hidden_size]``: of the rows before a request's last one; ``features`` are read."""
        return features[:0]

    def _plant(self, names: Sequence[str], normed: torch.Tensor, stream: torch.Tensor) -> None:
        """Requests have roots: ``[num_requests * depths_a_pass, hidden_size]`` of each."""
        self._streams.keep(names, stream)
        for name, ids, log_q in zip(names, *self._distributions(normed), strict=True):
            self._roots[name] = ids, log_q

    def nodes(self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Rows:
        """See `DraftModel`: each takes what came out at its parent."""
        self._features = self._streams.at(request_ids, parents)
        return super().nodes(request_ids, parents, tokens)

    def _grow(self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Any:
        normed, stream = super()._grow(request_ids, parents, tokens)
        self._streams.keep(request_ids, stream)
        return normed

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
        assert self._features is not None
        features, self._features = self._features, None
        # Tokens behind the vocabulary stand for images.
        return self.head(torch.where(tokens < self._num_tokens, tokens, 0), positions, features)

    def _logits(self, hidden: Any) -> Any:
        return self.head.logits(hidden)

    def calibration_pass(self, rows: int) -> None:
        """See `ModelPasses`."""
        model = self._target_config.model_config
        self._features = torch.zeros((rows, self.head.width), dtype=model.dtype, device=self._runner.device)
        normed, _ = self._forward(self._random_tokens(rows), np.zeros(rows, np.int32), None, None)
        self._distributions(normed)
