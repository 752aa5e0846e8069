# SPDX-License-Identifier: Apache-2.0
"""Between vLLM's V1 runner and a proposer: unpacks the runner's state into arrays, packs drafts into lists.

vLLM loads ``Drafter`` as its ``custom_class``; ``v1_runner`` calls it with the runner's real state, which
vLLM's own narrow ``propose()`` signature does not carry.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.logger import init_logger

from vllm_ext import config, metrics
from vllm_ext.kernels.top_k import top_k_ids
from vllm_ext.proposers.base import Draft, Int32, Request, Sampling, VerifiedRows

logger = init_logger("vllm.vllm_ext")


class Drafter:
    """One proposer, the requests it knows, and the counters."""

    def __init__(self, vllm_config: Any) -> None:
        settings = config.from_vllm_config(vllm_config)
        if settings is None:
            raise RuntimeError(
                "vllm_ext.v1_drafter.Drafter is not a speculative model of its own; name a method: "
                '--speculative-config \'{"method": "token_recycling"}\''
            )
        self._vocab_size: int = vllm_config.model_config.get_vocab_size()
        self._dtype = vllm_config.model_config.dtype
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self.proposer = settings.proposer_class.from_options(settings.options, self._vocab_size)
        self._sampling: dict[str, Sampling] = {}  # by request id; its keys are the requests started
        self._pending: _TappedRows | None = None
        self._counters: metrics.CounterFile | None = None
        if vllm_config.parallel_config.rank == 0:
            self._counters = metrics.CounterFile(
                metrics.counter_path(vllm_config, vllm_config.parallel_config.data_parallel_index),
                create=True,
            )
        self.tap_seconds = 0.0  # time spent in `tap`; the rest of the drafting is timed from outside

    def load_model(self, model: Any) -> None:
        """vLLM's hook after the target is loaded: compile what would else stall the first request."""
        if self.proposer.verified_top_k:
            parameter = next(model.parameters())
            logits = parameter.new_zeros((2, self._vocab_size), dtype=self._dtype)
            top_k_ids(logits, self.proposer.verified_top_k)
        logger.info(
            "vllm-ext: %s holds %.2f MB of host memory",
            type(self.proposer).__name__,
            self.proposer.memory_bytes / 1e6,
        )

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM's own entry; ours is `step`. Reached only when our worker is not in place."""
        raise RuntimeError("vllm-ext's runner is not installed; leave worker_cls at 'auto'")

    def tap(self, runner: Any, state: Any) -> None:
        """Before sampling: keep what the step's logits say, while no sampler has written into them."""
        started = time.perf_counter()
        num_requests: int = runner.input_batch.num_reqs
        num_drafts = np.asarray(state.spec_decode_metadata.num_draft_tokens, dtype=np.int32)
        num_rows = num_drafts + 1
        row_start = np.zeros(num_requests + 1, dtype=np.int32)
        np.cumsum(num_rows, out=row_start[1:])
        # A request's rows are the last ones of its query: root, then drafts (earlier ones are prompt).
        query_end = runner.query_start_loc.np[1 : num_requests + 1]
        position = np.arange(row_start[-1]) + np.repeat(query_end - row_start[1:], num_rows)
        width = self.proposer.verified_top_k
        self._pending = _TappedRows(
            row_start, runner.input_ids.np[position], top_k_ids(state.logits, width) if width else None
        )
        self.tap_seconds += time.perf_counter() - started

    def step(self, runner: Any, num_draft_tokens: int, sampled: list[list[int]]) -> list[list[int]]:
        """After sampling: learn from the step, draft for the next.

        Args:
            runner: vLLM's V1 model runner, its batch already holding the sampled tokens.
            num_draft_tokens: most draft tokens vLLM will schedule for one request.
            sampled: by batch index, the tokens of this step; none for an unfinished prompt.

        Returns:
            By batch index, the draft tokens of the next step.
        """
        drafts: list[list[int]] = [[] for _ in sampled]
        try:
            self._observe(runner, sampled)
            requests, slots = self._requests(runner, num_draft_tokens, sampled)
            for slot, draft in zip(slots, self.proposer.propose(requests), strict=True):
                drafts[slot] = _as_chain(draft)
        except Exception:
            # A drafter's fault costs speed, never a request.
            logger.exception("vllm-ext: drafting failed; this step goes on without drafts")
            self._count({"fallbacks:proposer_error": 1})
            return [[] for _ in sampled]
        return drafts

    def finish(self, request_id: str) -> None:
        """A request is gone."""
        if self._sampling.pop(request_id, None) is not None:
            self.proposer.finish(request_id)

    def counters(self) -> dict[str, int]:
        """Totals by counter name; empty where another rank counts."""
        return {} if self._counters is None else self._counters.totals()

    def _observe(self, runner: Any, sampled: list[list[int]]) -> None:
        rows, self._pending = self._pending, None
        if rows is None:
            return
        emitted = np.array([len(tokens) for tokens in sampled], dtype=np.int32)
        num_rows = np.diff(rows.row_start)
        # Row j of a request is the root (j = 0) or draft j; a step that emits n tokens accepted n - 1 drafts.
        index = np.arange(rows.row_start[-1]) - np.repeat(rows.row_start[:-1], num_rows)
        accepted = index < np.repeat(np.maximum(emitted, 1), num_rows)
        top_ids = rows.top_ids.cpu().numpy() if rows.top_ids is not None else _NO_TOP_IDS
        self.proposer.observe(
            VerifiedRows(runner.input_batch.req_ids, rows.row_start, rows.tokens, accepted, top_ids)
        )
        kept = [
            _kept(runner.requests[request_id].sampling_params, tokens)
            for request_id, tokens in zip(runner.input_batch.req_ids, sampled, strict=True)
        ]
        num_steps = sum(1 for n in kept if n)
        self._count(
            {
                "spec_draft_tokens": int(num_rows.sum()) - len(num_rows),
                "spec_accepted_tokens": sum(kept) - num_steps,
                "spec_emitted_tokens": sum(kept),
                "spec_steps": num_steps,
            }
        )

    def _requests(
        self, runner: Any, num_draft_tokens: int, sampled: list[list[int]]
    ) -> tuple[list[Request], list[int]]:
        """The requests to draft for, and their batch indices."""
        batch = runner.input_batch
        requests, slots = [], []
        for slot, (request_id, emitted) in enumerate(zip(batch.req_ids, sampled, strict=True)):
            if not emitted:
                continue
            state = runner.requests[request_id]
            params = state.sampling_params
            num_tokens = int(batch.num_tokens_no_spec[slot])
            left = self._max_model_len - num_tokens
            if params.max_tokens is not None:
                left = min(left, params.max_tokens - len(state.output_token_ids))
            started = request_id in self._sampling
            if not started:
                self._sampling[request_id] = _sampling(params)
            request = Request(
                request_id=request_id,
                tokens=batch.token_ids_cpu[slot, :num_tokens],
                num_prompt_tokens=state.num_prompt_tokens,
                # A step that accepts n drafts emits n + 1 tokens.
                budget_tokens=max(min(num_draft_tokens, left - 1), 0),
                sampling=self._sampling[request_id],
            )
            if not started:
                self.proposer.start(request)
            requests.append(request)
            slots.append(slot)
        return requests, slots

    def _count(self, amounts: dict[str, int]) -> None:
        if self._counters is not None:
            self._counters.add(amounts)


@dataclass(frozen=True, slots=True)
class _TappedRows:
    """What `tap` keeps until the step's tokens are known; fields as in `VerifiedRows`."""

    row_start: Int32
    tokens: Int32
    top_ids: Any  # device tensor, or None: copied to the host once the runner has waited for the step


_NO_TOP_IDS = np.empty((0, 0), dtype=np.int32)


def _as_chain(draft: Draft) -> list[int]:
    """vLLM verifies chains: a branching draft would be accepted along the wrong path."""
    num_nodes = len(draft.tokens)
    if not np.array_equal(draft.parents, np.arange(-1, num_nodes - 1)):
        raise ValueError("a proposer returned a branching draft; this runner verifies chains")
    tokens: list[int] = draft.tokens.tolist()
    return tokens


def _sampling(params: Any) -> Sampling:
    return Sampling(params.temperature, params.top_p, params.top_k, params.min_p, params.seed)


def _kept(params: Any, tokens: list[int]) -> int:
    """How many of a step's tokens reach the output: none after an end or stop token."""
    ends = {params.eos_token_id, *(params.stop_token_ids or ())}
    for count, token in enumerate(tokens, 1):
        if token in ends:
            return count
    return len(tokens)
