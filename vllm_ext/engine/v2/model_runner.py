# SPDX-License-Identifier: Apache-2.0
"""The V2 model runner, taught tree speculation, without a round trip to the host but what a drafter there needs.

vLLM's own steps stay as they are: it lays the drafts out as a chain of one root and ``num_speculative_tokens`` nodes.
Four of its parts are given a subclass when they have been made; a step:

1. the model state (`model_state`) gives nodes their rotary positions and the metadata its trees;
2. the rejection sampler (`rejection_sampler`) samples every row and walks the tree;
3. the KV of the accepted path moves into the slots a chain would have had, so that vLLM's rollback is right;
4. the speculator (`speculators`) makes the trees of the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_ext import patches
from vllm_ext.config import runners, speculative
from vllm_ext.engine import step_extras, tree_layers
from vllm_ext.engine.attention import tree_backend
from vllm_ext.engine.models.hidden_states import HiddenStates
from vllm_ext.engine.processors.v1_interface import V1Processors
from vllm_ext.engine.recurrent.device_rows import DeviceSteps
from vllm_ext.engine.steering.paired_steps import PairedSteps
from vllm_ext.engine.v2 import shares
from vllm_ext.engine.v2.logits_processor import RuleProcessor
from vllm_ext.engine.v2.model_state import TreeState
from vllm_ext.engine.v2.penalties import TreeBadWords, TreePenalties
from vllm_ext.engine.v2.rejection_sampler import LearningSampler, TreeVerifier
from vllm_ext.engine.v2.speculators.base import TreeSpeculator
from vllm_ext.engine.v2.speculators.device import DeviceSpeculator
from vllm_ext.engine.v2.speculators.fused import FusedSpeculator
from vllm_ext.engine.v2.speculators.host import HostSpeculator
from vllm_ext.engine.v2.speculators.model import ModelSpeculator
from vllm_ext.engine.v2.user_processors import AskedProcessor
from vllm_ext.proposers.draft_model import DraftModelProposer
from vllm_ext.proposers.hybrid import draft_of

logger = init_logger("vllm.vllm_ext")

NUM_STOCK_PROCESSORS = 3  # bias, penalties, bad words: vLLM's own come first


class SpeculativeRunner:
    """Mixin in front of vLLM's V2 runner class of any platform."""

    # vLLM's.
    speculator: TreeSpeculator
    sampler: Any
    rejection_sampler: Any
    model_state: Any
    req_states: Any
    device: torch.device
    adaptive_verification: Any

    halves: PairedSteps | None = None  # of `steering_runner`, which stands behind
    # After how many layers the target hands out hidden states.
    aux_layers: Sequence[int] = ()
    # int [requests] of the step that runs, until its adapters are set.
    _logits_rows: Any = None
    _added_processors: Sequence[Any] = ()  # the sampler's logits processors that are not vLLM's
    # By KV group, what moves paths in its caches; see `vllm_ext.kernels.path_move.move_paths`.
    kv_movers: tuple[tuple[int, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]], ...] = ()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's; then the parts that it has made learn of trees."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        runner: Any = self
        self.speculator.halves = self.halves
        patches.subclass_in_place(self.model_state, TreeState)
        self.model_state.speculator = self.speculator
        patches.subclass_in_place(self.sampler, LearningSampler)
        self.sampler.speculator = self.speculator
        for kind in (TreePenalties, TreeBadWords):
            (own,) = (each for each in self.sampler.logits_processors if type(each) is kind.__base__)
            patches.subclass_in_place(own, kind)
            own.speculator = self.speculator
        processors = self.sampler.logits_processors
        for each in processors:
            if isinstance(each, RuleProcessor):
                each.speculator, self.speculator.deferrals = self.speculator, each.deferrals
        processors[NUM_STOCK_PROCESSORS:] = [
            each if isinstance(each, RuleProcessor | V1Processors) else AskedProcessor(each)
            for each in processors[NUM_STOCK_PROCESSORS:]
        ]
        for each in self.v1_processors:
            processors += each.after_temperature
        self._added_processors = processors[NUM_STOCK_PROCESSORS:]
        self.rejection_sampler = TreeVerifier(
            self.sampler, runner.speculative_config, self.device, self.speculator
        )
        self.speculator.load(runner.model)
        if self.speculator.aux_layers:
            HiddenStates.of_target(runner, self.speculator.aux_layers)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """After vLLM has bound the caches: find out whether this model can verify trees."""
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        # vLLM's own would cut drafts on the device, by chances of a drafter's chains: steps come cut.
        self.speculator.varlen, self.adaptive_verification = self.adaptive_verification is not None, None
        self.speculator.bind(self)
        runner: Any = self
        slots, nodes = self.speculator.max_num_reqs, self.speculator.num_nodes
        self.model_state.recurrent = DeviceSteps(runner.attn_groups, slots, nodes, self.device)
        reason = self.speculator.chain_reason = self._chain_reason()
        if reason is not None:
            tree_layers.warn_of_chains(reason)
            return
        layers = tree_layers.layers_of(self)
        if layers and self.device.type == "cuda":  # the interpreter compiles nothing
            tree_backend.warm_up(layers)
            type(layers[0].impl).choose(layers, [1 + level for level in self.speculator.levels if level])
        self.kv_movers = tuple(
            (group_id, _path_mover(owners))
            for group_id, owners in tree_layers.cache_owners(self, self.speculator.own_layers)
        )

    @property
    def v1_processors(self) -> list[V1Processors]:
        """The user's logits processors of V1's interface: one object, or none."""
        return [each for each in self.sampler.logits_processors if isinstance(each, V1Processors)]

    def _may_vary(self) -> bool:
        """Whether vLLM is to capture graphs for steps of any query lengths, and none for those of one."""
        runner: Any = self
        mode = runner.compilation_config.cudagraph_mode
        return (
            self.device.type == "cuda"
            and shares.are_shared(runner.vllm_config, self.speculator.settings)
            and mode is not None
            and mode.has_full_cudagraphs()
            and self._chain_reason() is None
        )

    def _chain_reason(self) -> str | None:
        runner: Any = self
        return tree_layers.chain_reason(
            self,
            runner.model_config.uses_mrope,
            runner.dcp_size,
            runner.pcp_manager is not None,
        )

    def add_requests(self, scheduler_output: Any) -> None:
        """vLLM's; then the drafter takes them in. vLLM calls it in each step, behind letting go of others."""
        self.speculator.counts.begin_step(idle=not scheduler_output.total_num_scheduled_tokens)
        if (figures := step_extras.of(scheduler_output).budget) is not None:
            self.speculator.counts.show_budget(figures)
        self.speculator.finish(scheduler_output.finished_req_ids)
        super().add_requests(scheduler_output)  # type: ignore[misc]
        sampled = [each for each in scheduler_output.scheduled_new_reqs if each.sampling_params is not None]
        for processors in self.v1_processors:
            processors.take(self.req_states.req_id_to_index, sampled)
        for request in scheduler_output.scheduled_new_reqs:
            if request.sampling_params is not None:
                slot = self.req_states.req_id_to_index[request.req_id]
                if any(processors.is_under(slot) for processors in self.v1_processors):
                    self.sampler.needs_logits_processing[slot] = True
                self.speculator.admit(slot, request, self._path_dependent(slot, request.sampling_params))
        if scheduler_output.scheduled_new_reqs:
            self.speculator.apply_staged_writes()

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, of a step that has as many drafts as the budget wants verified."""
        runner: Any = self
        extras = step_extras.of(scheduler_output)
        for name, number in extras.kept_blocks.items():
            # What lay behind has been taken (`scheduler.draft_blocks`).
            runner.block_tables.num_blocks.np[extras.kept_in, self.req_states.req_id_to_index[name]] = number
        if not any(self._is_structured(name) for name in scheduler_output.scheduled_spec_decode_tokens):
            # Halves of pairs have equally many, and chances are known of one alone.
            alike = self.halves is not None and len(self.halves.known) > 0
            scheduler_output = shares.cut(
                scheduler_output, self.speculator.chances, runner.cudagraph_manager, alike
            )
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; where there are adapters, how many rows of logits each request has is kept for them."""
        input_batch = super().prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        runner: Any = self
        if runner.lora_config is not None:
            self._logits_rows = np.diff(input_batch.cu_num_logits_np)
        return input_batch

    def _set_active_loras(self, of_logits: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        """vLLM's, with the adapter of each row of logits: it would have one row for a request that has drafts, too."""
        rows, self._logits_rows = self._logits_rows, None
        if rows is not None:
            of_logits = tuple(np.repeat(of_logits, rows))
        super()._set_active_loras(of_logits, *args, **kwargs)  # type: ignore[misc]

    def _is_structured(self, name: str) -> bool:
        """Whether a request's masks have a row for each draft that was scheduled."""
        slot = self.req_states.req_id_to_index.get(name)
        structured: bool = slot is not None and self.speculator.structured[slot]  # numpy
        return structured

    def _path_dependent(self, slot: int, params: Any) -> bool:
        """Whether what a request samples is made by code that takes its rows for a chain, and by the tokens in them."""
        return params.thinking_token_budget is not None or any(
            processor.is_under(slot) for processor in self._added_processors
        )

    def sample(self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Any:
        """vLLM's, then make the KV cache what it would be had the accepted path been a chain."""
        known = self.speculator.known_trees
        if known is not None and grammar_output is not None and input_batch.num_draft_tokens:
            counts = input_batch.num_draft_tokens_per_req.tolist()  # numpy
            grammar_output = known.masked(grammar_output, dict(zip(input_batch.req_ids, counts, strict=True)))
        result = super().sample(hidden_states, input_batch, grammar_output)  # type: ignore[misc]
        drafted = bool(input_batch.num_draft_tokens)
        self.model_state.recurrent.note(
            input_batch.idx_mapping, self.rejection_sampler.walked if drafted else None
        )
        if drafted:
            self._settle()
            if known is None:
                structured = self.speculator.structured[input_batch.idx_mapping_np]
                self.speculator.counts.count("fallbacks:structured_output_chain", int(structured.sum()))
            if self.speculator.chain_reason is not None:
                self.speculator.counts.count("fallbacks:model_chain", input_batch.num_reqs)
        return result

    def _settle(self) -> None:
        """Move the accepted paths' KV."""
        path: torch.Tensor = self.rejection_sampler.walked.path
        for group_id, move in self.kv_movers:
            move(path, self.speculator.layout.first_row, self.model_state.slot_mappings[group_id])


def _path_mover(layers: Sequence[Any]) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """What moves paths in the layers' caches, in one launch where the backend has a kernel for it."""
    impl = type(layers[0].impl)
    if hasattr(impl, "path_mover"):
        mover: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = impl.path_mover(layers)
        return mover
    copy = impl.kv_mover(layers)

    def move(path: torch.Tensor, first_row: torch.Tensor, slots: torch.Tensor) -> None:
        rows = first_row[: len(path), None]
        place = torch.arange(path.shape[1], device=path.device)
        # Behind a path its rows are their own: where there is no such row, any that is left alone.
        source, target = torch.where(path == place, 0, path), torch.where(path == place, 0, place)
        copy(slots[rows + source], slots[rows + target])

    return move


def install(runner: Any) -> None:
    """Put the mixin in front of a constructed runner's class, and our speculator instead of vLLM's.

    The CPU worker builds its runner inline, so there is no method to override that returns it; giving the finished
    object a subclass is the same for every platform and moves no state. Nothing has asked the speculator yet.
    """
    patches.subclass_in_place(runner, SpeculativeRunner)
    settings = speculative.from_vllm_config(runner.vllm_config)
    assert settings is not None
    kind: type[TreeSpeculator] = DeviceSpeculator if runners.is_on_device(settings) else HostSpeculator
    if issubclass(settings.proposer_class, DraftModelProposer):
        kind = ModelSpeculator
    elif draft_of(settings.options) is not None:
        kind = FusedSpeculator
    runner.speculator = kind(runner.vllm_config, runner.device, runner.req_states)
    runner.speculator.may_vary = runner._may_vary
    if reason := shares.problem(runner.vllm_config, settings):
        logger.warning("vllm-ext: budget='shared' is 'goodput' here: %s.", reason)
