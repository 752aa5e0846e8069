# SPDX-License-Identifier: Apache-2.0
"""Between vLLM's V2 runner and its drafters: what the parts of a step share, and vLLM's ``BaseSpeculator``.

A step's parts (`model_state`, `rejection_sampler`, `model_runner`) know the trees of the slots and how a step's rows
lie. They do not know where the trees come from: grown on the device (`device`, `model`, `fused`), or by a proposer on
the host (`host`). No step asks for the value of a tensor on the host here, so that vLLM can prepare the next one while
this one runs; what the host decides it decides by what it knew before the step. Only steps that hold a structured
request wait, once, as vLLM's do: its tree is cut to what the grammar allows, on the host.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_ext.config import request_options, speculative
from vllm_ext.engine import paired_requests
from vllm_ext.engine.steering.paired_steps import PairedSteps
from vllm_ext.engine.steering.step_deferrals import StepDeferrals
from vllm_ext.engine.structured_output import known_trees
from vllm_ext.engine.structured_output.grammar import in_worker
from vllm_ext.engine.structured_output.known_trees import KnownTrees
from vllm_ext.engine.v2.speculators import tree_rows
from vllm_ext.engine.v2.speculators.counters import Counts
from vllm_ext.kernels import backends
from vllm_ext.kernels.device_trees import EMPTY, RowLayout, SlotTrees, keep_first, lay_out
from vllm_ext.kernels.drawn_rows import DrawnTrees
from vllm_ext.kernels.recycling import WalkedRows
from vllm_ext.kernels.top_k import top_k_ids
from vllm_ext.proposers.level_budget import levels_of
from vllm_ext.proposers.tree import Float32

logger = init_logger("vllm.vllm_ext")

# Of requests whose sampling depends on their output's tokens: their trees are sampled depth by depth.
SLOW_DEPTH = 6


class StepRows(NamedTuple):
    """What a step has computed and verified, on the device: of each request its root's row, then its tree's."""

    logits: torch.Tensor  # [rows, vocab] the target's own; of structured requests with their grammar's mask
    verified: WalkedRows
    layout: RowLayout | None  # of the trees; None where the step had no drafts, and each row is a root


class Paths(NamedTuple):
    """Of rows that are sampled, which ones are before them."""

    bits: torch.Tensor  # int32 [rows, WORDS]
    parents: torch.Tensor  # int32 [rows]


class Called(NamedTuple):
    """Of one call of vLLM's sampler, which rows it is for."""

    rows: slice | torch.Tensor  # among the step's rows with logits; int64
    counts: np.ndarray[Any, Any]  # [requests] how many each has, on the host
    chains: bool  # whether they are the paths so far, of each of which the last row is to be drawn from


