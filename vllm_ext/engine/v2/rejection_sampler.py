# SPDX-License-Identifier: Apache-2.0
"""Verification in the V2 runner: vLLM's own sampler on each row, then a walk along what it has drawn.

vLLM keys a row's noise by seed and position, so a row samples what it would have sampled without speculation, whatever
is sampled beside it: seeded output is the same token for token, and nothing waits for anything. Where a distribution
depends on the tokens before it, vLLM's code takes a request's rows for a chain. Penalties and bad words have kernels of
ours that go by the path (`penalties`). For a thinking budget, and processors of the user's own, trees are sampled
depth by depth, the path so far laid out as the chain it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler, get_max_chunk_logits

from vllm_ext.engine.v2.speculators.base import SLOW_DEPTH, Called, Paths, StepRows, TreeSpeculator
from vllm_ext.kernels import backends
from vllm_ext.kernels.device_trees import Walked, walk
from vllm_ext.kernels.drawn_rows import choose_drawn
from vllm_ext.kernels.recycling import WalkedRows

NO_TOKEN = -1
UNKNOWN = -2  # instead of what a row samples, as long as it has not


class LearningSampler:
    """Mixin in front of vLLM's sampler: of steps without drafts the drafter learns too."""

    speculator: TreeSpeculator

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        output = super().__call__(logits, input_batch)  # type: ignore[misc]
        trees = self.speculator
        if input_batch.req_ids[0] not in trees.req_states.req_id_to_index:
            return output  # made up to warm up
        done = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        speaking = int((done >= input_batch.prefill_len_np).sum())
        speaking -= 0 if trees.halves is None else trees.halves.num_apart
        speaking -= len(trees.deferrals.found)
        trees.counts.count("spec_emitted_tokens", speaking)
        trees.counts.count("spec_steps", speaking)
        if trees.needs(has_drafts=False):
            rows = input_batch.logits_indices
            verified = WalkedRows(
                input_batch.cu_num_logits,
                input_batch.idx_mapping,
                input_batch.input_ids[rows],
                input_batch.positions[rows],
                trees.ones[: input_batch.num_reqs],
                output.sampled_token_ids,
                output.num_sampled,
            )
            trees.learn(StepRows(logits, verified, None))  # vLLM's sampler has written into a copy
        return output


