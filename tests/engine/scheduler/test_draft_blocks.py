# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with drafts, random requests and too few KV blocks; the worker is made up, but for its tables."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_ext.engine import step_extras
from vllm_ext.engine.composed import scheduler
from vllm_ext.engine.composed.parts import load
from vllm_ext.proposers.spec_memo import blocks_of

BLOCK = 16
NODES = 16
MOST = 6  # requests at once
USABLE = -1  # vLLM keeps the null block


class Engine:
    """Some parts of the scheduler, and a worker that accepts some drafts.

    Args:
        model: folder of one.
        num_blocks: of the cache.
        seed: of what is accepted.
        parts: of the scheduler.
        ahead: a step is scheduled before the last one's tokens are known.
        method: of speculation.
    """

    def __init__(
        self, model: str, num_blocks: int, seed: int, parts: list[str], ahead: bool, method: dict[str, Any]
    ) -> None:
        config = EngineArgs(
            model=model,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=MOST,
            max_num_batched_tokens=512,
            block_size=BLOCK,
            speculative_config={"num_speculative_tokens": NODES, **method},
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec([name], spec) for name in ("layer", "other")]
        cache = KVCacheConfig(2 * num_blocks, [], groups)
        made = load(scheduler.path_of(parts, ahead=ahead))
        self.scheduler: Any = made(config, cache, StructuredOutputManager(config), BLOCK)
        self.num_blocks, self.ahead = num_blocks, ahead
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._chance = random.Random(seed)
        self._queue: deque[Any] = deque()
        self.tables: dict[str, list[list[int]]] = {}  # what the worker knows
        self.counts: Counter[str] = Counter()
        self._late = 0  # steps on end in which the first who waits would have had room
        preempt = self.scheduler._preempt_request

        def preempting(request: Any, *args: Any, **kwargs: Any) -> None:
            self.counts["preempted"] += 1
            if self._needed([*self.scheduler.running, request]) <= self.num_blocks + USABLE:
                self.counts["preempted for drafts"] += 1
            preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = preempting

    def _needed(self, requests: list[Any]) -> int:
        """Blocks that a plain step of these needs in a group; one that runs puts out a token."""
        lengths = [each.num_tokens + (each.num_output_placeholders > 0) for each in requests]
        return sum(blocks_of(length, BLOCK) for length in lengths)

    def add(self, name: str, prompt: int, most: int) -> None:
        tokens = [self._chance.randrange(1000) for _ in range(prompt)]
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        self.scheduler.add_request(Request(name, tokens, params, None, block_hasher=self._hasher))

    def step(self) -> None:
        if not self.scheduler.has_requests():
            if self._queue:
                self._end(self._queue.popleft())
            return
        held = self.counts["preempted"]
        output = self.scheduler.schedule()
        self._follow(output)
        first, late = next(iter(self.scheduler.waiting), None), False
        if first is not None and held == self.counts["preempted"] and len(self.scheduler.running) < MOST:
            plain = self._needed(self.scheduler.running)
            late = plain + blocks_of(first.num_tokens, BLOCK) <= self.num_blocks + USABLE
        # Drafts of the step that runs count as accepted until it has ended.
        self._late = self._late + 1 if late else 0
        self.counts["kept waiting"] += self._late > 2 * self.ahead
        self._queue.append(output)
        if len(self._queue) == 1 + self.ahead or not output.num_scheduled_tokens:
            self._end(self._queue.popleft())

    def _follow(self, output: Any) -> None:
        """What the worker does to its tables; both must have the same blocks, and nobody another's."""
        extras = step_extras.of(output)
        for name, kept in extras.kept_blocks.items():
            self.counts["returned"] += 1
            for group in extras.kept_in:
                assert len(self.tables[name][group]) > kept
                del self.tables[name][group][kept:]
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(blocks) for blocks in new.block_ids]
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(of_group) for of_group in blocks]
            elif blocks is not None:
                for table, of_group in zip(self.tables[name], blocks, strict=True):
                    table.extend(of_group)
        owned: Counter[int] = Counter()
        for name, rows in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            known = [list(each) for each in self.scheduler.kv_cache_manager.get_block_ids(name)]
            assert self.tables[name] == known
            first = request.num_computed_tokens - rows  # vLLM has moved on
            assert all(len(table) * BLOCK >= first + rows for table in known)
            owned.update(block for table in known for block in table)
            self.counts["nodes"] += len(output.scheduled_spec_decode_tokens.get(name, ()))
        assert not owned or max(owned.values()) == 1

    def _end(self, output: Any) -> None:
        names = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in names:
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            accepted = self._chance.choice([0, 0, 1, drafts // 2, drafts])
            sampled.append([5] * (1 + min(accepted, drafts)))
        made = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        self.scheduler.update_from_output(output, made)
        if not self.ahead:
            proposed = [[7] * self._chance.choice([0, 3, NODES]) for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, proposed))

    def finish(self) -> None:
        steps = 0
        while self.scheduler.has_unfinished_requests() or self._queue:
            self.step()
            steps += 1
            assert steps < 5000, "nothing goes on"

    @property
    def num_free_blocks(self) -> int:
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free


TABLES = {"method": "token_recycling"}
MODEL = {"method": "dyspec", "model": "self", "self_layers": 1}
WHOLE = {"method": "spectr", "model": "self", "self_layers": 1}


def driven(
    model: str, parts: list[str], ahead: bool, method: dict[str, Any], num_blocks: int
) -> Counter[str]:
    """What happened to random requests, of which some are aborted."""
    counts: Counter[str] = Counter()
    for seed in range(8):
        engine, chance = Engine(model, num_blocks, seed, parts, ahead, method), random.Random(seed)
        free = engine.num_free_blocks
        for index in range(20):
            engine.add(str(index), chance.randint(1, 70), chance.randint(1, 70))
            for _ in range(chance.choice([0, 0, 1, 9])):
                engine.step()
            if chance.random() < 0.15 and str(index) in engine.scheduler.requests:
                engine.scheduler.finish_requests(str(index), RequestStatus.FINISHED_ABORTED)
        engine.finish()
        assert engine.num_free_blocks == free
        counts += engine.counts
    return counts


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("method", [TABLES, MODEL, WHOLE], ids=lambda method: method["method"])
@pytest.mark.parametrize("num_blocks", [13, 20, 30])
def test_drafts_give_way(slice_dir: str, ahead: bool, method: dict[str, Any], num_blocks: int) -> None:
    slots = [] if method is TABLES else ["DraftSlots"]
    counts = driven(slice_dir, [*slots, "DraftBlocks"], ahead, method, num_blocks)
    assert counts["preempted for drafts"] == 0
    assert counts["kept waiting"] == 0
    assert counts["returned"] > 0
    assert counts["nodes"] > 100
    # vLLM's own, and here what the test is to tell apart.
    mutated = driven(slice_dir, slots or ["DraftCounts"], ahead, method, num_blocks)
    assert mutated["preempted for drafts"] + mutated["kept waiting"] > 20
