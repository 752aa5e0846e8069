# SPDX-License-Identifier: Apache-2.0
"""Drafting with passes of a model, between `drafter` and these: which model it is, how much, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_ext.config.head_files import block_of
from vllm_ext.engine.draft_model.cascaded import CascadedModel
from vllm_ext.engine.draft_model.eagle import EaglePasses
from vllm_ext.engine.draft_model.early_exit import EarlyExit
from vllm_ext.engine.draft_model.falcon import FalconPasses
from vllm_ext.engine.draft_model.heads import CloverPasses, MedusaPasses
from vllm_ext.engine.draft_model.own_caches import OwnCaches
from vllm_ext.engine.draft_model.passes import ModelPasses
from vllm_ext.engine.draft_model.self_speculation import SkippedLayers
from vllm_ext.engine.draft_model.separate import MAX_NEW_TOKENS, SeparateModel
from vllm_ext.engine.models import exit_heads
from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.proposers.base import Request, chains_where_asked
from vllm_ext.proposers.clover import CloverOptions
from vllm_ext.proposers.draft_budget import DraftBudget
from vllm_ext.proposers.draft_model import DraftModelOptions, DraftModelProposer
from vllm_ext.proposers.dynamic_exit import DynamicExit
from vllm_ext.proposers.eagle import EagleOptions
from vllm_ext.proposers.exit_budget import ExitBudget
from vllm_ext.proposers.exit_choice import ExitChoice, loaded_layers
from vllm_ext.proposers.hybrid import DraftOptions, Hybrid
from vllm_ext.proposers.layerskip import LayerSkip, LayerSkipOptions
from vllm_ext.proposers.reading_cost import ReadingCost
from vllm_ext.proposers.reflection import read_again
from vllm_ext.proposers.step_cost import StepCost
from vllm_ext.proposers.tree import DraftTree, Int32
from vllm_ext.proposers.unified_skip import UnifiedSkip, kept_layers

REST = 7  # steps in which the budget is not asked again after it has said that nothing pays
TOKENS_A_STEP = 2.0  # of a hybrid, believed: what a draft has to read is spread over an answer's steps
PASS_RATE = 0.1  # of learning what a pass takes
CALIBRATION_SECONDS = 8.0  # of all passes of early exits together
# Times passes of several sizes for a cost: the cost, the pass, what it is called, and for how many seconds.
Measure = Callable[[StepCost, Callable[[int], None], str, float | None], None]


class ModelDrafts:
    """One proposer that asks a model, and that model's passes.

    Args:
        vllm_config: the engine's.
        proposer: given what it asks.
        count: adds one to a counter.
    """

    def __init__(self, vllm_config: Any, proposer: DraftModelProposer, count: Callable[..., None]) -> None:
        self._config, self.proposer, self._count = vllm_config, proposer, count
        options = proposer.options
        num_layers = vllm_config.model_config.get_total_num_hidden_layers()
        self.passes: ModelPasses
        self.budget: DraftBudget | ExitBudget | None = None
        self._choice: ExitChoice | None = None
        if isinstance(proposer, LayerSkip | DynamicExit):
            exits = proposer.exits(num_layers)
            if isinstance(proposer, DynamicExit):
                self._choice = ExitChoice(len(exits), min(options.num_speculative_tokens, options.max_depth))
                self._layers = loaded_layers(exits, num_layers, self._choice.max_drafted)
            self.passes = _exits(vllm_config, exits, options.heads)
        elif isinstance(proposer, UnifiedSkip):
            self.passes = SkippedLayers(vllm_config, kept_layers(options, num_layers))
        else:
            self.passes = passes_of(vllm_config, options, count)
        _hand_over(self.passes, proposer)
        if options.budget != "fixed":
            if self._choice is not None:
                self.budget = ExitBudget(self._choice)
            else:
                first_rows = 2 if isinstance(self.passes, OwnCaches) else 1
                reuses = isinstance(self.passes, EarlyExit)
                one_pass = isinstance(self.passes, MedusaPasses)
                nodes, depths = options.num_speculative_tokens, self.passes.depths_a_pass
                self.budget = DraftBudget(nodes, first_rows, reuses, one_pass, depths)
        self.seconds = 0.0  # of drafting, since they were last taken
        self._watch = 0  # steps until all exits are asked again
        self._left = self._resting = (
            0  # steps until the budget is asked again; the batch size in which it said none
        )

    @property
    def rests(self) -> bool:
        """Whether `plan` has answered without asking the budget."""
        return 0 <= self._left < REST and self._resting > 0

    @property
    def early_exit(self) -> EarlyExit | None:
        """The passes, if they are an early exit's."""
        return self.passes if isinstance(self.passes, EarlyExit) else None

    def calibrate(self, measure: Measure, target_pass: Callable[[int], None]) -> None:
        """At start-up: compile what would else stall the first request; then measure what the budget must know."""
        exits = self.early_exit
        if exits is None:
            self.passes.warm_up()
            if isinstance(self.budget, DraftBudget):
                measure(self.budget.cost, target_pass, "forward pass", None)
                measure(self.budget.pass_cost, self.passes.calibration_pass, "draft pass", None)
            return
        if self.budget is not None:
            measure(self.budget.cost, target_pass, "forward pass", None)
        for choice, exit_layer in enumerate(exits.exits):
            exits.choice = choice
            exits.warm_up()
            exits.rest_calibration_pass(16)
            costs: tuple[StepCost, StepCost] | None = None
            if isinstance(self.budget, DraftBudget) and self.budget.rest_cost is not None:
                costs = self.budget.pass_cost, self.budget.rest_cost
            elif isinstance(self.budget, ExitBudget):
                costs = self.budget.pass_costs[choice], self.budget.rest_costs[choice]
            if costs is not None:
                patience = CALIBRATION_SECONDS / 2 / len(exits.exits)
                behind = f"after layer {exit_layer}"
                measure(costs[0], exits.calibration_pass, f"draft pass, exit {behind}", patience)
                measure(costs[1], exits.rest_calibration_pass, f"pass behind the exit {behind}", patience)
        exits.choice = 0

    def plan(self, request_ids: Sequence[str], num_tokens: Sequence[int], most: int) -> list[int]:
        """How many nodes to draft for the next step, the same on all ranks though their clocks differ.

        Args:
            request_ids: of those that decode.
            num_tokens: by request, tokens that are known.
            most: allowed by the scheduler.

        Returns:
            By request.
        """
        if self.passes.renew():
            self._left = 0
            if isinstance(self.budget, DraftBudget):
                self.budget.restart()
        drafted = len(request_ids)  # requests
        by_unread = list(range(drafted))  # those with the least to read first
        if self._left and drafted == self._resting:
            self._left -= 1
            return [0] * drafted
        rested = REST - self._left if self._resting else 0
        choice, nodes, least_worth, least_reach = 0, most, 0.0, 0.0
        if request_ids and isinstance(self.budget, ExitBudget):
            nodes = self.budget.plan(request_ids, sum(num_tokens), rested)
            choice, least_worth = self.budget.exit, self.budget.least_worth
        elif request_ids and isinstance(self.budget, DraftBudget):
            unread = self.passes.unread(request_ids, num_tokens)
            by_unread.sort(key=unread.__getitem__)
            nodes, drafted = self.budget.plan(sorted(unread), sum(num_tokens), rested)
            least_reach = self.budget.least_reach
        elif request_ids and self._choice is not None:
            choice, _, rate = self._choice.best(request_ids, self._layers)
            more = float(self._layers[choice, 1] - self._layers[choice, 0])
            least_worth = self._choice.least_worth(request_ids, choice, rate, more)
        if self._config.parallel_config.world_size > 1:
            decided = choice, nodes, drafted, least_worth, least_reach
            choice, nodes, drafted, least_worth, least_reach = get_tp_group().broadcast_object(decided, src=0)
        self.proposer.least_reach = least_reach
        # On all ranks alike: what each knows of the clock has no say.
        rests = request_ids and nodes == 0 and self.budget is not None and self.budget.settled
        self._left, self._resting = (REST, len(request_ids)) if rests else (0, 0)
        if self.early_exit is not None:
            self.early_exit.choice = choice
            if isinstance(self.proposer, DynamicExit):
                self.proposer.exit_layer = self.early_exit.exits[choice]
                self.proposer.least_worth = least_worth
        wanted = [0] * len(request_ids)
        for index in by_unread[:drafted]:
            wanted[index] = min(nodes, most)
        return wanted

    def propose(
        self, runner: Any, requests: list[Request], batch_size: int, trees: StepTrees
    ) -> list[DraftTree]:
        """The proposer's trees, by a model that has read what this step has committed.

        Args:
            runner: vLLM's.
            requests: to be drafted for, perhaps.
            batch_size: of all.
            trees: this step's rows, and which were accepted.
        """
        started = time.perf_counter()
        known = runner.input_batch.num_tokens_no_spec[:batch_size].tolist()
        drafting = {request.request_id for request in requests if request.has_room}
        self.passes.verified(trees)
        self.passes.advance(known, drafting)
        if drafting and isinstance(self.proposer, DynamicExit) and self.early_exit is not None:
            self._watch = self._watch - 1 if self._watch else self.proposer.options.watch_every - 1
            self.early_exit.watched = self._watch == 0
        proposed = chains_where_asked(requests, self.proposer.propose(requests))
        drafted = [(r.request_id, tree) for r, tree in zip(requests, proposed, strict=True) if len(tree)]
        if drafted:
            self.passes.settle([name for name, _ in drafted], [tree for _, tree in drafted])
        self._count("spec_draft_passes", len(self.passes.passes))
        self.seconds = time.perf_counter() - started
        if self.budget is not None and drafted:
            context = sum(len(request.tokens) for request in requests if request.request_id in drafting)
            for one in self.passes.passes:
                if not one.reads:
                    self.budget.record_pass(one.seconds, one.rows, one.num_requests, context)
                elif isinstance(self.budget, DraftBudget):
                    self.budget.reading.record(one.seconds, one.rows)
            host = self.seconds - sum(one.seconds for one in self.passes.passes)
            of_requests = [tree for _, tree in drafted]
            if isinstance(self.budget, DraftBudget):
                self.budget.drafted(of_requests, host, self.proposer.passes, self.passes.spared)
            else:
                self.budget.drafted(of_requests, host)
        return [
            read_again(tree, request.reflection) for request, tree in zip(requests, proposed, strict=True)
        ]

    def observe(
        self, trees: StepTrees, request_ids: Sequence[str], sizes: Int32, sampled: Sequence[Sequence[int]]
    ) -> None:
        """Learn from one verified step.

        Args:
            trees: its rows, and which were accepted.
            request_ids: the batch.
            sizes: by batch index, nodes verified.
            sampled: by batch index, the tokens put out.
        """
        if isinstance(self.budget, DraftBudget):
            self.budget.observe(
                sizes.tolist(),
                [[row - 1 for row in path] for path in trees.accepted],
                [self.proposer.reached.get(name, ()) for name in request_ids],
            )
        exits = self.early_exit
        if self._choice is None or exits is None:
            return
        # Rows whose input the target has confirmed: what it says there counts.
        rows = [
            [start + row for row in (0, *path)][: len(tokens)]
            for start, path, tokens in zip(trees.row_start.tolist(), trees.accepted, sampled, strict=False)
        ]
        shadows = exits.shadows([row for of_request in rows for row in of_request]) if exits.watched else None
        end = 0
        for index, (name, of_request, tokens) in enumerate(zip(request_ids, rows, sampled, strict=True)):
            end += len(of_request)
            if of_request and shadows is not None:
                self._choice.observe(name, shadows[:, end - len(of_request) : end], tokens)
            elif of_request and sizes[index]:
                self._choice.observe_drafts(name, exits.choice, int(sizes[index]), len(of_request) - 1)

    def record_step(self, seconds: float, rows: int, batch_size: int, context_tokens: int) -> None:
        """Learn from the clock of a step without prompt tokens; the draft's time is not in it."""
        if self.rests and self._left % 4:
            return  # plain steps, all alike
        behind = None if self.early_exit is None else self.early_exit.began_behind
        if self.budget is not None:
            self.budget.record_step(seconds, rows, batch_size, context_tokens, behind)

    def take_seconds(self) -> float:
        """The time of drafting since this was last asked."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def finish(self, request_id: str, num_output_tokens: int) -> None:
        """A request is gone."""
        self.passes.forget(request_id)
        if isinstance(self.budget, DraftBudget):
            self.budget.reading.ended(num_output_tokens)
        if self._choice is not None:
            self._choice.finish(request_id)


class FusedDraft:
    """Heads or a model among a hybrid's drafters: they read what a step has committed before all drafters are asked.

    Args:
        vllm_config: the engine's.
        options: which heads, or which model.
        count: adds one to a counter.
    """

    def __init__(self, vllm_config: Any, options: DraftOptions, count: Callable[[str], None]) -> None:
        self._config = vllm_config
        self.passes = passes_of(vllm_config, options, count)
        self._first = self._each = (
            0.0  # seconds of reading what was committed, and of a pass after it with its host's
        )
        self._reading = ReadingCost()
        self._read: Callable[[set[str]], None] | None = None  # of this step, until it has taken place
        self._drafting: set[str] = set()  # requests that the draft was asked about

    def before(
        self, runner: Any, trees: StepTrees, requests: Sequence[Request], hybrid: Hybrid, rate: float
    ) -> None:
        """Before all drafters are asked: hand over to the one that asks, and say what pays.

        Args:
            runner: vLLM's.
            trees: the step's rows, and which were accepted.
            requests: to be drafted for, perhaps.
            hybrid: the proposer; another may have been put in its place since the last step.
            rate: tokens per second that steps are expected to put out; 0: not known.
        """
        asking = next(each for each in hybrid.drafters if isinstance(each, DraftModelProposer))
        _hand_over(self.passes, asking)
        self._learn(asking.passes, hybrid.draft_seconds)
        hybrid.draft_seconds = 0.0
        # A pass that brings less than steps put out in its time does not pay.
        names = [request.request_id for request in requests]
        unread = self.passes.unread(names, [len(request.tokens) for request in requests])
        row = self._reading.row_seconds(0.0) / self._reading.steps(TOKENS_A_STEP)
        first = {
            name: rate * (self._first / len(requests) + row * (tokens if tokens > MAX_NEW_TOKENS else 0))
            for name, tokens in zip(names, unread, strict=True)
        }
        least = first, rate * self._each
        if self._config.parallel_config.world_size > 1:  # clocks differ, and ranks must pass alike
            least = get_tp_group().broadcast_object(least, src=0)
        hybrid.least_first, hybrid.least_reach = least
        self.passes.verified(trees)
        known = runner.input_batch.num_tokens_no_spec[: len(trees.query_row)].tolist()
        self._read = lambda drafting: self.passes.advance(known, drafting)
        if not asking.in_rounds:
            self.read({request.request_id for request in requests if request.has_room})
        else:
            hybrid.read = self.read

    @property
    def early_exit(self) -> EarlyExit | None:
        """The passes, if they are an early exit's."""
        return self.passes if isinstance(self.passes, EarlyExit) else None

    def read(self, drafting: set[str]) -> None:
        """Read what the step has committed; once a step."""
        read, self._read = self._read, None
        if read is not None:
            self._drafting = drafting
            read(drafting)

    def settle(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        """These are the trees that the target will verify. Where the draft was not asked, it still reads the step."""
        self.read(set())
        names = [request.request_id for request in requests]
        if names and all(map(len, trees)) and self._drafting.issuperset(names):
            self.passes.settle(names, trees)

    def finish(self, request_id: str, num_output_tokens: int) -> None:
        """A request is gone."""
        self.passes.forget(request_id)
        self._reading.ended(num_output_tokens)

    def _learn(self, passes: int, seconds: float) -> None:
        if not seconds or not self.passes.passes:
            return
        for one in self.passes.passes:
            if one.reads:
                self._reading.record(one.seconds, one.rows)
        first = self.passes.passes[0]
        if not first.reads:
            self._first += PASS_RATE * (first.seconds - self._first) if self._first else first.seconds
        if passes:
            each = seconds / passes
            self._each += PASS_RATE * (each - self._each) if self._each else each


def passes_of(vllm_config: Any, options: DraftOptions, count: Callable[[str], None]) -> ModelPasses:
    """Those of the heads or of the model that the options name."""
    if isinstance(options, DraftModelOptions):
        return (CascadedModel if options.guesses else SeparateModel)(vllm_config, options)
    if isinstance(options, EagleOptions):
        kind = FalconPasses if block_of(options.model) > 1 else EaglePasses
        return kind(vllm_config, options, count)
    if isinstance(options, CloverOptions):
        return CloverPasses(vllm_config, options)
    if isinstance(options, LayerSkipOptions):
        exits = LayerSkip(options).exits(vllm_config.model_config.get_total_num_hidden_layers())
        return _exits(vllm_config, exits, options.heads)
    return MedusaPasses(vllm_config, options)


def _exits(vllm_config: Any, exits: Sequence[int], heads: str | None) -> EarlyExit:
    device = torch.device(vllm_config.device_config.device)
    dtype = vllm_config.model_config.dtype
    loaded = exit_heads.load(heads, exits, dtype, device) if heads else {}
    return EarlyExit(vllm_config, exits, loaded)


def _hand_over(passes: ModelPasses, proposer: DraftModelProposer) -> None:
    proposer.draft, proposer.blind = passes, passes.blind
    if isinstance(passes, MedusaPasses):
        proposer.deepest = passes.num_heads
