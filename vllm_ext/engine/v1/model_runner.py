# SPDX-License-Identifier: Apache-2.0
"""The V1 model runner, taught tree speculation: positions, attention metadata, verification, KV compaction.

Overrides of six methods and one attribute (the rejection sampler); everything else is vLLM's own. A step:

1. ``_prepare_inputs``: vLLM lays the drafts out as a chain; nodes get their rotary positions.
2. ``_build_attention_metadata``: the metadata learns which rows are trees.
3. ``sample_tokens``: the logits are tapped, the tree is walked (`rejection_sampler`), and in ``_sample`` the KV of
   the accepted path moves into the slots a chain would have had, so that vLLM's rollback is right.
4. ``propose_draft_token_ids``: our drafter makes the trees of the next step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    LogitsProcessors,
    cached_load_custom_logitsprocs,
)
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_ext import patches
from vllm_ext.compat import cpu
from vllm_ext.engine import step_extras, tree_layers
from vllm_ext.engine.attention import tree_backend
from vllm_ext.engine.kv_cache import returned_blocks
from vllm_ext.engine.kv_cache.encoded_rows import EncodedMetadata
from vllm_ext.engine.models import cpu_linear
from vllm_ext.engine.tree_layout import StepTrees, offsets, starts
from vllm_ext.engine.v1 import calibration
from vllm_ext.engine.v1.drafter import Drafter
from vllm_ext.engine.v1.recurrent_step import RecurrentSteps
from vllm_ext.engine.v1.rejection_sampler import TreeSampler
from vllm_ext.engine.v1.row_states import sample_rows_alone
from vllm_ext.engine.v1.undrawn_noise import UndrawnNoise
from vllm_ext.kernels.tree_attention import TreeRows
from vllm_ext.proposers.step_cost import StepCost
from vllm_ext.proposers.tree import Int32

logger = init_logger("vllm.vllm_ext")

# How many real steps a pass timed at start-up counts as; beside other load less than one that follows.
CALIBRATED_STEPS, DISTURBED_STEPS = 4.0, 0.5


class SpeculativeRunner(UndrawnNoise):
    """Mixin in front of vLLM's V1 runner class of any platform."""

    # vLLM's.
    drafter: Drafter
    rejection_sampler: TreeSampler
    positions: torch.Tensor
    device: torch.device

    # Ours, between the methods of one step.
    step_trees: StepTrees | None = None
    step_encoded: EncodedMetadata | None = None  # of a step over an encoded KV cache
    step_common: Any = None  # vLLM's metadata of the step, of no group in particular
    greedy_choice: Int32 | None = None  # [num_rows] argmax of each row, while no mask is in the logits
    step_hidden: torch.Tensor | None = None  # [num_tokens, hidden_size], what the target's head got
    step_streams: Sequence[torch.Tensor] = ()  # likewise after each of `aux_layers`
    step_output: Any = None  # vLLM's SchedulerOutput, while drafts are made
    step_started: float = 0.0
    recurrent: RecurrentSteps
    # Of the caches there are: by KV group, what copies tokens between slots.
    kv_movers: Sequence[tuple[int, Callable[[torch.Tensor, torch.Tensor], None]]] = ()

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> Any:
        """After vLLM has bound the caches: find out whether this model can verify trees."""
        result = super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        sample_rows_alone(self)
        self.recurrent = RecurrentSteps(self.attn_groups)  # type: ignore[attr-defined]  # vLLM's
        if (passes := self.drafter.passes) is not None:
            passes.bind(self)
        reason = self.drafter.chain_reason = self._chain_reason()
        if reason is not None:
            tree_layers.warn_of_chains(reason)
            return result
        layers = tree_layers.layers_of(self)
        if layers and isinstance(layers[0].impl, tree_backend.TreeAttention):
            tree_backend.warm_up(layers)
            type(layers[0].impl).choose(layers)
        # A draft model reads committed tokens again.
        skipped = passes.own_layers if passes is not None else ()
        self.kv_movers = [
            (group_id, owners[0].impl.kv_mover(owners))
            for group_id, owners in tree_layers.cache_owners(self, skipped)
        ]
        return result

    def _chain_reason(self) -> str | None:
        runner: Any = self
        return tree_layers.chain_reason(self, runner.uses_mrope, runner.dcp_world_size)

    def calibrate(self) -> None:
        """Time forward passes of several sizes, so that the budget need not find out at users' expense.

        Without attention, whose share is small at short contexts and learnt from real steps. Tokens are random: rows
        that are all alike go to the same few experts, and a row more would look as if it cost nothing.
        """
        runner: Any = self
        if cpu_linear.wanted(runner.vllm_config):
            logger.info("vllm-ext: linear layers multiply by kernels.linear (docs/tuning.md, CPUs)")
        elif self.device.type == "cpu" and runner.dtype == torch.bfloat16 and cpu.emulates_bfloat16():
            logger.warning("vllm-ext: %s; %s.", cpu.EMULATED, cpu.WAY_OUT)

        def target_pass(size: int) -> None:
            hidden_states, _ = runner._dummy_run(size, randomize_inputs=True)
            runner.model.compute_logits(hidden_states[:size])

        drafter = self.drafter
        # Requests without a seed draw from the same generators: as if this had not been.
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            if drafter.budget is not None:
                self._calibrate(drafter.budget.cost, target_pass, "forward pass", None)
            if drafter.model_drafts is None and drafter.passes is not None:
                drafter.passes.warm_up()
            if drafter.model_drafts is not None:
                drafter.model_drafts.calibrate(self._calibrate, target_pass)

    def _calibrate(
        self, cost: StepCost, run: Callable[[int], None], what: str, patience: float | None
    ) -> None:
        """Time passes; with a patience the smallest few at least, and no more after so many seconds."""
        runner: Any = self
        scheduler = runner.scheduler_config

        def run_to_its_end(size: int) -> None:
            run(size)
            runner._sync_device()

        most = min(
            scheduler.max_num_seqs * (1 + self.drafter.num_nodes), scheduler.max_num_batched_tokens, 128
        )
        found = calibration.curve(most, run_to_its_end, patience)
        steps = DISTURBED_STEPS if found.disturbed else CALIBRATED_STEPS
        cost.calibrate(list(found.seconds), list(found.seconds.values()), steps)
        level = logging.WARNING if found.disturbed else logging.INFO
        logger.log(level, "vllm-ext: milliseconds of a %s by query tokens: %s", what, found)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, timed."""
        self.step_started = time.perf_counter()
        returned_blocks.forget(self, scheduler_output)
        if self.drafter.passes is not None:
            self.drafter.passes.begin_step(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            self.drafter.admit(request.req_id, request.sampling_params)
            self.rejection_sampler.typical.admit(request.req_id, request.sampling_params)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        """vLLM's inputs, with the rotary positions of tree nodes. Slots stay those of the flat list."""
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        runner: Any = self
        num_requests = self.input_batch.num_reqs
        trees = StepTrees.from_step(
            self.input_batch.req_ids,
            result[1].num_draft_tokens,
            scheduler_output.scheduled_spec_decode_tokens,
            self.drafter.proposed,
            runner.query_start_loc.np[: num_requests + 1],
            num_scheduled_tokens,
            self.input_batch.num_computed_tokens_cpu[:num_requests],
            runner.input_ids.np,
        )
        if trees.branching:
            self._place_nodes(*trees.branching_rows())
        self.step_trees = trees
        return result

    def _place_nodes(self, query_rows: Int32, positions: Int32) -> None:
        """Give tree nodes their rotary positions; with M-RoPE by as much elsewhere, alike in each dimension."""
        runner: Any = self
        rows, new = _to(query_rows, self.device), _to(positions, self.device).to(self.positions.dtype)
        if runner.uses_mrope:
            runner.mrope_positions.gpu[:, rows] += new - self.positions[rows]
        self.positions[rows] = new

    def _calc_spec_decode_metadata(self, num_draft_tokens: Any, cu_num_scheduled_tokens: Any) -> Any:
        """Which rows are verified, instead of vLLM's seven tensors, of which our verifier reads no other."""
        num_rows = num_draft_tokens + 1
        ends = num_rows.cumsum(dtype=np.int32)
        rows = np.repeat(cu_num_scheduled_tokens - ends, num_rows)
        rows += np.arange(ends[-1], dtype=rows.dtype)
        unread = torch.empty(0, dtype=torch.int32, device=self.device)
        return SpecDecodeMetadata(
            draft_token_ids=unread,
            num_draft_tokens=num_draft_tokens.tolist(),
            cu_num_draft_tokens=unread,
            cu_num_sampled_tokens=unread,
            target_logits_indices=unread,
            bonus_logits_indices=unread,
            logits_indices=_to(rows, self.device),
        )

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's metadata, marked with the step's trees."""
        metadata, common = super()._build_attention_metadata(*args, **kwargs)  # type: ignore[misc]
        self.step_common = common
        trees = self.step_trees
        self.step_encoded = None
        if trees is not None and isinstance(metadata, dict):
            self.recurrent.mark(trees, self.input_batch, metadata, common, self._stock_metadata)
            for of_group in metadata.values():
                if isinstance(of_group, EncodedMetadata) and of_group is not self.step_encoded:
                    of_group.mark(trees)
                    self.step_encoded = of_group
        if (
            trees is not None
            and isinstance(metadata, dict)
            and self.drafter.chain_reason is None
            and self.step_encoded is None
        ):
            runner: Any = self
            for group_id, groups in enumerate(runner.attn_groups):
                # Of metadata in chunks, the table has a row for each chunk.
                table = self.input_batch.block_table[group_id].get_device_tensor(self.input_batch.num_reqs)
                for group in groups:
                    if tree_layers.is_recurrent(group.backend):
                        continue
                    decoding = group.backend.get_impl_cls().takes_decoding
                    ours = trees.decoding if decoding else trees.branching
                    if ours:
                        of_group = metadata[group.layer_names[0]]
                        marked = self._tree_metadata(trees, np.array(ours), group, of_group, common, table)
                        setattr(of_group, tree_backend.TREES, marked)
        return metadata, common

    def _model_forward(self, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; or only what an early exit's drafts have left to do."""
        drafts, trees = self.drafter.model_drafts or self.drafter.fused, self.step_trees
        whole = self.aux_logits is not None and self.aux_logits.reads_forward
        early_exit = drafts.early_exit if drafts is not None and not whole else None
        if early_exit is not None and trees is not None:
            hidden = early_exit.verify(self.input_batch.req_ids, trees, positions)
            if hidden is not None:
                return hidden
        return super()._model_forward(input_ids, positions, *args, **kwargs)  # type: ignore[misc]

    def _tree_metadata(
        self, trees: StepTrees, ours: Any, group: Any, metadata: Any, common: Any, block_table: torch.Tensor
    ) -> tree_backend.TreeMetadata:
        num_rows = np.diff(trees.row_start)
        query_row, context, parents = trees.query_row, trees.context, trees.parents
        stock = rows = own_rows = None
        if len(ours) < len(num_rows):
            others = np.setdiff1d(np.arange(len(num_rows)), ours)
            stock, rows = self._stock_metadata(others, group, common, block_table, metadata.slot_mapping)
            block_table = block_table[_to(ours, self.device)]
            parents = np.concatenate([parents[trees.rows(i)] for i in ours])
            num_rows, query_row, context = num_rows[ours], query_row[ours], context[ours]
            own = np.arange(num_rows.sum()) + np.repeat(query_row - num_rows.cumsum() + num_rows, num_rows)
            own_rows = _to(own, self.device)
        tree_rows = TreeRows(
            block_table=block_table,
            first_row=_to(query_row, self.device),
            num_rows=_to(num_rows, self.device),
            num_past=torch.zeros(len(ours), dtype=torch.int32, device=self.device),
            context_len=_to(context, self.device),
            parents=_to(parents, self.device),
            max_rows=int(num_rows.max()),
        )
        return tree_backend.TreeMetadata(tree_rows, stock, rows, own_rows)

    def _stock_metadata(
        self,
        requests: Any,
        group: Any,
        common: Any,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> tuple[Any, Any]:
        """vLLM's own metadata of some requests of the step, and the query rows they have."""
        runner: Any = self
        start = runner.query_start_loc.np
        length = start[requests + 1] - start[requests]
        new_start, rows = starts(length), np.repeat(start[requests], length) + offsets(length)
        index, row_index = _to(requests, self.device), _to(rows, self.device)
        part = replace(
            common,
            query_start_loc=_to(new_start, self.device),
            query_start_loc_cpu=torch.from_numpy(new_start),
            seq_lens=common.seq_lens[index],
            num_reqs=len(requests),
            num_actual_tokens=len(rows),
            max_query_len=int(length.max()),
            block_table_tensor=block_table[index],
            slot_mapping=slot_mapping[row_index],
            positions=self.positions[row_index],
            is_prefilling=common.is_prefilling[requests] if common.is_prefilling is not None else None,
            seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound[requests],
            # What a builder of the whole batch may have found out.
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )
        return group.get_metadata_builder(0).build(0, part), row_index

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Tap the logits first: vLLM writes the grammar's mask and the sampler's work into them."""
        state = self.execute_model_state
        if state is not None:
            assert self.step_trees is not None
            top_ids = self.drafter.tap(self.input_batch.req_ids, self.step_trees, state.logits)
            self.step_hidden, self.step_streams = state.hidden_states, state.aux_hidden_states or ()
            self.greedy_choice = None if grammar_output is not None or top_ids is None else top_ids[:, 0]
        output = super().sample_tokens(grammar_output)
        if state is not None and output is not None:
            runner: Any = self
            step_extras.set_of(output).drafts = runner.take_draft_token_ids()
        return output

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """Walk the trees, then make the KV cache what it would be had the accepted path been a chain."""
        result = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        trees = self.step_trees
        if trees is not None:
            for primary, pair in self.pairs:
                trees.accepted[pair] = trees.accepted[primary]
            self.recurrent.pending.note(self.input_batch.req_ids, trees)
        if trees is not None and trees.branching:
            source, target = trees.moves()
            if len(source):
                self._move_kv(source, target)
        return result

    def _row_start(self) -> list[int]:
        assert self.step_trees is not None
        starts: list[int] = self.step_trees.row_start.tolist()
        return starts

    def _move_kv(self, source: Int32, target: Int32) -> None:
        """Copy KV between the slots of two lists of query rows."""
        for group_id, move in self.kv_movers:
            if self.step_encoded is not None:
                move(self.step_encoded.raw_slots(source), self.step_encoded.raw_slots(target))
            else:
                slots = self.input_batch.block_table[group_id].slot_mapping.gpu
                move(slots[_to(source, self.device)], slots[_to(target, self.device)])

    def propose_draft_token_ids(
        self, scheduler_output: Any, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> list[list[int]]:
        """Draft with the request's real state instead of vLLM's padded token table."""
        trees, self.step_trees = self.step_trees, None
        assert trees is not None
        most, self.step_output = scheduler_output.num_spec_tokens_to_schedule, scheduler_output
        drafts = self.drafter.step(self, trees, most, sampled_token_ids)
        self.step_hidden, self.step_streams, self.step_output = None, (), None
        return drafts

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Always: the drafter clips each request on its own.

        vLLM's answer turns drafting off for the whole batch as soon as one request is within
        num_speculative_tokens of max_model_len.
        """
        return True

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        super()._on_request_state_removed(req_id, req_state)  # type: ignore[misc]
        self.recurrent.pending.forget(req_id)
        self.rejection_sampler.typical.finish(req_id)
        self.drafter.finish(req_id, 0 if req_state is None else len(req_state.output_token_ids))

    @property
    def vllm_ext_tap_seconds(self) -> float:
        """Seconds spent in the logits tap so far, for `vllm-ext bench`."""
        return self.drafter.tap_seconds


def install(runner: Any) -> None:
    """Put the mixin in front of a constructed runner's class, and our verifier instead of vLLM's."""
    patches.subclass_in_place(runner, SpeculativeRunner)
    sampler = TreeSampler(runner.sampler, runner.speculative_config, runner.device)
    sampler.bind(runner)
    runner.rejection_sampler = sampler
    # With any speculation vLLM builds the minimum-length processor only; the walk is right with all of them, also
    # with those that the user brings or another package has registered.
    own = tuple(runner.model_config.logits_processors or ())
    custom = cached_load_custom_logitsprocs(own)
    runner.input_batch.logitsprocs = LogitsProcessors(
        processor(runner.vllm_config, runner.device, PIN_MEMORY)
        for processor in (*BUILTIN_LOGITS_PROCESSORS, *custom)
    )
    runner.input_batch.logitsprocs_need_output_token_ids |= bool(custom)


def _to(array: Any, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
