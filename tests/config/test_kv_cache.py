# SPDX-License-Identifier: Apache-2.0
"""What a server may say of its KV cache, and who hands out its blocks."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from vllm_ext.codecs.critic import Critic
from vllm_ext.config import kv_cache, rules, speculative
from vllm_ext.config.runners import RunnerChoice
from vllm_ext.engine.kv_cache import block_specs

KIVI = {"method": "kivi"}
BLOCK, TAIL = 64, 4


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, r'\["kv"\]=3 is not allowed; allowed: an object with a method'),
        ({}, r'\["kv"\]=\{\} is not allowed'),
        (
            {"method": "kiwi"},
            r"unknown method 'kiwi'\. Did you mean 'kivi'\? KV methods: actqkv, .*, streaming_llm\.",
        ),
        ({"method": 4}, r"unknown method 4"),
        ({**KIVI, "bits": 3}, r"method 'kivi': bits=3 is not allowed; allowed"),
        (
            {**KIVI, "bit": 4},
            r"unknown option bit=4.*kivi: window: integer or null, at least 1; .*group_size: integer, 16 to 256",
        ),
    ],
)
def test_what_is_wrong_is_named(given: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kv_cache.parse(given)


def test_what_travels() -> None:
    settings = kv_cache.parse({**KIVI, "bits": 2})
    carrier = SimpleNamespace(additional_config={"vllm_ext": {"kv": settings.to_additional_config()}})
    assert kv_cache.from_config(carrier) == settings
    assert str(settings) == "kivi (window=None, sinks=4, bits=2, group_size=64)"
    assert kv_cache.from_config(SimpleNamespace(additional_config={})) is None
    assert rules.from_config(carrier) is None


OWN = kv_cache.parse(KIVI)


def engine_args(**values: Any) -> SimpleNamespace:
    default: dict[str, Any] = {
        "speculative_config": None,
        "kv_cache_dtype": "auto",
        "kv_transfer_config": None,
        "decode_context_parallel_size": 1,
        "worker_cls": "auto",
        "enable_prefix_caching": None,
        "scheduler_cls": None,
        "pipeline_parallel_size": 1,
    }
    return SimpleNamespace(**{**default, **values})


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("speculative_config", {"method": "ngram"}, "speculative_config.method='ngram'"),
        ("kv_cache_dtype", "fp8", "kv_cache_dtype='fp8': must be 'auto'"),
        ("kv_transfer_config", {}, "kv_transfer_config: must be unset"),
        ("decode_context_parallel_size", 2, "decode_context_parallel_size=2: must be 1"),
        ("worker_cls", "my.Worker", "worker_cls='my.Worker': must be 'auto'"),
    ],
)
def test_options_that_do_not_go_with_it(option: str, value: Any, says: str) -> None:
    kv_cache.check_engine_args(engine_args(), OWN, False, None)
    with pytest.raises(ValueError, match=f"does not work with {says}"):
        kv_cache.check_engine_args(engine_args(**{option: value}), OWN, False, None)
    own = speculative.parse({"method": "dyspec", "model": "self", "num_speculative_tokens": 4})
    with pytest.raises(ValueError, match="a method that drafts with a model"):
        kv_cache.check_engine_args(engine_args(), OWN, False, own)
    with pytest.raises(ValueError, match="a sampling rule with a second model"):
        kv_cache.check_engine_args(engine_args(), OWN, True, None)
    merging = kv_cache.parse({"method": "chelsea"})
    kv_cache.check_engine_args(engine_args(enable_prefix_caching=True), OWN, False, None)
    kv_cache.check_engine_args(engine_args(enable_prefix_caching=False), merging, False, None)
    selecting = kv_cache.parse({"method": "snapkv"})
    for values, says in (
        ({"scheduler_cls": "my.Scheduler"}, "scheduler_cls='my.Scheduler': must be unset: method 'snapkv'"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: must be 1"),
    ):
        kv_cache.check_engine_args(engine_args(**values), OWN, False, None)
        with pytest.raises(ValueError, match=f"does not work with {says}"):
            kv_cache.check_engine_args(engine_args(**values), selecting, False, None)
    with pytest.raises(ValueError, match="enable_prefix_caching=True: method 'chelsea' changes blocks"):
        kv_cache.check_engine_args(engine_args(enable_prefix_caching=True), merging, False, None)


V2 = RunnerChoice("V2", "vLLM's default where there is Triton")
V1 = RunnerChoice("V1", "a reason")
ON_V2 = ("critic", "snapkv", "streaming_llm")


@pytest.mark.parametrize("method", ["streaming_llm", "snapkv", "kivi", "chelsea", "critic", "actqkv"])
def test_gpus_and_the_v2_runner_are_refused_method_by_method(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.platforms

    kv = kv_cache.parse({"method": method})
    kv_cache.check_engine_args(engine_args(), kv, False, None, V1)

    def check(runner: RunnerChoice, **values: Any) -> None:
        kv_cache.check_engine_args(engine_args(**values), kv, False, None, runner)

    if method not in ON_V2:
        why = f"method '{method}' .*Set VLLM_USE_V2_MODEL_RUNNER=0, or use critic, snapkv or streaming_llm"
        with pytest.raises(ValueError, match=f"does not work with vLLM's V2 model runner: {why}"):
            check(V2)
    else:
        check(V2)
        for option, value in (("enable_dbo", True), ("prefill_context_parallel_size", 2)):
            with pytest.raises(ValueError, match=f"does not work with {option}={value}: must be"):
                check(V2, **{option: value})
    gpu = SimpleNamespace(is_cpu=lambda: False, device_type="cuda")
    monkeypatch.setattr(vllm.platforms, "current_platform", gpu)
    if method not in ON_V2:
        with pytest.raises(
            ValueError, match=f"the platform 'cuda': method '{method}' .*Use critic, snapkv or streaming_llm"
        ):
            check(V2)
    else:
        check(V2)
        with pytest.raises(
            ValueError, match=r"'cuda' and vLLM's V1 model runner: .*V1 was chosen as a reason"
        ):
            check(V1)


def test_vllm_may_have_chosen_the_other_runner() -> None:
    kv = kv_cache.parse(WINDOW)
    kv_cache.check_vllm_config(vllm_config(kv=WINDOW, on_v2=True), kv, V2)
    with pytest.raises(ValueError, match=r"was to run on vLLM's V2 model runner .*chosen the other for 'm'"):
        kv_cache.check_vllm_config(vllm_config(kv=WINDOW), kv, V2)


def model_config(**values: Any) -> SimpleNamespace:
    default: dict[str, Any] = {"use_mla": False, "is_encoder_decoder": False, "is_hybrid": False}
    default |= {"runner_type": "generate", "model": "m", "get_head_size": lambda: 64, "dtype": torch.bfloat16}
    return SimpleNamespace(**{**default, **values})


def vllm_config(
    block_size: int = BLOCK, kv: Mapping[str, Any] = KIVI, on_v2: bool = False, **model: Any
) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=model_config(max_model_len=1000, **model),
        cache_config=SimpleNamespace(block_size=block_size),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        additional_config={"vllm_ext": {"kv": dict(kv)}},
        num_speculative_tokens=0,
        use_v2_model_runner=on_v2,
        max_in_flight_tokens=256,
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (vllm_config(use_mla=True), r"a model with latent attention \(MLA\): 'm'"),
        (vllm_config(is_encoder_decoder=True), "an encoder-decoder model"),
        (
            vllm_config(get_head_size=lambda: 80),
            "group_size=64 does not divide the head size 80.*'m' has heads of 80",
        ),
        (vllm_config(32), "group_size=64 does not divide the block size 32.*--block-size"),
    ],
)
def test_models_that_do_not_go_with_it(given: Any, says: str) -> None:
    kv_cache.check_vllm_config(vllm_config(), kv_cache.parse(KIVI))
    with pytest.raises(ValueError, match=says):
        kv_cache.check_vllm_config(given, kv_cache.parse(KIVI))


def stock_spec(**values: Any) -> Any:
    default = {"block_size": BLOCK, "num_kv_heads": 3, "head_size": 64, "dtype": torch.bfloat16}
    return FullAttentionSpec(**{**default, **values})


def test_blocks_are_smaller_and_requests_have_some_more() -> None:
    stock, whole = stock_spec(), vllm_config()
    specs = block_specs.codec_specs(whole, {"one": stock, "two": stock})
    spec = block_specs.CodecSpec.merge(list(specs.values()))
    assert spec == specs["one"]
    assert stock.page_size_bytes / spec.page_size_bytes == 256 / 72
    assert spec.tail_blocks == TAIL
    assert spec.max_num_blocks_per_req(whole, 1000) == 16 + TAIL
    assert spec.max_memory_usage_bytes(whole) == (16 + TAIL) * spec.page_size_bytes
    with pytest.raises(ValueError, match="layer one has FullAttentionSpec"):
        block_specs.codec_specs(whole, {"one": stock_spec(sliding_window=128)})
    assert KVCacheSpecRegistry.get_manager_class(spec) is block_specs.CodecManager
    assert KVCacheSpecRegistry.get_manager_class(stock) is not block_specs.CodecManager


def test_blocks_are_handed_out_and_come_back() -> None:
    """As many blocks are taken as announced; a request has its tail at every length, and nothing is lost."""
    (spec,) = block_specs.codec_specs(vllm_config(), {"one": stock_spec()}).values()
    pool = BlockPool(50, True, BLOCK)
    manager = block_specs.CodecManager(spec, pool, True, 0, BLOCK)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    free = pool.get_num_free_blocks()
    for num_tokens in range(1, 400, 7):
        request = Request(
            "a", list(range(num_tokens)), SamplingParams(max_tokens=9), None, block_hasher=hasher
        )
        for length in range(num_tokens, num_tokens + 130, 5):
            asked = manager.get_num_blocks_to_allocate("a", length, [], 0, 0, length)
            assert len(manager.allocate_new_blocks("a", length, length)) == asked
            assert len(manager.req_to_blocks["a"]) == -(-length // BLOCK) + TAIL
            manager.cache_blocks(request, min(length, num_tokens), replay_boundaries=())
        manager.free("a")
        assert pool.get_num_free_blocks() == free


WINDOW = {
    "method": "streaming_llm",
    "window": 200,
    "sinks": 70,
}  # four blocks before a token's own, and two first


def test_a_window_bounds_what_a_request_has() -> None:
    whole = vllm_config(kv=WINDOW)
    (spec,) = block_specs.codec_specs(whole, {"one": stock_spec()}).values()
    assert (spec.window_blocks, spec.sink_blocks) == (4, 2)
    assert spec.most_blocks == 2 + 4 + 5 + spec.tail_blocks
    assert spec.max_memory_usage_bytes(whole) == spec.most_blocks * spec.page_size_bytes
    assert block_specs.CodecSpec.merge([spec, spec]) == spec
    whole.model_config.max_model_len = 100
    assert spec.max_memory_usage_bytes(whole) == (2 + spec.tail_blocks) * spec.page_size_bytes


class Requests:
    """Some requests of vLLM's own KV cache manager, and what must be true of their blocks after each event."""

    def __init__(self, kv: Mapping[str, Any], seed: int) -> None:
        self.whole = vllm_config(kv=kv)
        (self.spec,) = block_specs.codec_specs(self.whole, {"one": stock_spec()}).values()
        groups = [KVCacheGroupSpec(["one"], self.spec)]
        self.manager = KVCacheManager(
            KVCacheConfig(40, [], groups),
            *(1000, BLOCK, BLOCK),
            max_in_flight_tokens=256,
            enable_caching=kv_cache.parse(kv).caches_prefixes,
        )
        self.pool = self.manager.block_pool
        self.random = random.Random(seed)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.found: set[str] = set()
        self.choices: dict[str, Any] = {}
        self.refused = self.num = self.num_evicted = 0

    def event(self) -> None:
        kind = self.random.choices(("new", "admit", "step", "preempt", "end"), (3, 6, 60, 1, 1))[0]
        if kind == "new" and len(self.waiting) < 5:
            # Prompts that begin alike.
            prompt = [self.random.randrange(2)] * self.random.randrange(300) + [7] * self.random.randrange(
                1, 400
            )
            self.num += 1
            self.waiting.append(
                Request(f"{self.num}", prompt, SamplingParams(max_tokens=300), None, block_hasher=self.hasher)
            )
        elif kind == "admit" and self.waiting:
            request = self.waiting[0]
            found, num = self.manager.get_computed_blocks(request)[:2]
            wanted = min(request.num_tokens - num, self.random.randrange(1, 129))
            if self.manager.allocate_slots(request, wanted, num, found, full_sequence_must_fit=True) is None:
                self.refused += 1
                return
            if self.spec.answers_read_less:
                unread = request.num_tokens == request.num_prompt_tokens
                assert num <= request.num_prompt_tokens - unread * self.codec.watched_tokens or not num
            self.found |= {request.request_id} if num else set()
            self.running.append(self.waiting.pop(0))
            request.num_computed_tokens = num
            self._read(request, wanted)
        elif self.running:
            request = self.random.choice(self.running)
            if kind == "step":
                self._step(request)
            else:
                self.manager.free(request)
                self.running.remove(request)
                if kind == "preempt":
                    request.num_computed_tokens = 0
                    self.waiting.insert(0, request)
                else:
                    self._manager.drop(request.request_id)

    def _step(self, request: Request) -> None:
        wanted = min(request.num_tokens - request.num_computed_tokens, self.random.randrange(1, 129))
        if not wanted or request.num_tokens > 900:
            self.manager.free(request)
            self._manager.drop(request.request_id)
            self.running.remove(request)
        elif self.manager.allocate_slots(request, wanted) is None:
            self.refused += 1
        else:
            self._read(request, wanted)

    @property
    def codec(self) -> Any:
        return kv_cache.parse(self.whole.additional_config["vllm_ext"]["kv"]).codec(BLOCK, 64)

    @property
    def _manager(self) -> Any:
        return self.manager.coordinator.single_type_managers[0]

    def _read(self, request: Request, num: int) -> None:
        """The worker's part: so many tokens are read, and what it chooses then it tells."""
        name, begin = request.request_id, request.num_computed_tokens
        choice = self.choices.setdefault(name, self.codec.choice(request.num_prompt_tokens))
        self.check(request, num)
        request.num_computed_tokens += num
        if choice is not None:
            for position in choice.watched(begin, begin + num):
                draw = random.Random(f"{name} {position}")
                choice.take(position, np.array([draw.random() for _ in range(position // BLOCK)], np.float32))
            evicted = choice.settle(begin + num)
            self._manager.evict(name, evicted)
            self.num_evicted += sum(len(blocks) for _, blocks in evicted)
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(self.random.randrange(9))

    def needed(self, request: Request, num: int) -> set[int]:
        """Blocks that so many rows read and write, in their places."""
        choice, found = self.choices[request.request_id], set()
        own = request.num_computed_tokens // BLOCK
        for position in range(request.num_computed_tokens, request.num_computed_tokens + num):
            read: Any = -1 if choice is None else choice.read_at(position)
            # Of those that come behind its own some are read that are written in this step.
            found |= set(self.codec.format.blocks_read(position // BLOCK) if isinstance(read, int) else read)
        blocks = self._manager.req_to_blocks[request.request_id]
        return {*found, *range(own, len(blocks))}

    def check(self, stepping: Request | None = None, num: int = 1) -> None:
        """Blocks are counted right, and those that the step reads and writes are there."""
        counts = [0] * len(self.pool.blocks)
        for request in self.running:
            for block in self._manager.req_to_blocks[request.request_id]:
                counts[block.block_id] += 0 if block.is_null else 1
        assert counts[1:] == [block.ref_cnt for block in self.pool.blocks[1:]]
        assert self.pool.get_num_free_blocks() == sum(count == 0 for count in counts[1:])
        if stepping is not None:
            blocks = self._manager.req_to_blocks[stepping.request_id]
            own = stepping.num_computed_tokens // BLOCK
            assert not any(blocks[i].is_null for i in self.needed(stepping, num))
            assert len(blocks) >= own + 1 + self.spec.tail_blocks
            held = sum(not block.is_null for block in blocks)
            # A prompt found in the cache has all its blocks until the step after.
            if self.spec.most_blocks is not None and stepping.request_id not in self.found:
                assert held <= self.spec.most_blocks
            if isinstance(self.codec, Critic) and stepping.num_computed_tokens > stepping.num_prompt_tokens:
                assert held <= self.codec.budget_blocks + 2 + self.spec.tail_blocks or num > 1


MERGING = {"method": "chelsea", "window": 200, "ratio": 3}
SNAPKV = {"method": "snapkv", "budget": 5 * BLOCK}
CRITIC = {"method": "critic", "budget": 5 * BLOCK, "watched": 8}


def test_spans_bound_what_a_request_has() -> None:
    whole = vllm_config(kv=MERGING)
    (spec,) = block_specs.codec_specs(whole, {"one": stock_spec()}).values()
    assert (spec.window_blocks, spec.sink_blocks, spec.span_blocks) == (4, 1, 3)
    # Behind 15 blocks: the first, three that were nine, five as they are; and two that are not merged yet.
    assert spec.most_blocks == 1 + 3 + 5 + 2 + 5 + spec.tail_blocks
    assert block_specs.CodecSpec.merge([spec, spec]) == spec
    longer = vllm_config(kv=MERGING)
    longer.model_config.max_model_len = 64_000
    (spec,) = block_specs.codec_specs(longer, {"one": stock_spec()}).values()
    assert spec.max_memory_usage_bytes(longer) < 0.35 * 1000 * spec.page_size_bytes


@pytest.mark.parametrize(
    "kv",
    [
        KIVI,
        WINDOW,
        {**KIVI, "window": 1, "sinks": 0},
        MERGING,
        {**MERGING, "window": 1, "ratio": 2, "sinks": 0},
        {"method": "gear"},
        {"method": "mustafar"},
        SNAPKV,
        CRITIC,
    ],
)
def test_blocks_are_conserved(kv: dict[str, Any]) -> None:
    """Ten thousand events: prompts in parts, shared beginnings, growth, preemption, aborts."""
    requests = Requests(kv, seed=1)
    for _ in range(10_000):
        requests.event()
        requests.check()
    assert requests.refused > 50
    assert requests.num > 100
    assert requests.num_evicted > 50 or not kv_cache.parse(kv).answers_read_less
    for request in requests.running:
        requests.manager.free(request)
    assert requests.pool.get_num_free_blocks() == 39


@pytest.mark.parametrize("kv", [SNAPKV, CRITIC])
def test_what_is_forgotten_is_freed_and_no_part_of_other_prompts(kv: dict[str, Any]) -> None:
    """A prompt's blocks, also forgotten ones, are found by its like; an answer's are by nobody."""
    requests = Requests(kv, seed=1)
    free = requests.pool.get_num_free_blocks()
    prompt = [*range(1000, 1000 + 10 * BLOCK)]
    request = Request("a", prompt, SamplingParams(max_tokens=300), None, block_hasher=requests.hasher)
    requests.waiting.append(request)
    for done in (10 * BLOCK, *[1] * (2 * BLOCK + 1)):
        if request.num_computed_tokens == 0:
            assert requests.manager.allocate_slots(request, done) is not None
            requests.running.append(request)
        else:
            assert requests.manager.allocate_slots(request, done) is not None
        requests._read(request, done)
    held = free - requests.pool.get_num_free_blocks() - requests.spec.tail_blocks
    assert held == 5 + (3 if kv is SNAPKV else 1)  # five are kept, and those of the answer
    requests.manager.free(request)
    longer = [*prompt, *request.output_token_ids, *range(99)]
    other = Request("b", longer, SamplingParams(max_tokens=9), None, block_hasher=requests.hasher)
    assert requests.manager.get_computed_blocks(other)[1] == 10 * BLOCK
    same = Request("c", [*prompt, 1, 2], SamplingParams(max_tokens=9), None, block_hasher=requests.hasher)
    assert requests.manager.get_computed_blocks(same)[1] == 9 * BLOCK  # its last tokens are asked
    # Read again, the prompt's blocks are all there until it is read.
    request.num_computed_tokens = 0
    assert requests.manager.allocate_slots(request, 9 * BLOCK) is not None
    assert not any(block.is_null for block in requests._manager.req_to_blocks["a"])
    request.num_computed_tokens = 9 * BLOCK
    assert requests.manager.allocate_slots(request, BLOCK) is not None
    assert not any(block.is_null for block in requests._manager.req_to_blocks["a"])
    request.num_computed_tokens = 10 * BLOCK
    assert requests.manager.allocate_slots(request, 1) is not None
    assert sum(block.is_null for block in requests._manager.req_to_blocks["a"]) == 5


@pytest.mark.parametrize("kv", [SNAPKV, CRITIC])
def test_a_block_that_is_forgotten_too_early_is_noticed(
    kv: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request that begins again, before its prompt is read."""
    original = block_specs.CodecManager.evict
    monkeypatch.setattr(
        block_specs.CodecManager,
        "evict",
        lambda self, name, evicted: original(self, name, [(1, blocks) for _, blocks in evicted]),
    )
    requests = Requests(kv, seed=1)

    def run() -> None:
        for _ in range(3_000):
            requests.event()

    with pytest.raises(AssertionError):
        run()


def test_a_block_that_is_freed_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = block_specs.CodecManager.remove_skipped_blocks
    monkeypatch.setattr(
        block_specs.CodecManager,
        "remove_skipped_blocks",
        lambda self, name, processed, *rest: original(self, name, processed + BLOCK, *rest),
    )
    requests = Requests(WINDOW, seed=1)

    def run() -> None:
        for _ in range(1_000):
            requests.event()

    with pytest.raises(AssertionError):
        run()
