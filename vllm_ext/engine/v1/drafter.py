# SPDX-License-Identifier: Apache-2.0
"""Between vLLM's V1 runner and a proposer: unpacks the runner's state into arrays, packs drafts into lists.

vLLM loads ``Drafter`` as its ``custom_class``; ``model_runner`` calls it with the runner's real state, which
vLLM's own narrow ``propose()`` signature does not carry.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_ext.config import kv_cache, speculative
from vllm_ext.engine import metrics, sampling_params
from vllm_ext.engine.counter_file import WorkerCounts
from vllm_ext.engine.draft_constraints import DraftConstraints
from vllm_ext.engine.draft_model.answer_export import TOP_K, Export
from vllm_ext.engine.draft_model.controller import ModelDrafts
from vllm_ext.engine.state.keeper import Checkpointer
from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.kernels.top_k import top_k_ids
from vllm_ext.proposers.base import Request, Sampling, chains_where_asked, propose_apart
from vllm_ext.proposers.budget import GoodputBudget
from vllm_ext.proposers.draft_model import DraftModelProposer
from vllm_ext.proposers.sampled import ASKED_PER_NODE
from vllm_ext.proposers.tree import DraftTree, Float32, Int32

logger = init_logger("vllm.vllm_ext")


class Drafter:
    """One proposer, the requests it knows, and the counters."""

    def __init__(self, vllm_config: Any) -> None:
        settings = speculative.from_vllm_config(vllm_config)
        if settings is None:
            raise RuntimeError(
                "vllm_ext.engine.v1.drafter.Drafter is not a speculative model of its own; name a method: "
                '--speculative-config \'{"method": "token_recycling"}\''
            )
        self._config, self._settings = vllm_config, settings
        self._vocab_size: int = vllm_config.model_config.get_vocab_size()
        self._dtype = vllm_config.model_config.dtype
        self._max_model_len: int = vllm_config.model_config.max_model_len
        encoded = kv_cache.from_config(vllm_config) is not None
        self._encoded_block: int | None = vllm_config.cache_config.block_size if encoded else None
        self.proposer = settings.proposer_class.from_options(settings.options, self._vocab_size)
        self.model_drafts: ModelDrafts | None = None
        if isinstance(self.proposer, DraftModelProposer):
            self.model_drafts = ModelDrafts(vllm_config, self.proposer)
        self.constraints = DraftConstraints(vllm_config, self._count, self._fault_of)
        # On all ranks alike: what is tapped decides how greedy tokens are found.
        self._exports = getattr(settings.options, "export_dir", None) is not None
        self._export = Export.of(vllm_config.parallel_config, settings.options) if self._exports else None
        self._checkpointer = Checkpointer(
            vllm_config,
            settings.method,
            settings.options,
            settings.own_options,
            self.count,
        )
        self._sampling: dict[str, Sampling] = {}  # by request id; its keys are the requests started
        self._top: tuple[Int32, Float32] | None = None  # of this step's rows, from `tap` to `step`
        self._log_total: Float32 | None = None
        # By request id, the tree of the next step. The scheduler may cut it.
        self.proposed: dict[str, DraftTree] = {}
        # Why this model's drafts are chains; None where it can verify trees. Set once the caches are bound.
        self.chain_reason: str | None = None
        self._counters: WorkerCounts | None = None
        if vllm_config.parallel_config.rank == 0:
            self._counters = metrics.worker_counts(vllm_config)
        self.num_nodes = settings.options.num_speculative_tokens  # most of one request
        # Cuts what was drafted; where a model drafts, its own budget says before how much.
        self.budget: GoodputBudget | None = None
        if settings.options.budget != "fixed" and self.model_drafts is None:
            self.budget = GoodputBudget(self.num_nodes)
        # A clock differs between ranks, and what follows from it may only decide how much of a tree is
        # scheduled (rank 0's does), never which tree is made.
        self._may_hint = vllm_config.parallel_config.world_size == 1
        self._step_ended = 0.0
        self.tap_seconds = 0.0  # time spent in `tap`; the rest of the drafting is timed from outside

    def load_model(self, model: Any) -> None:
        """vLLM's hook after the target is loaded: compile what would else stall the first request."""
        if self.proposer.verified_top_k:
            parameter = next(model.parameters())
            logits = parameter.new_zeros((2, self._vocab_size), dtype=self._dtype)
            top_k_ids(logits, self.proposer.verified_top_k)
        self.proposer.warm_up()
        if self.model_drafts is not None:
            self.model_drafts.passes.load(model)
        self.proposer = self._checkpointer.restore(
            self.proposer,
            lambda: self._settings.proposer_class.from_options(self._settings.options, self._vocab_size),
        )

    def close(self) -> None:
        """Save what was learnt, running requests' text too. Called when the worker shuts down; may be again."""
        if self._checkpointer.keeps or self._export is not None:
            for request_id in list(self._sampling):
                self.finish(request_id)
        self._checkpointer.close()
        if self._export is not None:
            self._export.close()
            self._export = None
        if self._counters is not None:
            self._counters.remove()

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM's own entry; ours is `step`. Reached only when our worker is not in place."""
        raise RuntimeError("vllm-ext's runner is not installed; leave worker_cls at 'auto'")

    def tap(self, trees: StepTrees, logits: Any) -> Int32 | None:
        """Before sampling: keep what the step's logits say, while no sampler has written into them.

        Args:
            trees: the step's rows.
            logits: ``[num_rows, vocab]``, the target's.

        Returns:
            int32 ``[num_rows, verified_top_k]``, ids of each row's largest logits; None when the proposer
            does not want them.
        """
        width = TOP_K if self._exports else self.proposer.verified_top_k
        if not width:
            return None
        started = time.perf_counter()
        try:
            top_ids = top_k_ids(logits, width)
            top_logits = logits.gather(1, top_ids.to(torch.int64)).to(torch.float32)
            self._top = top_ids.cpu().numpy(), top_logits.cpu().numpy()
            if self._export is not None:
                self._log_total = torch.logsumexp(logits.float(), 1).cpu().numpy()
        except Exception:
            self._top = None
            self._fault("reading the logits failed; nothing is learnt from this step")
        self.tap_seconds += time.perf_counter() - started
        return None if self._top is None else self._top[0]

    def step(
        self, runner: Any, trees: StepTrees, num_draft_tokens: int, sampled: list[list[int]]
    ) -> list[list[int]]:
        """After sampling: learn from the step, draft for the next.

        Args:
            runner: vLLM's V1 model runner, its batch already holding the sampled tokens.
            trees: the rows this step verified.
            num_draft_tokens: most draft tokens vLLM will schedule for one request.
            sampled: by batch index, the tokens of this step; none for an unfinished prompt.

        Returns:
            By batch index, the draft tokens of the next step.
        """
        drafts: list[list[int]] = [[] for _ in sampled]
        names = runner.input_batch.req_ids
        # Pairs get their primaries' tokens and drafts: nobody counts those, learns from them or drafts them again.
        own = [[] if runner.is_pair(name) else tokens for name, tokens in zip(names, sampled, strict=True)]
        # What follows an end token never reaches the output: nobody counts it, learns from it or hands it on.
        kept = [
            sampling_params.num_kept(runner.requests[request_id].sampling_params, tokens)
            for request_id, tokens in zip(names, own, strict=True)
        ]
        try:
            with self._checkpointer.lock:
                self._observe(runner, trees, [tokens[:n] for tokens, n in zip(own, kept, strict=True)])
                if self._could_be_cut(sampled):
                    num_draft_tokens = 0
                most = [num_draft_tokens] * len(own)
                if self.model_drafts is not None:
                    most = self._plan(self.model_drafts, runner, own, num_draft_tokens)
                requests, slots = self._requests(runner, most, own, kept)
                if self.model_drafts is not None:
                    proposals = self.model_drafts.propose(runner, requests, len(sampled))
                else:
                    proposals = propose_apart(self.proposer, requests, self._fault_of)
                    outputs = [runner.requests[request.request_id].output_token_ids for request in requests]
                    proposals = self.constraints.apply(requests, outputs, proposals)
                    proposals = chains_where_asked(requests, proposals)
                self._checkpointer.mark_dirty()
            sizes = self._sizes(requests, proposals)
            for request, slot, tree, size in zip(requests, slots, proposals, sizes, strict=True):
                # Whole, not cut: other ranks' clocks may have chosen other sizes, and rank 0's is scheduled.
                self.proposed[request.request_id] = tree
                drafts[slot] = tree.tokens[:size].tolist()
            for primary, pair in runner.pairs:
                drafts[pair] = drafts[primary]
                self.proposed[names[pair]] = self.proposed.get(names[primary], DraftTree.empty())
        except Exception:
            # A drafter's fault costs speed, never a request.
            self._fault("drafting failed; this step goes on without drafts")
            return [[] for _ in sampled]
        self._clock_step(runner, trees)
        return drafts

    def _could_be_cut(self, sampled: list[list[int]]) -> bool:
        """Whether the scheduler may leave out nodes of trees that must be verified whole.

        It takes running requests in turn; those with a prompt to go on with may use up a step's tokens. Only worst
        cases count: what was drawn may not decide.
        """
        if not (isinstance(self.proposer, DraftModelProposer) and self.proposer.whole):
            return False
        most = self._config.scheduler_config.max_num_batched_tokens
        return not all(sampled) or len(sampled) * (1 + self.num_nodes) > most

    def _plan(self, drafts: ModelDrafts, runner: Any, sampled: list[list[int]], most: int) -> list[int]:
        """How many nodes to draft, by batch index."""
        decoding = [slot for slot, tokens in enumerate(sampled) if tokens]
        names = [runner.input_batch.req_ids[slot] for slot in decoding]
        nodes = [0] * len(sampled)
        planned = drafts.plan(names, runner.input_batch.num_tokens_no_spec[decoding].tolist(), most)
        for slot, wanted in zip(decoding, planned, strict=True):
            nodes[slot] = wanted
        if drafts.budget is not None and not drafts.rests:
            self._show(drafts.budget.state())
        return nodes

    def _fault(self, what: str) -> None:
        """Log the exception in hand and count it. Call in an except block."""
        logger.exception("vllm-ext: %s", what)
        self._count({"fallbacks:proposer_error": 1})

    def _fault_of(self, request_id: str) -> None:
        """The same of one request."""
        self._fault(f"drafting failed for request {request_id}; it goes on without drafts in this step")

    def _only_chain(self, params: Any) -> bool:
        """Whether a request can have chains alone; counts the step if so."""
        if self.chain_reason is not None:
            reason = "model_chain"
        elif params.structured_outputs is not None and self.constraints.grammars is None:
            # vLLM masks the logits along the flat list of drafts: right for a chain, wrong for a tree.
            reason = "structured_output_chain"
        else:
            return False
        self._count({f"fallbacks:{reason}": 1})
        return True

    def _sizes(self, requests: list[Request], trees: list[DraftTree]) -> list[int]:
        """How many nodes of each tree the next step verifies: all where that was decided before they were drawn."""
        if self.budget is None:
            return [len(tree) for tree in trees]
        sizes = self.budget.choose(
            [request.request_id for request in requests],
            [tree.probabilities for tree in trees],
            sum(len(request.tokens) for request in requests),
        )
        self._show(self.budget.state())
        return sizes

    def _show(self, state: dict[str, float]) -> None:
        """Put a budget's figures on /metrics."""
        if self._counters is not None:
            self._counters.show_budget(state)

    def _clock_step(self, runner: Any, trees: StepTrees) -> None:
        """Tell the budget what the step that ends now has cost.

        From the end of the step before, where the engine was busy, so that what lies between the worker's
        calls counts; from this step's start after a pause.
        """
        now = time.perf_counter()
        busy, cycle = now - runner.step_started, now - self._step_ended
        self._step_ended = now
        query_tokens = int(runner.query_start_loc.np[len(trees.query_row)])
        drafts = self.model_drafts
        # The time of a model that drafts is accounted for apart.
        drafting = 0.0 if drafts is None else drafts.take_seconds()
        if query_tokens == trees.row_start[-1]:  # no prompt in it
            seconds = (cycle if cycle < 2 * busy else busy) - drafting
            step = seconds, query_tokens, len(trees.query_row), int(trees.context.sum())
            if self.budget is not None:
                self.budget.cost.record(*step)
            elif drafts is not None:
                drafts.record_step(*step)

    def finish(self, request_id: str, num_output_tokens: int = 0) -> None:
        """A request is gone that has put out so many tokens."""
        self.proposed.pop(request_id, None)
        self.constraints.finish(request_id)
        if self.model_drafts is not None:
            self.model_drafts.finish(request_id, num_output_tokens)
        if self._sampling.pop(request_id, None) is not None:
            with self._checkpointer.lock:
                self.proposer.finish(request_id)
                self._checkpointer.mark_dirty()
            if self._export is not None:
                self._export.finish(request_id)
            if self.budget is not None:
                self.budget.finish(request_id)

    def count(self, counter: str) -> None:
        """Add one to a counter, where this rank counts."""
        self._count({counter: 1})

    def counters(self) -> dict[str, int]:
        """Totals by counter name; empty where another rank counts."""
        return {} if self._counters is None else self._counters.totals()

    def _observe(self, runner: Any, trees: StepTrees, sampled: list[list[int]]) -> None:
        num_emitted, num_steps = sum(map(len, sampled)), sum(map(bool, sampled))
        self._count({"spec_emitted_tokens": num_emitted, "spec_steps": num_steps})
        drafts = self.model_drafts
        if trees.has_no_drafts and drafts is not None and not self._exports:
            return  # nothing to learn from, and such steps are to cost what plain's do
        # Where a prompt has one token that is not cached vLLM fills its rows up, as if it had drafts.
        real = trees.tokens >= 0
        num_rows = np.add.reduceat(real, trees.row_start[:-1], dtype=np.int32)
        top, self._top = self._top, None
        if top is not None or not self.proposer.verified_top_k:
            rows = trees.verified(runner.input_batch.req_ids, sampled, top).where(real)
            self.proposer.observe(rows)
            if self._export is not None and self._log_total is not None:
                self._export.observe(rows, self._log_total[real])
                self._log_total = None
        if self.budget is not None:
            names = runner.input_batch.req_ids
            self.budget.observe(
                names,
                [
                    float(self.proposed[name].probabilities[: count - 1].sum()) if count > 1 else 0.0
                    for name, count in zip(names, num_rows.tolist(), strict=True)
                ],
                [len(path) for path in trees.accepted],
            )
        if drafts is not None:
            drafts.observe(trees, runner.input_batch.req_ids, num_rows - 1, sampled)
        self._count(
            {
                "spec_draft_tokens": int(num_rows.sum()) - len(num_rows),
                "spec_accepted_tokens": num_emitted - num_steps,
            }
        )

    def _requests(
        self, runner: Any, num_draft_tokens: list[int], sampled: list[list[int]], kept: list[int]
    ) -> tuple[list[Request], list[int]]:
        """The requests to draft for, and their batch indices. Those at their end get no drafts any more."""
        batch = runner.input_batch
        requests, slots = [], []
        for slot, (request_id, emitted) in enumerate(zip(batch.req_ids, sampled, strict=True)):
            if not emitted:
                continue
            state = runner.requests[request_id]
            params = state.sampling_params
            num_tokens = int(batch.num_tokens_no_spec[slot]) - (len(emitted) - kept[slot])
            left = sampling_params.tokens_left(
                params, num_tokens, len(state.output_token_ids), self._max_model_len
            )
            if emitted[kept[slot] - 1] in sampling_params.ends_of(params):
                left = 0
            if self._encoded_block is not None:
                # Drafts end before the last place of a block, which is encoded when a settled token takes it.
                left = min(left, self._encoded_block - 1 - (num_tokens - 1) % self._encoded_block)
            started = request_id in self._sampling
            if not started:
                self._sampling[request_id] = sampling_params.sampling_of(params)
            # Each node takes a slot behind the root, accepted or not.
            slots_left = self._max_model_len - num_tokens
            if self.model_drafts is not None:
                slots_left //= ASKED_PER_NODE
            budget_tokens = min(num_draft_tokens[slot], self.num_nodes, slots_left)
            if self.budget is not None and self._may_hint:
                budget_tokens = min(budget_tokens, self.budget.hint(request_id))
            # A step that accepts n drafts emits n + 1 tokens.
            max_depth = max(left - 1, 0)
            request = Request(
                request_id=request_id,
                tokens=batch.token_ids_cpu[slot, :num_tokens],
                num_prompt_tokens=state.num_prompt_tokens,
                budget_tokens=budget_tokens if max_depth else 0,
                max_depth=max_depth,
                sampling=self._sampling[request_id],
                chain=self._only_chain(params),
            )
            if not started:
                try:
                    self.proposer.start(request)
                except Exception:
                    del self._sampling[request_id]  # it is told again with the next step
                    self._fault_of(request_id)
                    continue
                if self._export is not None:
                    self._export.start(request_id, request.tokens[: request.num_prompt_tokens])
            requests.append(request)
            slots.append(slot)
        return requests, slots

    def _count(self, amounts: dict[str, int]) -> None:
        if self._counters is not None:
            self._counters.add(amounts)
