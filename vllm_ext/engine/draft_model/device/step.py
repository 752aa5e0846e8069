# SPDX-License-Identifier: Apache-2.0
"""What a model that drafts on the device does in a step, as functions of buffers that stay where they are.

So a CUDA graph can hold each (`graphs`): what is launched depends on the arguments alone, and requests that fill
a batch up write nowhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch

from vllm_ext.engine.draft_model.device.passes import DevicePasses, Likeliest, Texts
from vllm_ext.kernels.ancestor_bits import ancestor_bits
from vllm_ext.kernels.backends import Backend
from vllm_ext.kernels.device_trees import EMPTY, WORDS, SlotTrees
from vllm_ext.kernels.drawn_rows import K_SEQ, RECURSIVE, DrawnTrees
from vllm_ext.proposers import likeliest_device
from vllm_ext.proposers.draft_model import DraftModelProposer
from vllm_ext.proposers.mixed_device import Mixed, common_widths
from vllm_ext.proposers.sampled_device import SUPPORT, Grown, Growth, Limits, Rows, shaped, uniform


class Kind(Enum):
    """Of the trees of a batch."""

    GREEDY = "chosen, and no request samples"
    CHOSEN = "chosen"
    DRAWN = "drawn"
    MIXED = "of either kind"


# Of each request, what the host knows.
INTEGERS = ("slot", "home", "blocks", "end", "depth", "chain", "drawn", "top_k", "seed")
FLOATS = ("temperature", "top_p", "min_p")
# Of a request that fills a batch up: a text of one token, which has no room for draft nodes. Its home is no slot's.
NOBODY = {"slot": 0, "blocks": 0, "end": 1, "depth": 0, "chain": 0, "drawn": 0, "top_k": 1, "seed": 0}
NOBODY_FLOATS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}


class DraftStep:
    """Reading, growing, and the trees of all slots.

    Args:
        passes: of the model.
        proposer: grows trees.
        num_nodes: most nodes of a tree.
        slots: how many.
        req_states: vLLM's ``RequestState``.
        backend: of the kernels.
        beside: whether trees that are chosen grow beside others (`joint_device`).
    """

    def __init__(
        self,
        passes: DevicePasses,
        proposer: DraftModelProposer,
        num_nodes: int,
        slots: int,
        req_states: Any,
        backend: Backend,
        beside: bool = False,
    ) -> None:
        self.passes, self.num_nodes, self.max_num_reqs = passes, num_nodes, slots
        self._proposer, self._states, self._backend = proposer, req_states, backend
        # Of trees with so many nodes at most, and int64 [requests] the `trees` they will be: how they are chosen.
        self.chosen: Callable[[int, torch.Tensor], Growth] = lambda level, _: proposer.chosen_on_device(level)
        self._device: torch.device = req_states.device
        levels = range(1, num_nodes + 1)
        chosen, drawn = proposer.chosen_on_device, proposer.drawn_on_device
        if beside:
            chosen = functools.partial(likeliest_device.Likeliest, max_depth=proposer.most_depth)
        asked = max(sum(common_widths(chosen(level), drawn(level))) for level in levels)
        self.draws = proposer.draws and drawn(num_nodes).drawn
        self._kind = K_SEQ if drawn(num_nodes).independent else RECURSIVE
        # One more than there are slots: the home of whoever fills a batch up.
        self.trees = SlotTrees.of_size(slots + 1, num_nodes, self._device)
        self.drawn = DrawnTrees.of_size(slots + 1, num_nodes, 1 + asked, SUPPORT, self._device)

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        self.tokens = zeros(torch.int64, slots, num_nodes)  # of the batch's trees, for vLLM
        self._integers = zeros(torch.int64, len(INTEGERS), slots)
        self._floats = zeros(torch.float32, len(FLOATS), slots)
        self._lengths = zeros(torch.int32, slots)
        self._roots = Likeliest(zeros(torch.int32, slots, SUPPORT), zeros(torch.float32, slots, SUPPORT))

    def give(self, size: int, known: dict[str, Any]) -> None:
        """Say whose step it is.

        Args:
            size: of the batch.
            known: by name of `INTEGERS` and `FLOATS`, numbers ``[requests]`` of no more requests than ``size``.
        """
        for names, nobody, dtype, buffer in (
            (INTEGERS, {**NOBODY, "home": self.max_num_reqs}, np.int64, self._integers),
            (FLOATS, NOBODY_FLOATS, np.float32, self._floats),
        ):
            packed = np.empty((len(names), size), dtype)
            for row, name in zip(packed, names, strict=True):
                row[:] = nobody[name]
                row[: len(known[name])] = known[name]
            buffer[:, :size] = self.passes.to_device(packed, buffer.dtype)

    def give_nobody(self, size: int) -> None:
        """A batch that writes nowhere."""
        self.give(size, dict.fromkeys((*INTEGERS, *FLOATS), ()))

    def texts(self, size: int) -> Texts:
        """Of the batch, as `read` has measured them."""
        slot, _, blocks, *_ = self._integers[:, :size]
        return Texts(slot, self._lengths[:size], blocks)

    def read(self, size: int) -> None:
        """Read each text's last tokens."""
        self.measure(size)
        self.put_roots(self.passes.read_last(self.texts(size)))

    def measure(self, size: int) -> None:
        """Find out how long texts are."""
        slot, _, _, end, *_ = self._integers[:, :size]
        # Of incomplete prompts the host knows it, and the tokens behind are there.
        ahead = self.passes.ahead
        known = end + ahead if ahead else end
        self._lengths[:size] = torch.where(end > 0, known, self._states.total_len.gpu[slot]).to(torch.int32)

    def put_roots(self, found: Likeliest) -> None:
        """Keep the distributions after the texts' last tokens, for `grow`."""
        for kept, part in zip(self._roots, found, strict=True):
            kept[: len(part)] = part

    def grow(self, size: int, level: int, kind: Kind) -> None:
        """Grow a tree of each request: ``trees``, ``drawn``, ``tokens``.

        Args:
            size: of the batch.
            level: most nodes of a tree.
            kind: of trees.
        """
        known = dict(zip(INTEGERS, self._integers[:, :size], strict=True))
        texts = self.texts(size)
        is_drawn = known["drawn"] != 0
        proposer = self._proposer
        if kind is Kind.DRAWN:
            growth: Growth = proposer.drawn_on_device(level)
        elif kind is Kind.MIXED:
            growth = Mixed(self.chosen(level, known["home"]), proposer.drawn_on_device(level), is_drawn)
        else:
            growth = self.chosen(level, known["home"])
        rows = self._grow(growth, kind, texts, known)
        grown = growth.grown()
        self._put(grown, texts, rows, known["home"], is_drawn)
        if (groups := growth.groups()) is not None:
            missing = self.num_nodes - groups.shape[1]
            self.trees.groups[known["home"]] = torch.nn.functional.pad(groups, (1, missing), value=EMPTY)

    def _grow(self, growth: Growth, kind: Kind, texts: Texts, known: dict[str, torch.Tensor]) -> Rows:
        """Grow all trees.

        Returns:
            The distributions after the roots, then after the nodes that were asked for, by place.
        """
        size = texts.number
        limits = Limits(known["depth"], known["chain"] != 0)
        sampling = None
        if kind is not Kind.GREEDY:
            temperature, top_p, min_p = self._floats[:, :size]
            sampling = [temperature, top_p, known["top_k"], min_p]
        numbers = SUPPORT * (1 + max(sum(growth.widths), growth.num_nodes))
        noise_of: list[torch.Tensor] = []

        def noise(first: int, count: int) -> torch.Tensor:
            if not noise_of:  # of the whole step
                made = uniform(known["seed"], texts.lengths, torch.arange(numbers, device=self._device))
                noise_of.append(made.view(size, -1, SUPPORT))
            return noise_of[0][:, first : first + count]

        def rows_of(found: Likeliest) -> Rows:
            shape = size, -1, SUPPORT
            return shaped(found.ids.view(shape), found.log_q.view(shape), sampling)

        room = self.passes.room(texts, growth.widths)
        rows = rows_of(Likeliest(*(part[:size] for part in self._roots)))
        found, parents = [rows], torch.empty((size, 0), dtype=torch.int32, device=self._device)
        for depth in range(self.num_nodes):
            asked = growth.give(depth, rows, limits, noise)
            if asked is None:
                break
            past = parents.shape[1]
            parents = torch.cat([parents, asked.parents], 1)
            rows = rows_of(self.passes.nodes(texts, room, asked.tokens, parents, past))
            found.append(rows)
        return Rows(*(torch.cat(part, 1) for part in zip(*found, strict=True)))

    def _put(
        self, grown: Grown, texts: Texts, rows: Rows, home: torch.Tensor, is_drawn: torch.Tensor
    ) -> None:
        """Write the trees where they live."""
        missing = self.num_nodes - grown.tokens.shape[1]
        tokens, parents, depths, child_of, places = (
            torch.nn.functional.pad(part, (0, missing), value=EMPTY) for part in grown
        )

        def with_root(values: torch.Tensor, root: int) -> torch.Tensor:
            return torch.nn.functional.pad(values, (1, 0), value=root)

        parents_of_rows = with_root(parents, EMPTY)
        self.trees.parents[home] = parents_of_rows
        self.trees.depths[home] = with_root(torch.where(parents >= 0, depths, 1), 0)
        size, width = parents_of_rows.shape
        row_start = torch.arange(0, (size + 1) * width, width, dtype=torch.int32, device=self._device)
        bits = ancestor_bits(parents_of_rows.flatten(), row_start, backend=self._backend)
        self.trees.bits[home] = bits.view(size, width, WORDS)
        self.drawn.kind[home] = (is_drawn * self._kind).to(torch.int32)  # or CHOSEN, which is 0
        self.drawn.child_of[home] = with_root(child_of, EMPTY)
        # Of a node without a place there is no distribution: row 0 is the root's.
        self.drawn.q_row[home] = with_root(torch.where(places >= 0, places + 1, EMPTY), 0)
        self.drawn.ids[home, : rows.ids.shape[1]] = torch.where(rows.q > 0.0, rows.ids, EMPTY)
        self.drawn.q[home, : rows.q.shape[1]] = rows.q
        last = self._states.all_token_ids.gpu[texts.slots, texts.lengths.to(torch.int64) - 1]
        self.tokens[:size] = torch.where(child_of >= 0, tokens, last[:, None])
