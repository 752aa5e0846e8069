# SPDX-License-Identifier: Apache-2.0
"""A proposer of vLLM's V1 runner as one of a hybrid's drafters: made by its own class, asked beside a tree's step.

vLLM's proposers know chains alone. So the step is made straight first: tokens, positions and hidden states of the
accepted path move to the rows that a chain's would have had, as its KV did. What is drafted has slots behind the
committed tokens, which the scheduler reserves (`scheduler.drafts`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group

from vllm_ext.engine.draft_model.passes import Companion
from vllm_ext.engine.models import cpu_linear, eagle_head
from vllm_ext.engine.models.second_model import with_speculation
from vllm_ext.engine.tree_layout import StepTrees
from vllm_ext.proposers.base import Proposer, in_one_line
from vllm_ext.proposers.budget import GoodputBudget
from vllm_ext.proposers.hybrid import Hybrid
from vllm_ext.proposers.vllm_chain import VllmChain, VllmChainOptions

PASS_RATE = 0.1  # of learning what passes take
WHOLE = ("ngram", "suffix", "medusa")  # of vLLM's methods those that always say as much as they can


def check(vllm_config: Any, options: VllmChainOptions, num_nodes: int) -> None:
    """Refuse at start-up what cannot be asked here; and leave room in a step for the tokens that it reads more.

    Args:
        vllm_config: the engine's.
        options: whose proposer it is.
        num_nodes: most nodes of a tree.

    Raises:
        ValueError: naming the field, its value and the way out.
    """
    field = "drafters: vllm.speculative_config"
    parallel = vllm_config.parallel_config.data_parallel_size
    if options.asks and parallel > 1:
        raise ValueError(
            f"{field}.method={options.speculative_config['method']!r} does not work with data_parallel_size="
            f"{parallel}: ranks would have to pass together. Leave the drafter out, or take one of vllm-ext's own."
        )
    try:
        config = with_speculation(vllm_config, **options.speculative_config).speculative_config
    except (ValueError, ImportError, OSError, AssertionError) as error:
        problem = in_one_line(error) if isinstance(error, ValidationError) else str(error)
        raise ValueError(f"{field}: vLLM does not take it: {problem}") from error
    if config.num_speculative_tokens > num_nodes:
        raise ValueError(
            f"{field}.num_speculative_tokens={config.num_speculative_tokens} is not allowed; allowed: at most "
            f"speculative_config.num_speculative_tokens={num_nodes}, the nodes of a tree. Lower it, or raise that."
        )
    if config.use_gemma4_mtp() or config.use_step3p5_mtp():
        raise ValueError(
            f"{field}: the multi-token predictor of {vllm_config.model_config.model!r} reads several KV cache groups, "
            "and cannot be asked beside trees. Leave the drafter out."
        )
    scheduler = vllm_config.scheduler_config
    more = scheduler.max_num_seqs * config.max_num_new_slots_for_drafting
    left = scheduler.max_num_batched_tokens - more
    if left < scheduler.max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens={scheduler.max_num_batched_tokens} is too small for drafters: vllm, which reads a "
            f"token more of each of max_num_seqs={scheduler.max_num_seqs} requests. Raise it, or lower max_num_seqs."
        )
    if more:
        scheduler.max_num_scheduled_tokens = min(left, scheduler.max_num_scheduled_tokens or left)


class VllmProposers:
    """All that a hybrid asks.

    Args:
        vllm_config: the engine's.
        proposer: the method; most ask none.
    """

    def __init__(self, vllm_config: Any, proposer: Proposer) -> None:
        self._made = [VllmProposer(vllm_config, chain) for chain in _chains(proposer)]

    @property
    def asking(self) -> VllmProposer | None:
        """The one that runs a model."""
        return next((each for each in self._made if each.asks), None)

    @contextmanager
    def during(
        self,
        runner: Any,
        trees: StepTrees,
        sampled: list[list[int]],
        proposer: Proposer,
        budget: GoodputBudget | None,
    ) -> Iterator[None]:
        """While the method's trees are made, they may be asked.

        Args:
            runner: vLLM's.
            trees: the step's rows, and which were accepted.
            sampled: by batch index, the tokens of this step.
            proposer: the method; another may have been put in its place since the last step.
            budget: tells what steps are expected to put out.
        """
        if not self._made:
            yield
            return
        rate = 0.0 if budget is None else budget.rate
        both = list(zip(self._made, _chains(proposer), strict=True))
        for asked, chain in both:
            asked.before(runner, trees, sampled, chain, rate)
        yield
        for asked, chain in both:
            asked.after(chain, runner.input_batch.req_ids, reading=not all(sampled))


def _chains(proposer: Proposer) -> list[VllmChain]:
    drafters = proposer.drafters if isinstance(proposer, Hybrid) else ()
    return [each for each in drafters if isinstance(each, VllmChain)]


class VllmProposer(Companion):
    """One, and what asking it costs.

    Args:
        vllm_config: the engine's.
        chain: what its drafts are handed to.
    """

    def __init__(self, vllm_config: Any, chain: VllmChain) -> None:
        super().__init__()
        self._options = chain.options
        self._config = with_speculation(vllm_config, **chain.options.speculative_config)
        self._device = torch.device(vllm_config.device_config.device)
        self._method = self._config.speculative_config.method
        self.most = int(self._config.speculative_config.num_speculative_tokens)
        self._draft_len: int | None = None
        self._aux_layers: tuple[int, ...] = ()
        # Seconds by batch size, rounded up to a power of two: of the first pass, and of each after it.
        self._first: dict[int, float] = {}
        self._each: dict[int, float] = {}
        self._asked = False
        self.proposer = self._make()

    def _make(self) -> Any:
        config, device = self._config, self._device
        if self._method == "ngram":
            from vllm.v1.spec_decode.ngram_proposer import NgramProposer

            return NgramProposer(config)
        if self._method == "suffix":
            from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

            return SuffixDecodingProposer(config)
        self._draft_len = config.speculative_config.draft_model_config.max_model_len
        if self._method == "medusa":
            from vllm.v1.spec_decode.medusa import MedusaProposer

            return MedusaProposer(vllm_config=config, device=device)
        if self._method == "draft_model":
            from vllm.v1.spec_decode.draft_model import DraftModelProposer

            return DraftModelProposer(config, device)
        from vllm.v1.spec_decode.eagle import EagleProposer

        return EagleProposer(config, device)

    @property
    def asks(self) -> bool:
        """Whether it runs a model."""
        return self._options.asks

    @property
    def aux_layers(self) -> Sequence[int]:
        """See `Companion`."""
        return self._aux_layers

    def load(self, target: Any) -> None:
        """See `Companion`."""
        if not self._options.asks:
            return
        with cpu_linear.drafts(self._config), set_current_vllm_config(self._config):
            self.proposer.load_model(target)
        self.own_layers = sorted(getattr(self.proposer, "_draft_attn_layer_names", ()))
        if getattr(self.proposer, "eagle3_use_aux_hidden_state", False) and self._method == "eagle3":
            named = eagle_head.layer_ids(self._config.speculative_config.draft_model_config.hf_config)
            self._aux_layers = tuple(named or target.get_eagle3_default_aux_hidden_state_layers())

    def bind(self, runner: Any) -> None:
        """See `Companion`."""
        super().bind(runner)
        self.proposer.runner = runner
        if self.own_layers:
            self.proposer.initialize_attn_backend(runner.kv_cache_config, runner._kernel_block_sizes)

    def warm_up(self) -> None:
        """See `Companion`."""
        if self._options.asks:
            with set_current_vllm_config(self._config), torch.inference_mode():
                self.proposer.dummy_run(num_tokens=16)

    def before(
        self, runner: Any, trees: StepTrees, sampled: list[list[int]], chain: VllmChain, rate: float
    ) -> None:
        """Before all drafters are asked: hand over to the one that asks, and say what pays.

        Args:
            runner: vLLM's.
            trees: the step's rows, and which were accepted.
            sampled: by batch index, the tokens of this step.
            chain: the drafter; another may have been put in its place since the last step.
            rate: tokens per second that steps are expected to put out; 0: not known.
        """
        self._asked = False
        chain.most, chain.varies, chain.reads = self.most, self._method not in WHOLE, bool(self.own_layers)
        chain.ask = lambda length: self._ask(runner, trees, sampled, length)
        size = _rounded(len(sampled))
        least = rate * self._first.get(size, 0.0), rate * self._each.get(size, 0.0)
        if self._config.parallel_config.world_size > 1:  # clocks differ, and ranks must pass alike
            least = get_tp_group().broadcast_object(least, src=0)
        chain.least_first, chain.least_each = least

    def after(self, chain: VllmChain, request_ids: Sequence[str], reading: bool) -> None:
        """Once all drafters were asked: a model with a cache that was not has missed the step.

        Args:
            chain: as in `before`.
            request_ids: all that ran.
            reading: some have a prompt to go on with.
        """
        if self._asked or not self.own_layers:
            return
        if reading:
            chain.ask(0)
        if not self._asked:
            chain.blind.update(request_ids)

    def _ask(
        self, runner: Any, trees: StepTrees, sampled: list[list[int]], length: int
    ) -> Mapping[str, list[int]]:
        batch = runner.input_batch
        longest = int(batch.num_tokens_no_spec[: len(sampled)].max())
        if self._draft_len is not None and longest + length + 1 > self._draft_len:
            return {}
        self._asked = True
        started = time.perf_counter()
        if self._method == "ngram":
            drafts = self.proposer.propose(self.most, sampled, batch.num_tokens_no_spec, batch.token_ids_cpu)
        elif self._method == "suffix":
            drafts = self.proposer.propose(self.most, batch, sampled)
        else:
            passes = self._heads if self._method == "medusa" else self._model
            with set_current_vllm_config(self._config), torch.inference_mode():
                drafts = passes(runner, trees, sampled, length).tolist()
            if length and len(trees.decoding) == len(sampled):
                self._learn(
                    _rounded(len(sampled)),
                    time.perf_counter() - started,
                    1 if self._method in WHOLE else length,
                )
        return dict(zip(batch.req_ids, drafts, strict=True))

    def _learn(self, size: int, seconds: float, passes: int) -> None:
        """From the time of so many passes; one pass alone tells what the first takes."""
        first = self._first.setdefault(size, seconds / passes)
        if passes == 1:
            self._first[size] += PASS_RATE * (seconds - first)
        else:
            each = max(seconds - first, 0.0) / (passes - 1)
            self._each[size] = each + (1 - PASS_RATE) * (self._each.get(size, each) - each)

    def _heads(self, runner: Any, trees: StepTrees, sampled: list[list[int]], _: int) -> torch.Tensor:
        """``[num_requests, most]``; heads read the last accepted row alone."""
        last = [
            row + [0, *path][max(len(tokens) - 1, 0)]
            for row, path, tokens in zip(trees.query_row.tolist(), trees.accepted, sampled, strict=True)
        ]
        drafts: torch.Tensor = self.proposer.propose(
            num_speculative_tokens=self.most,
            target_hidden_states=runner.step_hidden[last],
            sampling_metadata=runner.input_batch.sampling_metadata,
        )
        return drafts

    def _model(self, runner: Any, trees: StepTrees, sampled: list[list[int]], length: int) -> torch.Tensor:
        """``[num_requests, length]``."""
        proposer, batch, output = self.proposer, runner.input_batch, runner.step_output
        tokens = proposer.prepare_next_token_ids_cpu(
            sampled, runner.requests, batch, output.num_scheduled_tokens
        )
        table = batch.block_table[proposer.kv_cache_gid]
        step = replace(
            runner.step_common,
            block_table_tensor=table.get_device_tensor(len(sampled)),
            slot_mapping=table.slot_mapping.gpu[: output.total_num_scheduled_tokens],
        )
        num_drafts = (np.diff(trees.row_start) - 1).tolist()
        common, kept = proposer.prepare_inputs(step, sampled, num_drafts)
        # By row of a chain's, the row that has what stands there now: token, position and hidden states.
        straight = np.arange(output.total_num_scheduled_tokens)
        source, target = trees.moves()
        straight[target] = source
        rows = torch.from_numpy(straight).to(self._device)[kept.long()]
        streams = [runner.step_streams[runner.aux_layers.index(layer)][rows] for layer in self._aux_layers]
        images = None
        if runner.supports_mm_inputs and proposer.supports_mm_inputs:
            images = runner._gather_mm_embeddings(output, shift_computed_tokens=1)
        drafts: torch.Tensor = proposer.propose(
            num_speculative_tokens=length,
            target_token_ids=runner.input_ids.gpu[rows],
            target_positions=runner._get_positions(rows),
            target_hidden_states=torch.cat(streams, dim=-1) if streams else runner.step_hidden[rows],
            next_token_ids=tokens,
            token_indices_to_sample=None,
            sampling_metadata=batch.sampling_metadata,
            common_attn_metadata=common,
            mm_embed_inputs=images,
        )
        return drafts


def _rounded(batch_size: int) -> int:
    return 1 << (batch_size - 1).bit_length()