def to_host(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A copy that is on its way to the host, and an event to wait for; None on the CPU."""
    moved = values.to("cpu", non_blocking=True)  # into memory that PyTorch has pinned for it
    if not values.is_cuda:
        return moved, None
    # One that sleeps: another thread of this process may have something to do.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return moved, event


class TreeSpeculator(BaseSpeculator):  # type: ignore[misc]  # vLLM is untyped to us
    """Drafts of all requests, by slot; and of the step that runs, how they were laid out."""

    supports_mm_inputs = False
    draft_logits = None  # drafts are certain

    trees: SlotTrees  # for the next step; the subclass makes them
    drawn: DrawnTrees  # likewise, where some are
    only_chains = False  # by the method's own options
    # By request, of the nodes of its tree, as far as the host knows; see `shares.cut`.
    chances: Mapping[str, Float32] = MappingProxyType({})

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        settings = speculative.from_vllm_config(vllm_config)
        assert settings is not None
        self.settings = settings
        self.device = device
        self.req_states = req_states
        self.num_nodes: int = settings.options.num_speculative_tokens
        self.max_depth = self.num_nodes  # of any tree's nodes
        self.max_num_reqs: int = vllm_config.scheduler_config.max_num_seqs
        self.layout = RowLayout.of_size(self.max_num_reqs, self.max_num_reqs * (1 + self.num_nodes), device)
        self.ones = torch.ones(self.max_num_reqs, dtype=torch.int32, device=device)
        self.no_past = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        self.verifying: Paths | None = None  # while trees' rows are sampled, these
        self.called: Called | None = None  # likewise, where rows are sampled of a step with drafts
        # By slot: a row's distribution depends on the tokens of its path, and whoever makes it takes rows for a chain.
        self.path_dependent = np.zeros(self.max_num_reqs, dtype=bool)
        self.structured = np.zeros(self.max_num_reqs, dtype=bool)
        self._only_chain = np.zeros(self.max_num_reqs, dtype=bool)
        # By slot, of its tree; 0: the request is switched off.
        self.most_nodes = np.full(self.max_num_reqs, self.num_nodes)
        self._teaches = UvaBackedTensor(self.max_num_reqs, dtype=torch.int32)
        # Why this model's drafts are chains; None where it can verify trees. Set once the caches are bound.
        self.chain_reason: str | None = None
        self.halves: PairedSteps | None = None  # set by the runner, where a rule reads pairs
        self.deferrals = StepDeferrals()  # likewise, where there are rules
        self.counts = Counts(vllm_config, device)
        # None: vLLM masks structured requests' rows along the flat list of drafts, right for chains alone.
        self.known_trees = (
            KnownTrees(vllm_config, self.counts.count, self._fault) if in_worker(vllm_config) else None
        )
        self.may_vary: Callable[[], bool] = lambda: (
            False
        )  # whether steps may have any query lengths; of the runner
        self.varlen = (
            False  # captured graphs are for such steps, whose every request has a tree, or its root alone
        )

    @property
    def enable_adaptive_verification(self) -> bool:
        """What vLLM asks of a speculator before it captures: graphs of decoding for any query lengths, or for one."""
        return self.may_vary()

    @property
    def levels(self) -> list[int]:
        """Nodes of one tree that steps will have."""
        return levels_of(self.num_nodes) if self.settings.options.budget != "fixed" else [self.num_nodes]

    @property
    @abstractmethod
    def memory(self) -> tuple[int, str]:
        """Bytes that drafting holds, and of which memory: ``host`` or ``device``."""

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing of ours is captured, unless a model drafts."""

    def capture(self) -> None:
        """See above."""

    def admit(self, slot: int, request: Any, path_dependent: bool) -> None:
        """A request has got a slot; its text is on the device.

        Args:
            slot: of vLLM's request state.
            request: vLLM's ``NewRequestData``; of one that was preempted with what it had put out.
            path_dependent: what is sampled depends on more of the output than its length.
        """
        structured = request.sampling_params.structured_outputs is not None
        self.structured[slot] = structured
        most = request_options.most_nodes(request.sampling_params)
        if paired_requests.primary_of(request.sampling_params) is not None:
            most = 0  # what it verifies is its primary's
        self.most_nodes[slot] = self.num_nodes if most is None else min(most, self.num_nodes)
        self._teaches.np[slot] = not structured and most != 0
        self.path_dependent[slot] = path_dependent
        if self.known_trees is not None:
            self.known_trees.start(request)
        masked_by_vllm = structured and self.known_trees is None
        chain = masked_by_vllm or self.chain_reason is not None or self.only_chains
        self._only_chain[slot] = chain
        self.start(slot, request, chain, SLOW_DEPTH if path_dependent else self.num_nodes)

    def apply_staged_writes(self) -> None:
        """After `admit`, before the step."""
        self._teaches.copy_to_uva()

    @property
    def teaches(self) -> torch.Tensor:
        """int32 ``[slots]``: 1 if the logits of a request are the model's own, with no grammar's mask in them, and may
        be learnt from.
        """
        flags: torch.Tensor = self._teaches.gpu
        return flags

    @property
    def prefill_len(self) -> torch.Tensor:
        """int32 ``[slots]``: tokens of each request's prompt, and of what it had put out when it came back."""
        lengths: torch.Tensor = self.req_states.prefill_len.gpu
        return lengths

    def to_device(self, numbers: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Integers that the host knows, without waiting."""
        moved: torch.Tensor = async_tensor_h2d(numbers, device=self.device, dtype=dtype)
        return moved

    def lay_out(self, input_batch: Any) -> None:
        """Rows and positions of the step's trees, in buffers that stay where they are."""
        lay_out(
            self.trees,
            input_batch.idx_mapping,
            input_batch.query_start_loc,
            input_batch.cu_num_logits,
            input_batch.seq_lens,
            input_batch.positions,
            self.layout,
            backends.V2,
        )

    @staticmethod
    def top(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 and float32 ``[rows, width]``: ids of each row's largest logits, best first, and these."""
        top_ids = top_k_ids(logits, width, backends.V2)
        return top_ids, logits.gather(1, top_ids.to(torch.int64)).to(torch.float32)

    @abstractmethod
    def start(self, slot: int, request: Any, chain: bool, most_depth: int) -> None:
        """A request has come, or has come back.

        Args:
            slot: see `admit`.
            request: see `admit`.
            chain: a tree cannot be verified for it.
            most_depth: of a node that can be.
        """

    def propose(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        """vLLM's: int64 ``[requests, nodes]`` in batch order, after the step's tokens were taken over."""
        tokens = self.draft(input_batch, *args, dummy_run=dummy_run, **kwargs)
        if dummy_run:
            return tokens
        tokens = self._as_asked(input_batch, tokens, kwargs.get("num_speculative_tokens", self.num_nodes))
        return tokens if self.halves is None else self.halves.share_drafts(self.trees, tokens)

    def _as_asked(self, input_batch: Any, tokens: torch.Tensor, level: int) -> torch.Tensor:
        """The batch's tokens, where requests have limits and grammars; ``level``: most nodes of a tree."""
        slots = input_batch.idx_mapping_np
        small = slots[self.most_nodes[slots] < self.num_nodes]
        if len(small):
            keep_first(self.trees, self.to_device(small), self.to_device(self.most_nodes[small]))
        if self.known_trees is None:
            return tokens
        structured = np.flatnonzero(self.structured[input_batch.idx_mapping_np])
        if not len(structured):
            return tokens
        self.known_trees.forget(input_batch.req_ids[place] for place in structured)
        done = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        speaking = structured[(done >= input_batch.prefill_len_np)[structured]]
        if not level or not len(speaking):
            return tokens
        return self._under_grammars(self.known_trees, input_batch, speaking, level, tokens)

    @abstractmethod
    def draft(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        """`propose`, but for grammars."""

    def _under_grammars(
        self,
        known: KnownTrees,
        input_batch: Any,
        places: np.ndarray[Any, Any],
        level: int,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        """The batch's tokens, with the trees of some requests cut to their grammars, and with what these demand.

        Args:
            known: gives these.
            input_batch: vLLM's.
            places: of these requests, in the batch.
            level: most nodes of a tree.
            tokens: what was drafted, of all requests.
        """
        slots = input_batch.idx_mapping_np[places]
        names = [input_batch.req_ids[place] for place in places]
        trees, roots = [], []
        arrived = self._texts_and_trees(places, slots, [known.length(name) for name in names], tokens)
        for name, slot, (text, drafted, parents) in zip(names, slots, arrived, strict=True):
            tree = known_trees.tree_of_rows(drafted, parents, level)
            most_depth = SLOW_DEPTH if self.path_dependent[slot] else self.num_nodes
            nodes = min(level, self.most_nodes[slot])
            trees.append(
                known.draft(name, text, tree, nodes, min(most_depth, self.max_depth), self._only_chain[slot])
            )
            roots.append(text[-1] if text else 0)
        packed = self.to_device(tree_rows.pack(trees, np.array(roots, np.int32), self.num_nodes), torch.int32)
        on_device = self.to_device(slots)
        made = tree_rows.put(packed, on_device, self.trees)
        self.trees.groups.index_fill_(0, on_device, EMPTY)
        return tokens.to(torch.int64).index_copy(0, self.to_device(places), made)

    def _texts_and_trees(
        self, places: Any, slots: Any, lengths: Sequence[int], tokens: torch.Tensor
    ) -> Iterator[tuple[list[int], np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Of each request its text from a length on, its tree's tokens and their parents' rows; waited for."""
        at, width, texts = self.to_device(slots), 1 + self.num_nodes, self.req_states.all_token_ids.gpu
        new = self.to_device(lengths)[:, None] + torch.arange(width, device=self.device)
        parts = (
            self.req_states.total_len.gpu[at][:, None],
            texts[at[:, None], new.clamp(max=texts.shape[1] - 1)],
            tokens[self.to_device(places)],
            self.trees.parents[at, 1:],
        )
        arrived = self._wait(*to_host(torch.cat([part.to(torch.int32) for part in parts], 1)))
        ends, own, drafted, parents = np.split(arrived, [1, 1 + width, 2 * width], axis=1)
        for row, (slot, length, end) in enumerate(zip(slots, lengths, ends[:, 0].tolist(), strict=True)):
            text = own[row, : max(end - length, 0)].tolist()
            if end > length + width:  # after steps of which nothing was heard here, as they drafted nothing
                text += self._wait(*to_host(texts[slot, length + width : end])).tolist()
            yield text, drafted[row], parents[row]

    def _wait(self, values: torch.Tensor, event: Any) -> np.ndarray[Any, Any]:
        """What `to_host` has sent: all that a step waits for."""
        if event is not None:
            event.synchronize()
        return values.numpy()

    def _fault(self, what: str) -> None:
        """Log the exception in hand and count it. Call in an except block."""
        logger.exception("vllm-ext: %s", what)
        self.counts.count("fallbacks:proposer_error")

    @abstractmethod
    def learn(self, rows: StepRows) -> None:
        """A step has been verified; before `propose` makes the next step's trees."""

    def needs(self, has_drafts: bool) -> bool:
        """Whether `learn` is to hear of the step that runs."""
        return True

    @abstractmethod
    def serve(self) -> None:
        """Requests have been made up so far, to warm up: what was learnt from them is forgotten."""

    @abstractmethod
    def forget(self) -> None:
        """Draft as if nothing had been learnt, for benchmarks. No request may be under way."""

    def load(self, target: Any) -> None:
        """vLLM's model is loaded, nothing has run yet."""

    def bind(self, runner: Any) -> None:
        """vLLM has bound the caches, for a while or for good.

        Raises:
            ValueError: a model that drafts cannot use them.
        """

    @property
    def aux_layers(self) -> Sequence[int]:
        """After how many of its layers the target is to hand out hidden states, ascending; once `load` was called."""
        return ()

    @property
    def own_layers(self) -> Sequence[str]:
        """Names of attention layers that are not the target's."""
        return ()

    def has_drawn(self, slots: Any) -> bool:
        """Whether any of these has a tree that was drawn: what verification needs of them is ``drawn``."""
        return False

    def finish(self, request_ids: Iterable[str]) -> None:
        """Requests are gone: finished or aborted, not preempted."""
        if self.known_trees is not None:
            self.known_trees.finish(request_ids)

    def close(self) -> None:
        """The worker shuts down; may be called again."""
