# SPDX-License-Identifier: Apache-2.0
"""The target's first layers draft, the others verify: what the draft has computed is not computed again.

A draft pass runs the layers below the exit over new nodes and keeps what these hand out. When the tree is finished,
its leaves, which nothing was asked about, go through the same layers, and all keys and values below the exit are put in
the tree's order, which is where the target's step would write them. That step then begins behind the exit.

It does so if it has nothing but rows that were drafted, of the same tokens in the same places. With any other row in it
(a prompt, a request without drafts) the whole model runs over the whole step, and writes all again.

The model is cut at every exit there is, into pieces that are compiled once each: an exit is a number of pieces.

Source: LayerSkip, arXiv 2404.16710, section 3.4: the exit's cache of hidden states. Deviations: trees, and several
requests; the leaves' pass is apart.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_ext.engine.draft_model.passes import forward_context
from vllm_ext.engine.draft_model.self_speculation import SelfDraft, attention_names
from vllm_ext.engine.models.exit_heads import Head
from vllm_ext.engine.models.layer_slices import LayerSlice
from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.proposers.tree import DraftTree, Int32


@dataclass(frozen=True, slots=True)
class _Settled:
    """A tree that waits to be verified, its root first."""

    context: int
    tokens: Int32
    parents: Int32
    rows: list[int]  # of what the exit has handed out


class EarlyExit(SelfDraft):
    """Exits of one model, of which one is in use at a time.

    Args:
        vllm_config: the target's.
        exits: numbers of layers that may draft, ascending, from 1 to one less than there are.
        heads: by exit, what is done to the normed hidden states ``[num_rows, hidden_size]`` before the target's head.
    """

    def __init__(
        self, vllm_config: Any, exits: Sequence[int], heads: Mapping[int, Head] | None = None
    ) -> None:
        super().__init__(vllm_config)
        self.exits = list(exits)
        self.choice = 0  # index of the exit that drafts; may change between `advance` and `roots`
        self.watched = False  # whether the step to come is to tell what every exit would have said
        self.began_behind: int | None = None  # index of the exit behind which the target's last step began
        self._heads = dict(heads or {})
        self._pieces: list[LayerSlice] = []
        self._movers: list[Callable[[torch.Tensor, torch.Tensor], None]] = []  # by exit
        # Of the rows of this step's passes: what the exit handed out, and what each exit up to it would say.
        self._streams: list[torch.Tensor] = []
        self._normed: list[list[torch.Tensor]] = []
        self._where: dict[str, list[int]] = {}  # by request, the row of each node asked for
        self._settled: dict[str, _Settled] = {}
        self._seen: list[torch.Tensor] = []  # by exit, `[num_rows, hidden]` of the target's last step

    def load(self, target: Any) -> None:
        """See `DraftPasses`."""
        super().load(target)
        bounds = [0, *self.exits, len(target.model.layers)]
        self._pieces = [
            LayerSlice(self._target_config, target, range(first, last), hand_out=last != bounds[-1])
            for first, last in itertools.pairwise(bounds)
        ]

    def bind(self, runner: Any) -> None:
        """See `DraftPasses`."""
        super().bind(runner)
        context = self._target_config.compilation_config.static_forward_context
        for exit_layer in self.exits:
            below = self._target.model.layers[:exit_layer]
            layers = [context[name] for layer in below for name in attention_names(layer)]
            self._movers.append(layers[0].impl.kv_mover(layers))

    def begin_step(self, scheduler_output: Any) -> None:
        """See `DraftPasses`: what a preempted request had in its blocks is not in those it has now."""
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._settled.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """See `DraftPasses`."""
        super().forget(request_id)
        self._settled.pop(request_id, None)

    def advance(self, num_tokens: Sequence[int], drafting: set[str]) -> None:
        """See `DraftPasses`."""
        super().advance(num_tokens, drafting)
        self._streams.clear()
        self._normed.clear()
        self._where.clear()
        self._settled.clear()

    def _grow(self, request_ids: Sequence[str], parents: Sequence[int], tokens: Sequence[int]) -> Any:
        first = sum(map(len, self._streams))
        for row, request_id in enumerate(request_ids, first):
            self._where.setdefault(request_id, []).append(row)
        return super()._grow(request_ids, parents, tokens)

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
        stream, normed = None, []
        for number, piece in enumerate(self._pieces[: self.choice + 1]):
            rows, stream = piece(positions, hidden=stream) if number else piece(positions, tokens=tokens)
            normed.append(rows)
        assert stream is not None
        self._streams.append(stream)
        self._normed.append(normed)
        return normed[-1]

    def _logits(self, hidden: Any) -> Any:
        return super()._logits(self._adapted(self.choice, hidden))

    def _adapted(self, choice: int, normed: torch.Tensor) -> torch.Tensor:
        head = self._heads.get(self.exits[choice])
        return normed if head is None else head(normed)

    def settle(self, request_ids: Sequence[str], trees: Sequence[DraftTree]) -> None:
        """See `DraftPasses`: leaves are computed, and all KV below the exit is put in the trees' order."""
        started = time.perf_counter()
        orders: dict[str, list[int]] = {}
        leaves: list[tuple[str, int, int]] = []
        for request_id, tree in zip(request_ids, trees, strict=True):
            growth = self._growth[request_id]
            asked = {
                (parent, token): node
                for node, (parent, token) in enumerate(zip(growth.parents, growth.tokens, strict=True))
            }
            order, count = [0], len(asked)
            for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
                node = asked.get((order[parent + 1], token))
                if node is None:
                    leaves.append((request_id, order[parent + 1], token))
                    node, count = count, count + 1
                order.append(node)
            orders[request_id] = order
        if leaves:
            names, parents, tokens = map(list, zip(*leaves, strict=True))
            self._grow(names, parents, tokens)
            self._timed(started, names)
        self._arrange(orders)
        for request_id, tree in zip(request_ids, trees, strict=True):
            growth, order = self._growth[request_id], orders[request_id]
            rows = self._where[request_id]
            self._settled[request_id] = _Settled(
                growth.context,
                np.array([growth.tokens[node] for node in order], np.int32),
                np.array([-1, *(tree.parents + 1)], np.int32),
                [rows[node] for node in order],
            )

    def _arrange(self, orders: Mapping[str, list[int]]) -> None:
        """Move the KV of each request's nodes, in the layers below the exit, to their places in its tree."""
        moves = [
            (growth.slot, growth.context + node, growth.context + place)
            for request_id, order in orders.items()
            for growth in [self._growth[request_id]]
            for place, node in enumerate(order)
            if node != place
        ]
        if moves:
            slots, source, target = np.array(moves, np.int32).T
            self._movers[self.choice](self._kv_slots(slots, source), self._kv_slots(slots, target))

    def verify(
        self, request_ids: Sequence[str], trees: StepTrees, positions: torch.Tensor
    ) -> torch.Tensor | None:
        """The target's step, begun behind the exit. In vLLM's forward context.

        Args:
            request_ids: the batch.
            trees: the step's rows.
            positions: int ``[num_rows]`` of these; there may be more, which are padding.

        Returns:
            ``[num_rows, hidden_size]`` as the whole model would give; None where it has to run.
        """
        rows = self._rows(request_ids, trees)
        self.began_behind = None if rows is None else self.choice
        if rows is None:
            return None
        padding = [rows[0]] * (len(positions) - len(rows))
        index = self._to(np.array(rows + padding, np.int64))
        hidden: torch.Tensor | None = torch.cat(self._streams)[index]
        if self.watched:
            self._seen = [torch.cat(parts)[index] for parts in zip(*self._normed, strict=True)]
        for piece in self._pieces[self.choice + 1 :]:
            normed, hidden = piece(positions, hidden=hidden)
            if self.watched and hidden is not None:
                self._seen.append(normed)
        return normed

    def _rows(self, request_ids: Sequence[str], trees: StepTrees) -> list[int] | None:
        """Which of the exit's rows are the step's; None where some are not among them."""
        if len(trees.decoding) != len(request_ids):
            return None
        rows: list[int] = []
        for index, request_id in enumerate(request_ids):
            settled, span = self._settled.get(request_id), trees.rows(index)
            count = span.stop - span.start
            if (
                settled is None
                or settled.context != trees.context[index]
                or not np.array_equal(settled.tokens[:count], trees.tokens[span])
                or not np.array_equal(settled.parents[:count], trees.parents[span])
            ):
                return None
            rows += settled.rows[:count]
        return rows

    def shadows(self, rows: Sequence[int]) -> Int32 | None:
        """What every exit would have said in the target's last step: int32 ``[num_exits, len(rows)]`` tokens.

        Args:
            rows: of the step.

        Returns:
            None where the step was not watched, or did not begin behind an exit.
        """
        seen, self._seen = self._seen, []
        if not seen:
            return None
        index = self._to(np.array(rows, np.int64))
        with torch.inference_mode():
            hidden = torch.cat([self._adapted(choice, normed[index]) for choice, normed in enumerate(seen)])
            logits = self._target.compute_logits(hidden)[:, : self._vocab_size]
            best: Int32 = logits.argmax(1).to(torch.int32).cpu().numpy()
        return best.reshape(len(seen), len(rows))

    def draft_pass(self, rows: int) -> None:
        """The layers below the exit over so many rows, without attention or head."""
        self._forward(self._random_tokens(rows), np.zeros(rows, np.int32), None, None)
        self._streams.clear()
        self._normed.clear()

    def rest_pass(self, rows: int) -> torch.Tensor:
        """The layers behind the exit over so many rows, without attention or head: ``[num_rows, hidden_size]``."""
        model = self._target_config.model_config
        shape = rows, model.get_hidden_size()
        hidden: Any = torch.randn(shape, dtype=model.dtype, device=self._runner.device)
        positions = self._to(np.zeros(rows, np.int64))
        with forward_context(self.config, self.layers, rows, None, None):
            for piece in self._pieces[self.choice + 1 :]:
                normed, hidden = piece(positions, hidden=hidden)
        return normed

    def rest_calibration_pass(self, rows: int) -> None:
        """The same with the target's head."""
        hidden = self.rest_pass(rows)
        with torch.inference_mode():
            self._target.compute_logits(hidden)
