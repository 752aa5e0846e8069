# SPDX-License-Identifier: Apache-2.0
"""Drafts of the V2 runner by a model, grown on the device: no value of a tensor is asked for on the host.

Requests that sample without a seed get trees that are drawn from the model's distributions, which verification then
needs (`kernels.drawn_rows`); all others the likeliest nodes, and the target's own draws. See `proposers.draft_model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

from vllm_ext.engine.draft_model.device_passes import DevicePasses, Likeliest, Texts
from vllm_ext.engine.draft_model.device_separate import SeparateOnDevice
from vllm_ext.engine.draft_model.device_slice import SliceOnDevice
from vllm_ext.engine.models import exit_heads
from vllm_ext.engine.v2.speculator import BACKEND, StepRows, TreeSpeculator
from vllm_ext.kernels.ancestor_bits import ancestor_bits
from vllm_ext.kernels.device_trees import EMPTY, WORDS, SlotTrees
from vllm_ext.kernels.drawn_rows import K_SEQ, RECURSIVE, DrawnTrees
from vllm_ext.proposers.draft_model import DraftModelOptions, DraftModelProposer
from vllm_ext.proposers.layerskip import LayerSkip
from vllm_ext.proposers.mixed_device import Mixed, common_widths
from vllm_ext.proposers.sampled_device import SUPPORT, Grown, Growth, Limits, Rows, shaped, uniform
from vllm_ext.proposers.unified_skip import UnifiedSkip, balanced

READ_EVERY = 16  # of steps without drafts: the model then reads what they have put out, at once


class ModelSpeculator(TreeSpeculator):
    """Passes of a model that drafts, and a tree for each slot."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        options: Any = self.settings.options
        vocab_size = vllm_config.model_config.get_vocab_size()
        proposer = self.settings.proposer_class.from_options(options, vocab_size)
        assert isinstance(proposer, DraftModelProposer)
        self._proposer = proposer
        self.passes = _passes(vllm_config, proposer, req_states)
        self.max_depth = min(options.max_depth, self.num_nodes)
        self.trees = SlotTrees.of_size(self.max_num_reqs, self.num_nodes, device)
        new, levels = proposer, range(1, self.num_nodes + 1)
        asked = max(sum(common_widths(new.chosen_on_device(n), new.drawn_on_device(n))) for n in levels)
        self.drawn = DrawnTrees.of_size(self.max_num_reqs, self.num_nodes, 1 + asked, SUPPORT, device)
        drawn = new.drawn_on_device(self.num_nodes)
        self._draws = drawn.drawn
        self._kind = K_SEQ if drawn.independent else RECURSIVE
        self._nothing = torch.zeros((self.max_num_reqs, self.num_nodes), dtype=torch.int64, device=device)
        self._is_drawn, self._chains, self._depths = (
            UvaBackedTensor(self.max_num_reqs, dtype=torch.int32) for _ in range(3)
        )
        self._behind = np.zeros(self.max_num_reqs, np.int64)  # tokens that the model has not read, at most
        self._sampling: Any = None  # vLLM's ``SamplingStates``

    @property
    def memory(self) -> tuple[int, str]:
        return sum(part.nbytes for part in (*self.trees, *self.drawn)), "device"

    @property
    def own_layers(self) -> Sequence[str]:
        return self.passes.own_layers

    def load(self, target: Any) -> None:
        self.passes.load(target)

    def bind(self, runner: Any) -> None:
        self.passes.bind(runner)
        self._sampling = runner.sampler.sampling_states

    def start(self, slot: int, request: Any, chain: bool, most_depth: int) -> None:
        params = request.sampling_params
        random = params.temperature > 0.0 and params.seed is None
        # What is drawn without a grammar's mask would be rejected where the mask forbids it.
        by_itself = not (self.path_dependent[slot] or self.structured[slot])
        self._is_drawn.np[slot] = self._draws and random and not chain and by_itself
        self._chains.np[slot] = chain
        self._depths.np[slot] = most_depth
        self._behind[slot] = 0

    def apply_staged_writes(self) -> None:
        super().apply_staged_writes()
        for flags in (self._is_drawn, self._chains, self._depths):
            flags.copy_to_uva()

    def has_drawn(self, slots: Any) -> bool:
        return bool(self._is_drawn.np[slots].any())

    def needs(self, has_drafts: bool) -> bool:
        return False

    def learn(self, rows: StepRows) -> None:
        """It learns nothing."""

    def serve(self) -> None:
        """See above."""

    def forget(self) -> None:
        """See above."""

    def draft(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        nothing = self._nothing[: input_batch.num_reqs]
        level = kwargs.get("num_speculative_tokens", self.num_nodes)
        if dummy_run:
            self.passes.dummy(input_batch.num_tokens)
            return nothing
        slots = input_batch.idx_mapping_np
        most_new = 1 + self.max_depth
        rests = not input_batch.has_prefill and self._behind[slots].max() < READ_EVERY
        if not level and (rests or not self.passes.reads):
            self._behind[slots] += np.minimum(input_batch.num_scheduled_tokens, most_new)
            return nothing
        texts, roots = self.passes.read(input_batch, most_new, self._behind[slots])
        self._behind[slots] = 0
        if not level:
            return nothing
        growth = self._growth(level, slots, texts)
        rows = self._grow(growth, slots, texts, roots)
        return self._put(growth.grown(), texts, rows)

    def _growth(self, level: int, slots: Any, texts: Texts) -> Growth:
        """Trees of a step: drawn, chosen, or of either kind."""
        drawn = self._is_drawn.np[slots] != 0
        new = self._proposer
        if drawn.all():
            growth: Growth = new.drawn_on_device(level)
        elif not drawn.any():
            growth = new.chosen_on_device(level)
        else:
            flags = self._is_drawn.gpu[texts.slots] != 0
            growth = Mixed(new.chosen_on_device(level), new.drawn_on_device(level), flags)
        return growth

    def _grow(self, growth: Growth, slots_np: Any, texts: Texts, roots: Likeliest) -> Rows:
        """Grow all trees.

        Returns:
            The distributions after the roots, then after the nodes that were asked for, by place.
        """
        slots, states = texts.slots, self._sampling
        limits = Limits(self._depths.gpu[slots], self._chains.gpu[slots] != 0)
        sampling = None
        if states.temperature.np[slots_np].any():  # numpy
            used = states.temperature, states.top_p, states.top_k, states.min_p
            sampling = [part.gpu[slots] for part in used]
        numbers = SUPPORT * (1 + max(sum(growth.widths), growth.num_nodes))
        noise_of: list[torch.Tensor] = []

        def noise(first: int, count: int) -> torch.Tensor:
            if not noise_of:  # of the whole step
                all_numbers = torch.arange(numbers, device=self.device)
                made = uniform(states.seeds.gpu[slots], texts.lengths, all_numbers)
                noise_of.append(made.view(texts.number, -1, SUPPORT))
            return noise_of[0][:, first : first + count]

        def rows_of(found: Likeliest) -> Rows:
            shape = texts.number, -1, SUPPORT
            return shaped(found.ids.view(shape), found.log_q.view(shape), sampling)

        room = self.passes.room(texts, growth.widths)
        rows = rows_of(roots)
        known, parents = [rows], torch.empty((texts.number, 0), dtype=torch.int32, device=self.device)
        for depth in range(self.num_nodes):
            asked = growth.give(depth, rows, limits, noise)
            if asked is None:
                break
            past = parents.shape[1]
            parents = torch.cat([parents, asked.parents], 1)
            rows = rows_of(self.passes.nodes(texts, room, asked.tokens, parents, past))
            known.append(rows)
        return Rows(*(torch.cat(part, 1) for part in zip(*known, strict=True)))

    def _put(self, grown: Grown, texts: Texts, rows: Rows) -> torch.Tensor:
        """Write the trees into their slots; their tokens."""
        slots, missing = texts.slots, self.num_nodes - grown.tokens.shape[1]
        tokens, parents, depths, child_of, places = (
            torch.nn.functional.pad(part, (0, missing), value=EMPTY) for part in grown
        )

        def with_root(values: torch.Tensor, root: int) -> torch.Tensor:
            return torch.nn.functional.pad(values, (1, 0), value=root)

        parents_of_rows = with_root(parents, EMPTY)
        self.trees.parents[slots] = parents_of_rows
        self.trees.depths[slots] = with_root(torch.where(parents >= 0, depths, 1), 0)
        number, width = parents_of_rows.shape
        row_start = torch.arange(0, (number + 1) * width, width, dtype=torch.int32, device=self.device)
        bits = ancestor_bits(parents_of_rows.flatten(), row_start, backend=BACKEND)
        self.trees.bits[slots] = bits.view(number, width, WORDS)
        self.drawn.kind[slots] = self._is_drawn.gpu[slots] * self._kind  # or CHOSEN, which is 0
        self.drawn.child_of[slots] = with_root(child_of, EMPTY)
        # Of a node without a place there is no distribution: row 0 is the root's.
        self.drawn.q_row[slots] = with_root(torch.where(places >= 0, places + 1, EMPTY), 0)
        self.drawn.ids[slots, : rows.ids.shape[1]] = torch.where(rows.q > 0.0, rows.ids, EMPTY)
        self.drawn.q[slots, : rows.q.shape[1]] = rows.q
        last = self.req_states.all_token_ids.gpu[slots, texts.lengths.to(torch.int64) - 1]
        return torch.where(child_of >= 0, tokens, last[:, None]).to(torch.int64)


def _passes(vllm_config: Any, proposer: DraftModelProposer, req_states: Any) -> DevicePasses:
    """Of a method's model."""
    options = proposer.options
    if isinstance(options, DraftModelOptions):
        return SeparateOnDevice(vllm_config, options, req_states, BACKEND)
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    if isinstance(proposer, UnifiedSkip):
        kept, head = balanced(num_layers, options.speedup), None
        return SliceOnDevice(vllm_config, kept, head, req_states, BACKEND)
    assert isinstance(proposer, LayerSkip)
    (exit_layer,) = proposer.exits(num_layers)
    if options.heads is not None:
        dtype = vllm_config.model_config.dtype
        head = exit_heads.load(options.heads, [exit_layer], dtype, req_states.device)[exit_layer]
    else:
        head = None
    return SliceOnDevice(vllm_config, range(exit_layer), head, req_states, BACKEND)