class TreeVerifier(RejectionSampler):  # type: ignore[misc]  # vLLM is untyped to us
    """A rejection sampler that rejects nothing: it samples, and looks whether the draft had it."""

    walked: Walked  # of the step that was verified last

    def __init__(self, sampler: Any, config: Any, device: torch.device, speculator: TreeSpeculator) -> None:
        super().__init__(sampler, config, device)
        self._trees = speculator
        # Of the step that is verified.
        self._row = 0  # rows verified so far: of large batches part after part
        self._request = 0
        self._row_start: Any = None  # int32 [requests + 1], on the host
        self._seq_lens = self._invalid = torch.empty(0)
        self._part: Any = None  # of the part verified last, what its rows' order is made of
        self._num_token_ids = 0  # most logprob token ids that a request of the step asks for

    def __call__(
        self, logits: torch.Tensor, input_batch: Any, draft_logits: Any = None, invalid_drafts: Any = None
    ) -> SamplerOutput:
        """vLLM's; ``draft_logits`` is None for all our methods."""
        sampler, trees = self.sampler, self._trees
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        rows = input_batch.logits_indices
        ids, pos = input_batch.input_ids[rows], input_batch.positions[rows]
        if trees.halves is not None:
            trees.halves.read(logits)
        self._row = self._request = 0
        self._row_start = input_batch.cu_num_logits_np
        self._seq_lens, self._invalid = input_batch.seq_lens, invalid_drafts
        ids_state = sampler.logprob_token_ids_state
        self._num_token_ids = ids_state.max_num_token_ids(input_batch.idx_mapping_np)
        self.walked = Walked.of_size(input_batch.num_reqs, len(ids), 1 + trees.num_nodes, ids.device)
        _, _, logprobs, masks = self._verify_in_chunks(
            logits,
            input_batch,
            None,
            ids,
            pos,
            get_max_chunk_logits(logits.shape[1]),
            sampler.sampling_states.max_num_logprobs(input_batch.idx_mapping_np),
        )
        walked = self.walked
        if trees.halves is not None:
            trees.halves.settle_walk(walked, trees.layout.parents, trees.counts.on_device)
        if trees.needs(has_drafts=True):
            verified = WalkedRows(
                input_batch.cu_num_logits,
                input_batch.idx_mapping,
                ids,
                pos,
                walked.accepted,
                walked.emitted,
                walked.num_emitted,
            )
            trees.learn(StepRows(logits, verified, trees.layout))
        return SamplerOutput(
            sampled_token_ids=walked.emitted,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=walked.num_emitted,
            num_rejected=walked.num_rejected,
            sampling_mask_tensors=masks,
        )

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: Any,
        tokens: torch.Tensor,
        pos: torch.Tensor,
        row_start: torch.Tensor,
        slots: torch.Tensor,
        slots_np: Any,
        row_slots: torch.Tensor,
        offset: torch.Tensor,
        seq_lens_np: Any,
        verified_tokens: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """See the base class; the processed logits stand in the order of the path, as those of a chain do."""
        trees, num_requests = self._trees, len(slots)
        rows = slice(self._row, self._row + len(tokens))
        requests = slice(self._request, self._request + num_requests)
        self._row, self._request = rows.stop, requests.stop
        whole = self.walked
        walked = Walked(
            whole.emitted[requests],
            whole.num_emitted[requests],
            whole.num_rejected[requests],
            whole.path[requests],
            whole.accepted[rows],
        )

        dependent = np.flatnonzero(trees.path_dependent[slots_np])
        if len(dependent):
            processed, sampled = self._sample_others(
                rows,
                requests,
                dependent,
                logits,
                row_slots,
                slots,
                slots_np,
                pos,
                tokens,
                offset,
                seq_lens_np,
            )
        else:
            with self._along(rows, np.diff(self._row_start[requests.start : requests.stop + 1])):
                processed, sampled = self._sample(
                    logits, row_slots, slots, slots_np, pos, tokens, offset, seq_lens_np, row_start
                )

        def follow(totals: torch.Tensor | None = None) -> None:
            walk(
                row_start,
                slots,
                tokens,
                pos,
                trees.layout.parents[rows],
                sampled,
                None if self._invalid is None else self._invalid[rows],
                trees.prefill_len,
                self._seq_lens[requests],
                walked,
                totals,
                backends.V2,
            )

        if len(dependent):
            picked = trees.to_device(dependent)
            place = torch.arange(1 + SLOW_DEPTH, device=tokens.device)
            first = row_start[:-1][picked].to(torch.int64)
            for depth in range(1 + SLOW_DEPTH):
                follow()
                # The path so far of each; of one that has ended, what is behind does not matter and has no token.
                chain = first[:, None] + torch.minimum(
                    walked.path[picked, : depth + 1], (row_start.diff() - 1)[picked, None]
                )
                flat = chain.flatten()
                there = place[: depth + 1] < walked.num_emitted[picked, None]
                with self._along(flat + rows.start, np.full(len(dependent), depth + 1), chains=True):
                    masked, drawn = self._sample(
                        logits[flat],
                        row_slots[flat],
                        slots[picked],
                        slots_np[dependent],
                        pos[flat],
                        torch.where(there.flatten(), tokens[flat], NO_TOKEN),
                        place[: depth + 1].to(torch.int32).repeat(len(dependent)),
                        seq_lens_np[dependent],
                    )
                last = chain[:, -1]
                goes_on = walked.num_emitted[picked] == depth + 1
                if held := trees.deferrals.places(slots_np[dependent]):
                    goes_on.index_fill_(0, trees.to_device(held), False)
                sampled[last] = torch.where(goes_on, drawn.view(-1, depth + 1)[:, -1], sampled[last])
                if processed is not None:
                    ends = masked.view(len(dependent), depth + 1, -1)[:, -1].to(processed.dtype)
                    processed[last] = torch.where(goes_on[:, None], ends, processed[last])
        follow(trees.counts.on_device)
        trees.deferrals.settle_walk(slots_np, row_start, walked, trees.counts.on_device)

        self._part = row_start, row_slots, offset, walked.path
        if self._reads_processed:
            assert processed is not None
            processed = processed[self._order()]
        return processed, walked.emitted, walked.num_emitted

    def _order(self) -> torch.Tensor:
        """int64 ``[rows]``: of the part verified last, its rows with each request's path first."""
        row_start, _, offset, path = self._part
        request = self._requests()
        order: torch.Tensor = row_start[:-1][request].to(torch.int64) + torch.minimum(
            path[request, offset.to(torch.int64)], row_start.diff()[request] - 1
        )
        return order

    def _requests(self) -> torch.Tensor:
        """int64 ``[rows]``: of the part verified last, whose each row is."""
        row_start, _, offset, _ = self._part
        rows = row_start.diff()
        own = torch.arange(len(rows), device=rows.device)
        request: torch.Tensor = torch.repeat_interleave(own, rows, output_size=len(offset))
        return request

    @contextmanager
    def _along(self, rows: Any, counts: Any, chains: bool = False) -> Iterator[None]:
        """Sample rows of the step's trees, each by its own path; or as chains, each behind the row before it.

        Args:
            rows: which ones, a slice or int64 on the device.
            counts: see `Called`.
            chains: see above.
        """
        trees, layout = self._trees, self._trees.layout
        trees.called = Called(rows, counts, chains)
        trees.verifying = None if chains else Paths(layout.bits[rows], layout.parents[rows])
        try:
            yield
        finally:
            trees.called = trees.verifying = None

    def _sample_others(
        self,
        rows: slice,
        requests: slice,
        dependent: Any,
        logits: torch.Tensor,
        row_slots: torch.Tensor,
        slots: torch.Tensor,
        slots_np: Any,
        pos: torch.Tensor,
        tokens: torch.Tensor,
        offset: torch.Tensor,
        seq_lens_np: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """See `_sample`, for the requests whose rows do not depend on their path; UNKNOWN for the others'."""
        processed = torch.empty_like(logits, dtype=torch.float32) if self._reads_processed else None
        sampled = torch.full_like(tokens, UNKNOWN, dtype=torch.int64)
        others = np.setdiff1d(np.arange(len(slots_np)), dependent)
        if len(others):
            start = self._row_start[requests.start : requests.stop + 1]
            flat = self._trees.to_device(
                np.concatenate([np.arange(start[i], start[i + 1]) for i in others]) - start[0]
            )
            own_start = np.cumsum([0, *np.diff(start)[others]])
            picked = self._trees.to_device(others)
            with self._along(flat + rows.start, np.diff(start)[others]):
                masked, sampled[flat] = self._sample(
                    logits[flat],
                    row_slots[flat],
                    slots[picked],
                    slots_np[others],
                    pos[flat],
                    tokens[flat],
                    offset[flat],
                    seq_lens_np[others],
                    self._trees.to_device(own_start, torch.int32),
                )
            if processed is not None:
                processed[flat] = masked.to(processed.dtype)
        return processed, sampled

    def _sample(
        self,
        logits: torch.Tensor,
        row_slots: torch.Tensor,
        slots: torch.Tensor,
        slots_np: Any,
        pos: torch.Tensor,
        tokens: torch.Tensor,
        offset: torch.Tensor,
        seq_lens_np: Any,
        row_start: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What vLLM's sampler makes of some rows, and the token that it draws for each.

        Where the rows are whole trees, these begin at ``row_start``; of drawn ones the verifier may have a child first.
        """
        sampler, trees = self.sampler, self._trees
        processed = sampler.apply_sampling_params(
            logits, row_slots, slots, slots_np, pos, tokens, offset, seq_lens_np
        )
        left, accepted = processed, None
        if row_start is not None and trees.has_drawn(slots_np):
            # Changed in place: not the logits, and not what log-probabilities are read from.
            copied = processed is not logits and not self._reads_processed
            left = processed if copied else processed.to(torch.float32, copy=True)
            accepted = choose_drawn(
                left,
                row_start,
                slots,
                tokens,
                pos,
                trees.prefill_len,
                trees.drawn,
                sampler.sampling_states.seeds.gpu,
                backends.V2,
            )
        sampled = gumbel_sample(
            left,
            row_slots,
            sampler.sampling_states.temperature.gpu,
            sampler.sampling_states.seeds.gpu,
            pos,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=sampler.use_fp64_gumbel,
        )
        if accepted is not None:
            sampled = torch.where(accepted >= 0, accepted, sampled)
        return processed, sampled

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        row_start: torch.Tensor,
        row_start_np: Any,
        max_num_logprobs: int,
    ) -> Any:
        """vLLM's, which takes the rows for a chain, and does not know of logprob token ids."""
        if max_num_logprobs < 0 and not self._num_token_ids:
            return None
        if not self._processed_logprobs:
            logits = logits[self._order()]
        if not self._num_token_ids:
            return super()._get_logprobs_tensors(
                sampled, num_sampled, logits, row_start, row_start_np, max_num_logprobs
            )
        _, row_slots, offset, _ = self._part
        request, place = self._requests(), offset.to(torch.int64)
        # Behind a path nobody reads: vLLM has zeros there.
        tokens = torch.where(place < num_sampled[request], sampled[request, place], 0)
        return compute_topk_scores(
            logits,
            max(0, max_num_logprobs),
            tokens,
            row_start_np.tolist(),
            self.sampler.logprob_token_ids_state,
            row_slots,
            self._num_token_ids,
            self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )

    @property
    def _processed_logprobs(self) -> bool:
        return self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES

    @property
    def _reads_processed(self) -> bool:
        return self._processed_logprobs or self.sampler.return_sampling_mask
