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
from vllm.config.compilation import CUDAGraphMode

from vllm_ext.engine.draft_model.device.eagle import EagleOnDevice
from vllm_ext.engine.draft_model.device.graphs import DraftGraphs
from vllm_ext.engine.draft_model.device.heads import CloverOnDevice, MedusaOnDevice
from vllm_ext.engine.draft_model.device.passes import Committed, DevicePasses
from vllm_ext.engine.draft_model.device.separate import SeparateOnDevice
from vllm_ext.engine.draft_model.device.slice import SliceOnDevice
from vllm_ext.engine.draft_model.device.step import DraftStep, Kind
from vllm_ext.engine.models import exit_heads
from vllm_ext.engine.v2.speculators.base import StepRows, TreeSpeculator
from vllm_ext.kernels import backends
from vllm_ext.proposers.clover import CloverOptions
from vllm_ext.proposers.draft_model import DraftModelOptions, DraftModelProposer
from vllm_ext.proposers.eagle import EagleOptions
from vllm_ext.proposers.layerskip import LayerSkip
from vllm_ext.proposers.medusa import MedusaOptions
from vllm_ext.proposers.unified_skip import UnifiedSkip, kept_layers

READ_EVERY = 16  # of steps without drafts: the model then reads what they have put out, at once


class ModelSpeculator(TreeSpeculator):
    """Passes of a model that drafts, and a tree for each slot."""

    # vLLM looks for its managers of graphs among the attributes, to drop those of profiling.
    graphs: DraftGraphs | None = None
    beside = False  # whether trees grow beside others'

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        options: Any = self.settings.options
        vocab_size = vllm_config.model_config.get_vocab_size()
        proposer = self._drafting(self.settings.proposer_class.from_options(options, vocab_size))
        self._config = vllm_config
        self.passes = _passes(vllm_config, proposer, req_states)
        proposer.deepest = self.passes.deepest
        self.max_depth = self._deepest(min(proposer.most_depth, self.num_nodes))
        self.passes.most_new = 1 + self.max_depth
        self.step = DraftStep(
            self.passes, proposer, self.num_nodes, self.max_num_reqs, req_states, backends.V2, self.beside
        )
        self.trees, self.drawn = self.step.trees, self.step.drawn
        # By slot.
        self._is_drawn, self._chains, self._depths, self._behind = (
            np.zeros(self.max_num_reqs, np.int64)
            for _ in range(4)  # behind: tokens that the model has not read, at most
        )
        self._sampling: Any = None  # vLLM's ``SamplingStates``
        self._verifier: Any = None  # `TreeVerifier`
        self._all_layers: Sequence[int] = ()  # of which the target hands out hidden states, for whomever

    def _drafting(self, proposer: Any) -> DraftModelProposer:
        """The one of a method that asks a model."""
        assert isinstance(proposer, DraftModelProposer)
        return proposer

    def _deepest(self, asked: int) -> int:
        """Of a tree's nodes, where the model's own are not deeper than ``asked``."""
        return asked

    @property
    def memory(self) -> tuple[int, str]:
        return sum(part.nbytes for part in (*self.trees, *self.drawn)), "device"

    @property
    def own_layers(self) -> Sequence[str]:
        return self.passes.own_layers

    @property
    def aux_layers(self) -> Sequence[int]:
        return self.passes.aux_layers

    def load(self, target: Any) -> None:
        self.passes.load(target)

    def bind(self, runner: Any) -> None:
        self.passes.bind(runner)
        self._all_layers = runner.aux_layers
        self._sampling, self._verifier = runner.sampler.sampling_states, runner.rejection_sampler

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        # With adapters, and where ranks must agree on each pass, passes have no fixed shapes.
        varies = self._config.lora_config is not None or self._config.parallel_config.data_parallel_size > 1
        if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL and not varies:
            self.graphs = DraftGraphs(self._config, self.device, self.step, self.levels)

    def capture(self) -> None:
        if self.graphs is not None:
            self.graphs.capture_all()

    def start(self, slot: int, request: Any, chain: bool, most_depth: int) -> None:
        params = request.sampling_params
        random = params.temperature > 0.0 and params.seed is None
        # What is drawn without a grammar's mask would be rejected where the mask forbids it.
        by_itself = not (self.path_dependent[slot] or self.structured[slot])
        # A part of what was drawn is not what verification of it expects; of chosen nodes any part is.
        by_itself &= self.most_nodes[slot] >= self.num_nodes
        self._is_drawn[slot] = self.step.draws and random and not chain and by_itself
        self._chains[slot] = chain
        self._depths[slot] = most_depth
        self._behind[slot] = 0

    def has_drawn(self, slots: Any) -> bool:
        return bool(self._is_drawn[slots].any())

    def needs(self, has_drafts: bool) -> bool:
        return False

    def learn(self, rows: StepRows) -> None:
        """It learns nothing."""

    def serve(self) -> None:
        """See above."""

    def forget(self) -> None:
        """See above."""

    def draft(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        number = input_batch.num_reqs
        level = kwargs.get("num_speculative_tokens", self.num_nodes)
        if dummy_run:
            self.passes.dummy(input_batch.num_tokens)
            return self.step.tokens[:number]
        slots = input_batch.idx_mapping_np
        behind = self._behind[slots]
        passes = self.passes
        rests = not (passes.follows or input_batch.has_prefill) and behind.max() < READ_EVERY
        if not level and (rests or not passes.reads):
            self._behind[slots] += np.minimum(input_batch.num_scheduled_tokens, self.passes.most_new)
            return self.step.tokens[:number]
        self._behind[slots] = 0
        path = self._verifier.walked.path if input_batch.num_draft_tokens else None
        _, _, hidden, streams, num_new, *_ = args  # as vLLM's `BaseSpeculator.propose` has them
        own = [streams[self._all_layers.index(layer)] for layer in passes.aux_layers]  # rules may read others
        passes.take(input_batch, Committed(hidden, own, path, num_new))
        self._draft(input_batch, slots, behind, level)
        return self.step.tokens[:number]

    def _draft(self, input_batch: Any, slots: Any, behind: Any, level: int) -> None:
        """Read, and grow trees if ``level`` is not 0."""
        step, graphs, number = self.step, self.graphs, input_batch.num_reqs
        size = graphs.covering(number) if graphs else number
        step.give(size, self._known(input_batch, slots))
        if self.passes.is_short(input_batch, behind):
            if not (graphs and graphs.run(size)):
                step.read(number)
        else:
            step.measure(size)
            step.put_roots(self.passes.read(input_batch, step.texts(number), behind))
        if level:
            kind = self._kind_of(slots)
            if not (graphs and graphs.run(size, level, kind)):
                step.grow(number, level, kind)

    def _known(self, input_batch: Any, slots: Any) -> dict[str, Any]:
        """See `DraftStep.give`."""
        states, done = self._sampling, input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        known = {name: getattr(states, name).np[slots] for name in ("temperature", "top_p", "top_k", "min_p")}
        return {
            **known,
            "seed": states.seeds.np[slots],
            "slot": slots,
            "home": slots,
            "blocks": self.passes.blocks(slots),
            "end": np.where(done < input_batch.prefill_len_np, done, 0),
            "depth": self._depths[slots],
            "chain": self._chains[slots],
            "drawn": self._is_drawn[slots],
        }

    def _kind_of(self, slots: Any) -> Kind:
        """Of the trees that these get."""
        drawn = self._is_drawn[slots]
        if drawn.all():
            return Kind.DRAWN
        if drawn.any():
            return Kind.MIXED
        return Kind.CHOSEN if self._sampling.temperature.np[slots].any() else Kind.GREEDY


def _passes(vllm_config: Any, proposer: DraftModelProposer, req_states: Any) -> DevicePasses:
    """Of a method's model."""
    options = proposer.options
    if isinstance(options, EagleOptions):
        return EagleOnDevice(vllm_config, options, req_states, backends.V2)
    if isinstance(options, MedusaOptions):
        return MedusaOnDevice(vllm_config, options, req_states, backends.V2)
    if isinstance(options, CloverOptions):
        return CloverOnDevice(vllm_config, options, req_states, backends.V2)
    if isinstance(options, DraftModelOptions):
        return SeparateOnDevice(vllm_config, options, req_states, backends.V2)
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    if isinstance(proposer, UnifiedSkip):
        kept, head = kept_layers(options, num_layers), None
        return SliceOnDevice(vllm_config, kept, head, req_states, backends.V2)
    assert isinstance(proposer, LayerSkip)
    (exit_layer,) = proposer.exits(num_layers)
    if options.heads is not None:
        dtype = vllm_config.model_config.dtype
        head = exit_heads.load(options.heads, [exit_layer], dtype, req_states.device)[exit_layer]
    else:
        head = None
    return SliceOnDevice(vllm_config, range(exit_layer), head, req_states, backends.V2)
