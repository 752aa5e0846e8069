# SPDX-License-Identifier: Apache-2.0
"""Between vLLM's V1 runner and a proposer: unpacks the runner's state into arrays, packs drafts into lists.

vLLM loads ``Drafter`` as its ``custom_class``; ``model_runner`` calls it with the runner's real state, which
vLLM's own narrow ``propose()`` signature does not carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_ext.config import request_options, speculative
from vllm_ext.engine import sampling_params
from vllm_ext.engine.counters import Counters
from vllm_ext.engine.draft_model.answer_export import TOP_K, Export
from vllm_ext.engine.draft_model.controller import FusedDraft, ModelDrafts
from vllm_ext.engine.draft_model.passes import Companion
from vllm_ext.engine.draft_model.vllm_proposer import VllmProposers
from vllm_ext.engine.drafting import logits_tap
from vllm_ext.engine.drafting.host_proposer import STEP_FAULT, HostProposer
from vllm_ext.engine.drafting.requests import BatchTexts
from vllm_ext.engine.drafting.step_clock import StepClock
from vllm_ext.engine.models import prompt_embeddings
from vllm_ext.engine.structured_output.draft_constraints import DraftConstraints
from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.proposers.base import Proposer, Request, chains_where_asked
from vllm_ext.proposers.budget import GoodputBudget
from vllm_ext.proposers.draft_model import DraftModelProposer, places_per_node
from vllm_ext.proposers.hybrid import Hybrid, draft_of, reads_nodes
from vllm_ext.proposers.ppd import PpdOptions
from vllm_ext.proposers.tree import DraftTree, Int32


class Drafter:
    """A proposer beside V1: what of the runner it is told, what it may draft, and how much of that is scheduled."""

    def __init__(self, vllm_config: Any) -> None:
        settings = speculative.from_vllm_config(vllm_config)
        if settings is None:
            raise RuntimeError(
                "vllm_ext.engine.v1.drafter.Drafter is not a speculative model of its own; name a method: "
                '--speculative-config \'{"method": "token_recycling"}\''
            )
        self._config = vllm_config
        self.counters = Counters(vllm_config)
        self._host = HostProposer(vllm_config, settings, self.count)
        self.model_drafts: ModelDrafts | None = None
        if isinstance(self.proposer, DraftModelProposer):
            self.model_drafts = ModelDrafts(vllm_config, self.proposer, self.count)
        self.fused: FusedDraft | None = None
        if isinstance(self.proposer, Hybrid) and (drafting := draft_of(settings.options)) is not None:
            self.fused = FusedDraft(vllm_config, drafting, self.count)
        self.vllms = VllmProposers(vllm_config, self.proposer)
        behind = self.model_drafts is not None or reads_nodes(settings.options)
        self._texts = BatchTexts(vllm_config, places_per_node(settings.options) if behind else 1)
        self.constraints = DraftConstraints(vllm_config, self.counters.add, self._host.fault_of)
        # On all ranks alike: what is tapped decides how greedy tokens are found.
        self._exports = any(getattr(settings.options, name, None) for name in ("export_dir", "online"))
        self._export = Export.of(vllm_config.parallel_config, settings.options) if self._exports else None
        with_total = self._export is not None or self.proposer.verified_log_total
        self._tap = logits_tap.LogitsTap(with_total)
        # Of `ppd`. Ids from the vocabulary's size on are prompt tokens: rows of a tree that are no drafts.
        self._prompt_tokens = settings.options if isinstance(settings.options, PpdOptions) else None
        self._vocab_size: int = vllm_config.model_config.get_vocab_size()
        # By request id, the tree of the next step. The scheduler may cut it.
        self.proposed: dict[str, DraftTree] = {}
        # By request id, most nodes of those that have asked for fewer; 0: it is switched off.
        self._most_nodes: dict[str, int] = {}
        # Why this model's drafts are chains; None where it can verify trees. Set once the caches are bound.
        self.chain_reason: str | None = None
        self.num_nodes = settings.options.num_speculative_tokens  # most of one request
        # Cuts what was drafted; a model that drafts has a budget of its own.
        self.budget: GoodputBudget | None = None
        if settings.options.budget != "fixed" and self.model_drafts is None:
            self.budget = GoodputBudget(self.num_nodes)
        # Clocks differ between ranks: they may decide how much of a tree is scheduled, never which tree is made.
        self._may_hint = vllm_config.parallel_config.world_size == 1
        self._clock = StepClock()

    @property
    def proposer(self) -> Proposer:
        """The method's; another may be put in its place between steps."""
        return self._host.proposer

    @proposer.setter
    def proposer(self, proposer: Proposer) -> None:
        self._host.proposer = proposer

    @property
    def passes(self) -> Companion | None:
        """Of a model or of heads, where the method or one of its drafters asks any."""
        asking = self.model_drafts or self.fused
        return self.vllms.asking if asking is None else asking.passes

    @property
    def tap_seconds(self) -> float:
        """Time spent in `tap`; the rest of the drafting is timed from outside."""
        return self._tap.seconds

    def load_model(self, model: Any) -> None:
        """vLLM's hook after the target is loaded: compile what would else stall the first request."""
        if width := self.proposer.verified_top_k:
            of_model = self._config.model_config
            logits_tap.warm_up(model, of_model.get_vocab_size(), of_model.dtype, width)
        if self.passes is not None:
            self.passes.load(model)
            self._texts.room_of = self.passes.room
        if self._prompt_tokens is not None:
            own = prompt_embeddings.load(self._prompt_tokens.model)[: self._prompt_tokens.num_prompt_tokens]
            prompt_embeddings.extend(model, own, self._vocab_size)
        self._host.load()

    def close(self) -> None:
        """Save what was learnt, running requests' text too. Called when the worker shuts down; may be again."""
        if self._host.checkpointer.keeps or self._export is not None:
            for request_id in list(self._host.known):
                self.finish(request_id)
        self._host.checkpointer.close()
        if self.passes is not None:
            self.passes.close()
        if self._export is not None:
            self._export.close()
            self._export = None

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM's own entry; ours is `step`. Reached only when our worker is not in place."""
        raise RuntimeError("vllm-ext's runner is not installed; leave worker_cls at 'auto'")

    def admit(self, request_id: str, params: Any) -> None:
        """A request has come, and none of it is computed yet."""
        self.constraints.start(request_id, params)
        most = request_options.most_nodes(params)
        if most is not None:
            self._most_nodes[request_id] = most

    def _is_off(self, request_id: str) -> bool:
        return self._most_nodes.get(request_id) == 0

    def tap(self, names: Sequence[str], trees: StepTrees, logits: Any) -> Int32 | None:
        """Before sampling: keep what the step's logits say, while no sampler has written into them.

        Args:
            names: ids of the step's requests.
            trees: the step's rows.
            logits: ``[num_rows, vocab]``, the target's.

        Returns:
            int32 ``[num_rows, verified_top_k]``, ids of each row's largest logits; None when the proposer
            does not want them.
        """
        width = TOP_K if self._exports else self.proposer.verified_top_k
        if not width or (self._most_nodes and all(map(self._is_off, names))):
            return None
        try:
            # What is put out is exported, all of it.
            alone = self._prompt_tokens is not None and not self._exports
            total_of = np.flatnonzero(trees.tokens >= self._vocab_size) if alone else None
            return self._tap.read(logits, width, total_of)
        except Exception:
            self._host.fault("reading the logits failed; nothing is learnt from this step")
            return None

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
        # Nobody counts, learns from or drafts again what pairs get of their primaries; nor those switched off.
        own = sampled
        if runner.pairs or self._most_nodes:
            apart = {pair for _, pair in runner.pairs}
            apart |= {slot for slot, name in enumerate(names) if self._is_off(name)}
            own = [[] if slot in apart else tokens for slot, tokens in enumerate(sampled)]
        # What follows an end token never reaches the output: nobody counts it, learns from it or hands it on.
        kept = [
            sampling_params.num_kept(runner.requests[request_id].sampling_params, tokens)
            for request_id, tokens in zip(names, own, strict=True)
        ]
        try:
            with self._host.checkpointer.lock:
                self._observe(runner, trees, [tokens[:n] for tokens, n in zip(own, kept, strict=True)])
                if self._could_be_cut(sampled):
                    num_draft_tokens = 0
                most = [num_draft_tokens] * len(own)
                if self.model_drafts is not None:
                    most = self._plan(self.model_drafts, runner, own, num_draft_tokens)
                requests, slots = self._requests(runner, most, own, kept)
                if self.model_drafts is not None:
                    proposals = self.model_drafts.propose(runner, requests, len(sampled), trees)
                else:
                    if self.fused is not None:
                        assert isinstance(self.proposer, Hybrid)
                        rate = 0.0 if self.budget is None else self.budget.rate
                        self.fused.before(runner, trees, requests, self.proposer, rate)
                    with self.vllms.during(runner, trees, sampled, self.proposer, self.budget):
                        proposals = self._host.propose(requests)
                    outputs = [runner.requests[request.request_id].output_token_ids for request in requests]
                    proposals = self.constraints.apply(requests, outputs, proposals)
                    proposals = chains_where_asked(requests, proposals)
                    if self.fused is not None:
                        self.fused.settle(requests, proposals)
                self._host.checkpointer.mark_dirty()
            sizes = self._sizes(requests, proposals)
            for request, slot, tree, size in zip(requests, slots, proposals, sizes, strict=True):
                # Whole, not cut: other ranks' clocks may have chosen other sizes, and rank 0's is scheduled.
                self.proposed[request.request_id] = tree
                drafts[slot] = tree.tokens[:size].tolist()
            for primary, pair in runner.pairs:
                drafts[pair] = drafts[primary]
                self.proposed[names[pair]] = self.proposed.get(names[primary], DraftTree.empty())
        except Exception:
            self._host.fault(STEP_FAULT)
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
            self.counters.show_budget(drafts.budget.state())
        return nodes

    def _only_chain(self, params: Any) -> bool:
        """Whether a request can have chains alone; counts the step if so."""
        if self.chain_reason is not None:
            reason = "model_chain"
        elif params.structured_outputs is not None and self.constraints.grammars is None:
            # vLLM masks the logits along the flat list of drafts: right for a chain, wrong for a tree.
            reason = "structured_output_chain"
        else:
            return False
        self.count(f"fallbacks:{reason}")
        return True

    def _sizes(self, requests: list[Request], trees: list[DraftTree]) -> list[int]:
        """How many nodes of each tree the next step verifies: all where that was decided before they were drawn."""
        if self.budget is None:
            return [len(tree) for tree in trees]
        names = [request.request_id for request in requests]
        before = [self.budget.chosen(name) for name in names]
        sizes = self.budget.choose(
            names,
            [tree.probabilities for tree in trees],
            sum(len(request.tokens) for request in requests),
        )
        # What was drawn may not say how much of itself is verified: the tree before it has.
        sizes = [
            size if tree.drawn is None else min(chosen, len(tree))
            for tree, size, chosen in zip(trees, sizes, before, strict=True)
        ]
        self.counters.show_budget(self.budget.state())
        if self._prompt_tokens is not None:
            # What a step has asked for the next one judges: prompt tokens alone are evidence of nothing, and a
            # budget that has given up would never learn better.
            candidates = [len(tree) > 0 and tree.tokens[0] < self._vocab_size for tree in trees]
            sizes = [max(size, int(known)) for size, known in zip(sizes, candidates, strict=True)]
        return sizes

    def _clock_step(self, runner: Any, trees: StepTrees) -> None:
        """Tell the budget what the step that ends now has cost."""
        seconds = self._clock.seconds(runner.step_started)
        query_tokens = int(runner.query_start_loc.np[len(trees.query_row)])
        drafts = self.model_drafts
        # The time of a model that drafts is accounted for apart.
        drafting = 0.0 if drafts is None else drafts.take_seconds()
        if query_tokens == trees.row_start[-1]:  # no prompt in it
            step = seconds - drafting, query_tokens, len(trees.query_row), int(trees.context.sum())
            if self.budget is not None:
                self.budget.cost.record(*step)
            elif drafts is not None:
                drafts.record_step(*step)

    def finish(self, request_id: str, num_output_tokens: int = 0) -> None:
        """A request is gone that has put out so many tokens."""
        self.proposed.pop(request_id, None)
        self._most_nodes.pop(request_id, None)
        self.constraints.finish(request_id)
        if self.model_drafts is not None:
            self.model_drafts.finish(request_id, num_output_tokens)
        if self.fused is not None:
            self.fused.finish(request_id, num_output_tokens)
        if self._host.finish(request_id):
            if self._export is not None:
                self._export.finish(request_id)
            if self.budget is not None:
                self.budget.finish(request_id)

    def count(self, counter: str, amount: int = 1) -> None:
        """Add to a counter, where this rank counts."""
        self.counters.count(counter, amount)

    def _observe(self, runner: Any, trees: StepTrees, sampled: list[list[int]]) -> None:
        num_emitted, num_steps = sum(map(len, sampled)), sum(map(bool, sampled))
        self.counters.add({"spec_emitted_tokens": num_emitted, "spec_steps": num_steps})
        drafts = self.model_drafts
        if trees.has_no_drafts and drafts is not None and not self._exports:
            return  # nothing to learn from, and such steps are to cost what plain's do
        # Where a prompt has one token that is not cached vLLM fills its rows up, as if it had drafts.
        real = trees.tokens >= 0
        num_rows = np.add.reduceat(real, trees.row_start[:-1], dtype=np.int32)
        if self._most_nodes:
            off = np.array([self._is_off(name) for name in runner.input_batch.req_ids])
            real &= ~np.repeat(off, np.diff(trees.row_start))
        tapped = self._tap.take()
        if tapped is not None or not self.proposer.verified_top_k:
            top, log_total = (None, None) if tapped is None else tapped
            rows = trees.verified(runner.input_batch.req_ids, sampled, top, log_total).where(real)
            self.proposer.observe(rows)
            if self._export is not None and rows.log_total is not None:
                self._export.observe(rows, rows.log_total)
        if self.budget is not None:
            names = runner.input_batch.req_ids
            self.budget.observe(
                names,
                [
                    self._promised(name, count - 1) if count > 1 else 0.0
                    for name, count in zip(names, num_rows.tolist(), strict=True)
                ],
                [len(path) for path in trees.accepted],
            )
        if drafts is not None:
            drafts.observe(trees, runner.input_batch.req_ids, num_rows - 1, sampled)
        self.counters.add(
            {
                "spec_draft_tokens": int(num_rows.sum() - (trees.tokens >= self._vocab_size).sum())
                - len(num_rows),
                "spec_accepted_tokens": num_emitted - num_steps,
            }
        )

    def _promised(self, name: str, size: int) -> float:
        """Tokens of the next step that the first nodes of a request's tree were worth, prompt tokens left out."""
        tree = self.proposed[name].prefix(size)
        return float(tree.probabilities[tree.tokens < self._vocab_size].sum())

    def _requests(
        self, runner: Any, num_draft_tokens: list[int], sampled: list[list[int]], kept: list[int]
    ) -> tuple[list[Request], list[int]]:
        """The requests to draft for, and their batch indices. Those at their end get no drafts any more."""
        requests, slots = [], []
        for slot, (name, emitted) in enumerate(zip(runner.input_batch.req_ids, sampled, strict=True)):
            if not emitted:
                continue
            nodes = min(num_draft_tokens[slot], self._most_nodes.get(name, self.num_nodes), self.num_nodes)
            if self.budget is not None and self._may_hint:
                nodes = min(nodes, self.budget.hint(name))
            known = self._host.known.get(name)
            params = runner.requests[name].sampling_params
            chain = self._only_chain(params)
            if (
                self._prompt_tokens
                and params.structured_outputs is not None
                and not self.constraints.grammars
            ):
                nodes = 0  # the core, which masks such rows, takes prompt tokens for text
            may_draw = not self.constraints.has(name)
            request = self._texts.request(runner, slot, emitted, kept[slot], nodes, known, chain, may_draw)
            if not self._host.start(request):
                continue
            if known is None and self._export is not None:
                self._export.start(name, request.tokens[: request.num_prompt_tokens])
            requests.append(request)
            slots.append(slot)
        return requests, slots
