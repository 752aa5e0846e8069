# SPDX-License-Identifier: Apache-2.0
"""Where KV blocks are short drafts give way: no request is preempted, or kept waiting, that plain decoding would serve.

vLLM asks for a request's drafts and its text in one, and preempts where it does not get them; and blocks that rejected
drafts had stay with the request. Here, before vLLM schedules a step, drafts are cut to the blocks there are
(`proposers.spec_memo`), slots that a draft model reads are left out, and blocks behind a text go back to the pool, of
which the worker is told with the step.

Where steps are scheduled ahead, drafts of the step that runs count as accepted until it ends. If these alone are why
a step would not fit, it waits for that end.
"""

from __future__ import annotations

import itertools
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.request import RequestStatus

from vllm_ext.config import speculative
from vllm_ext.engine import step_extras
from vllm_ext.proposers import spec_memo
from vllm_ext.proposers.draft_model import DraftModelProposer
from vllm_ext.proposers.hybrid import chains_of
from vllm_ext.proposers.spec_memo import Text

MOST_WAITING = 8  # requests for which room is kept in a step
GROWING = (FullAttentionManager, SlidingWindowManager)  # have a block for each stretch of a text


class DraftBlocks:
    """Cuts drafts to the blocks there are, before vLLM schedules a step."""

    # vLLM's.
    running: list[Any]
    waiting: Any
    kv_cache_manager: Any
    vllm_config: Any
    connector: Any
    num_lookahead_tokens: int
    num_spec_tokens: int
    max_model_len: int
    max_num_running_reqs: int
    max_num_scheduled_tokens: int
    scheduler_reserve_full_isl: bool
    dynamic_sd_lookup: list[int] | None
    _pause_state: Any

    no_lookahead = False  # whether the step that is scheduled has no slots for nodes that a draft model reads

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self._groups = [place for place, manager in enumerate(managers) if type(manager) in GROWING]
        self._growing = [managers[place] for place in self._groups]
        sizes = {manager.block_size for manager in self._growing}
        others = {type(manager) for manager in managers} - {*GROWING, MambaManager}
        # Else there is no telling how many blocks so many tokens need, or whether blocks may go back.
        self._is_known = len(sizes) == 1 and not others and self.connector is None
        self._block_tokens: int = max(sizes, default=1)
        settings = speculative.from_vllm_config(self.vllm_config)
        assert settings is not None
        proposer = settings.proposer_class
        self._on_v2: bool = self.vllm_config.use_v2_model_runner
        # V2 draws trees for models only, and no part of one has the law that its verification expects.
        self._whole = issubclass(proposer, DraftModelProposer) and (self._on_v2 or proposer.whole)
        # vLLM's own proposers write into these slots whatever there is.
        self._keeps_lookahead = any(chain.asks for chain in chains_of(settings.options))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, of drafts that fit."""
        if not self._is_known:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        lookahead = self.num_lookahead_tokens
        fixed = lookahead if self._keeps_lookahead else 0
        free = self.kv_cache_manager.block_pool.get_num_free_blocks() // len(self._growing)
        waiting = self._next_waiting()
        filled = 0 if self.dynamic_sd_lookup is not None else self.num_spec_tokens
        most = [self._blocks_of(request, lookahead + filled) for request in waiting]
        if self._most_new() + sum(most) <= free:  # as nearly always: no look at each request
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        texts = [self._text(request, fixed) for request in self.running]
        drafts = [text._replace(nodes=text.nodes + lookahead - fixed) for text in texts]
        if spec_memo.is_enough(drafts, free - sum(most), self._block_tokens):
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        left = spec_memo.spare(texts, free, self._block_tokens)
        # The same if no draft of the step that runs is accepted.
        pairs = zip(texts, self.running, strict=True)
        shorter = [text._replace(tokens=text.tokens - _num_in_flight(request)) for text, request in pairs]
        plain = spec_memo.spare(shorter, free, self._block_tokens)
        if left < 0 and plain > left:
            return self._schedule_nothing(*args, **kwargs)
        needs = [self._blocks_of(request, fixed) - self._num_shared(request) for request in waiting]
        admitted = spec_memo.num_admitted(needs, plain - self.kv_cache_manager.watermark_blocks)
        if spec_memo.is_enough(drafts, free - sum(most[:admitted]), self._block_tokens):
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        returned = self._cut(texts, free, left, sum(needs[:admitted]))
        lookup, self.no_lookahead = self.dynamic_sd_lookup, not self._keeps_lookahead
        if lookup is None:  # else vLLM fills up the rows of some who come
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.dynamic_sd_lookup, self.no_lookahead = lookup, False
        if returned:
            extras = step_extras.set_of(output)
            extras.kept_blocks, extras.kept_in = returned, self._groups
        return output

    def _most_new(self) -> int:
        """Blocks that the running requests may come to want in a step: their drafts, those in flight, and prompts."""
        each = self.num_lookahead_tokens + 2 * (1 + self.num_spec_tokens)
        of_drafts = len(self.running) * (1 + spec_memo.blocks_of(each, self._block_tokens))
        return of_drafts + spec_memo.blocks_of(self.max_num_scheduled_tokens, self._block_tokens)

    def _schedule_nothing(self, *args: Any, **kwargs: Any) -> Any:
        """A step without tokens: what the one that runs has drafted is known after it."""
        state, self._pause_state = self._pause_state, PauseState.PAUSED_ALL
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._pause_state = state

    def _text(self, request: Any, fixed: int) -> Text:
        """What a running request needs, ``fixed`` slots behind its text too, and wants.

        On V1 as many nodes as any tree may have: how many there are may depend on what was drawn.
        """
        end = request.num_tokens + request.num_output_placeholders
        tokens = min(end, request.num_computed_tokens + self.max_num_scheduled_tokens)
        nodes = len(request.spec_token_ids)
        if nodes and not self._on_v2:
            nodes = self.num_spec_tokens
        tokens = min(tokens + fixed, self.max_model_len)
        held = len(self._growing[0].req_to_blocks.get(request.request_id, ()))
        return Text(tokens, held, min(nodes, self.max_model_len - tokens))

    def _next_waiting(self) -> list[Any]:
        """The first of those that vLLM may let in."""
        most = min(self.max_num_running_reqs - len(self.running), MOST_WAITING)
        if most <= 0 or not self.waiting or self._pause_state != PauseState.UNPAUSED:
            return []
        ready = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        return list(itertools.islice((each for each in self.waiting if each.status in ready), most))

    def _blocks_of(self, request: Any, more: int) -> int:
        """Of a waiting request's text, as far as vLLM wants room for it at once, and of slots behind it."""
        tokens = request.num_tokens
        if not self.scheduler_reserve_full_isl:
            tokens = min(tokens, self.max_num_scheduled_tokens)
        return spec_memo.blocks_of(min(tokens + more, self.max_model_len), self._block_tokens)

    def _num_shared(self, request: Any) -> int:
        """Blocks of a waiting request's text that others hold, too."""
        manager = self.kv_cache_manager
        if not manager.prefix_cache_lookup_enabled(request):
            return 0
        # Not by `get_computed_blocks`, which tells a router of what it finds.
        blocks, *_ = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return sum(block.ref_cnt > 0 for block in blocks[self._groups[0]])

    def _cut(self, texts: list[Text], free: int, left: int, reserved: int) -> dict[str, int]:
        """Leave out drafts, and give back blocks if need be.

        Args:
            texts: of the running requests.
            free: blocks that nobody has.
            left: those that a plain step would leave.
            reserved: of these, for requests that wait.

        Returns:
            By request, how many blocks it has kept, of those that have given some back.
        """
        if (
            left < reserved
        ):  # drafts in the last block of a text too would delay what is known after the next step
            texts = [text._replace(nodes=0) for text in texts]
        shares = spec_memo.fit(texts, left - reserved, self._block_tokens, self._whole)
        for request, share in zip(self.running, shares, strict=True):
            if len(request.spec_token_ids) > share.nodes:
                request.spec_token_ids = request.spec_token_ids[: share.nodes]
        new = sum(max(share.kept - text.held, 0) for text, share in zip(texts, shares, strict=True))
        if new + reserved <= free:
            return {}
        pool, returned = self.kv_cache_manager.block_pool, {}
        for request, text, share in zip(self.running, texts, shares, strict=True):
            if text.held > share.kept:
                returned[request.request_id] = share.kept
                for manager in self._growing:
                    blocks = manager.req_to_blocks[request.request_id]
                    pool.free_blocks(reversed(blocks[share.kept :]))
                    del blocks[share.kept :]
        return returned


def _num_in_flight(request: Any) -> int:
    """Drafts of a request in the step that runs: all that it may put out but for one token."""
    return max(int(request.num_output_placeholders) - 1, 0)
