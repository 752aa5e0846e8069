# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with pairs and branches, and a worker that is made up."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_ext.engine import paired_requests, step_extras
from vllm_ext.engine.composed.parts import load
from vllm_ext.engine.steering.paired_rows import PairedRows
from vllm_ext.samplers.steering import Candidate, Deferral

BLOCK = 16


def token(request_id: str, place: int) -> int:
    """What a request's answer has there, whenever it is asked."""
    return random.Random(f"{request_id} {place}").randrange(3, 1000)


def log_p(request_id: str, place: int) -> float:
    """Of that token."""
    return -random.Random(f"{request_id} {place} log").random()


def deferral_of(request_id: str, place: int, stop: int) -> Deferral | None:
    """Some requests are put off now and then, one of the candidates may be what nothing comes behind."""
    chance = random.Random(f"{request_id} {place} pause")
    if not request_id.startswith("p") or "-" in request_id or chance.random() > 0.3:
        return None
    tokens = chance.sample([*range(3, 1000), stop], chance.randint(1, 3))
    if chance.random() < 0.3:
        tokens[0] = stop
    return Deferral(place, [Candidate(each, -chance.random()) for each in tokens], chance.choice([0, 1, 3]))


@functools.cache
def config_of(model: str, policy: str, max_num_seqs: int) -> Any:
    """Of a small server with both rules."""
    return EngineArgs(
        model=model,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=48,
        block_size=BLOCK,
        scheduling_policy=policy,
        additional_config={"vllm_ext": {"rules": {"cad": {}, "adadec": {}}}},
    ).create_engine_config()


class Engine:
    """The scheduler, and a worker that gives tokens by `token`, accepting some drafts, to requests and their pairs, and
    puts off what `deferral_of` says.
    """

    def __init__(self, model: str, num_blocks: int, policy: str, seed: int, max_num_seqs: int = 4) -> None:
        config = config_of(model, policy, max_num_seqs)
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        scheduler_class = load(config.scheduler_config.scheduler_cls)
        self.scheduler: Any = scheduler_class(config, cache, StructuredOutputManager(config), BLOCK)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._chance = random.Random(seed)
        self._pairs = PairedRows()
        self.told: dict[tuple[str, int], int] = {}  # by request id and place, the token that was chosen
        self.stops: set[int] = set(self.scheduler._stops)
        self.answers: dict[str, list[int]] = {}
        self.reasons: dict[str, Any] = {}

    def add(self, name: str, prompt: int, rest: int | None, most: int, priority: int = 0) -> None:
        """A request; with a rest of its prompt it has a pair."""
        given = None if rest is None else {paired_requests.PROMPT: [[2] * rest, []]}
        params = SamplingParams(max_tokens=most, ignore_eos=True, extra_args=given)
        request = Request(name, [1] * prompt, params, None, priority=priority, block_hasher=self._hasher)
        self.answers[name] = []
        self.scheduler.add_request(request)

    def step(self) -> int:
        """One step; how many tokens it has put out."""
        step = self.scheduler.schedule()
        requests, names = self.scheduler.requests, list(step.num_scheduled_tokens)
        for new in step.scheduled_new_reqs:
            self._pairs.admit(new.req_id, new.sampling_params)
        drafts = [len(step.scheduled_spec_decode_tokens.get(name, ())) for name in names]
        ready = [requests[name].num_computed_tokens >= requests[name].num_tokens for name in names]
        start = [sum(drafts[:i]) + i for i in range(len(names) + 1)]
        self._pairs.begin({name: i for i, name in enumerate(names)}, start, ready)
        for name, (place, chosen) in step_extras.of(step).choices.items():
            self.told[name, place] = chosen
        sampled: list[list[int]] = [[] for _ in names]
        deferrals: dict[str, Deferral] = {}
        for i, name in enumerate(names):
            if ready[i] and i not in self._pairs.held and name not in self._pairs:
                first = requests[name].num_output_tokens
                for place in range(first, first + 1 + self._chance.randint(0, drafts[i])):
                    deferral = deferral_of(name, place, min(self.stops))
                    if deferral is not None and (name, place) not in self.told:
                        deferrals[name] = deferral
                        break
                    sampled[i].append(self.told.get((name, place), token(name, place)))
        for primary, pair in self._pairs.pairs:
            sampled[pair] = list(sampled[primary])
            assert list(requests[names[pair]].output_token_ids) == list(
                requests[names[primary]].output_token_ids
            )
        output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        places = [
            (name, requests[name].num_output_tokens + j)
            for name, new in zip(names, sampled, strict=True)
            for j in range(len(new))
        ]
        values = np.array([[log_p(*each)] for each in places])
        starts = np.cumsum([0, *map(len, sampled)]).tolist()
        output.logprobs = LogprobsLists(values, values, values[:, 0] if len(values) else values, starts)
        step_extras.set_of(output).deferrals = deferrals
        proposed = [[7] * self._chance.randint(0, 3) if tokens else [] for tokens in sampled]
        for primary, pair in self._pairs.pairs:
            proposed[pair] = proposed[primary]
        num_tokens = 0
        for of_client in self.scheduler.update_from_output(step, output).values():
            for each in of_client.outputs:
                assert each.request_id in self.answers
                self.answers[each.request_id] += each.new_token_ids
                num_tokens += len(each.new_token_ids)
                if each.finish_reason is not None:
                    self.reasons[each.request_id] = each.finish_reason
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, proposed))
        for name in [name for name in names if name not in self.scheduler.requests]:
            self._pairs.forget(name)
        return num_tokens

    def finish(self) -> int:
        """Step until nothing is left; how many steps on end at most have put out nothing."""
        idle = longest = 0
        while self.scheduler.has_unfinished_requests():
            idle = 0 if self.step() else idle + 1
            longest = max(longest, idle)
            assert idle < 60, "nothing goes on"
        return longest

    @property
    def num_free_blocks(self) -> int:
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free
