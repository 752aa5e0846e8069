# SPDX-License-Identifier: Apache-2.0
"""What a server may say of its KV cache, and who hands out its blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from vllm_ext import config, kv_cache, rules, v1_kv_cache

KIVI = {"method": "kivi"}
BLOCK, TAIL = 64, 4


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, r'\["kv"\]=3 is not allowed; allowed: an object with a method'),
        ({}, r'\["kv"\]=\{\} is not allowed'),
        ({"method": "kiwi"}, r"unknown method 'kiwi'; known: kivi, mustafar\. Did you mean 'kivi'\?"),
        ({"method": 4}, r"unknown method 4"),
        ({**KIVI, "bits": 3}, r"method 'kivi': bits=3 is not allowed; allowed"),
        (
            {**KIVI, "bit": 4},
            r"unknown option bit=4.*Options of kivi: bits: .*group_size: integer, 16 to 256",
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
    assert str(settings) == "kivi (bits=2, group_size=64)"
    assert kv_cache.from_config(SimpleNamespace(additional_config={})) is None
    assert rules.from_config(carrier) is None


def engine_args(**values: Any) -> SimpleNamespace:
    default: dict[str, Any] = {
        "speculative_config": None,
        "kv_cache_dtype": "auto",
        "kv_transfer_config": None,
        "decode_context_parallel_size": 1,
        "worker_cls": "auto",
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
    kv_cache.check_engine_args(engine_args(), False, None)
    with pytest.raises(ValueError, match=f"does not work with {says}"):
        kv_cache.check_engine_args(engine_args(**{option: value}), False, None)
    own = config.parse({"method": "dyspec", "model": "self", "num_speculative_tokens": 4})
    with pytest.raises(ValueError, match="what drafts with a model"):
        kv_cache.check_engine_args(engine_args(), False, own)
    with pytest.raises(ValueError, match="a sampling rule with a second model"):
        kv_cache.check_engine_args(engine_args(), True, None)


def model_config(**values: Any) -> SimpleNamespace:
    default: dict[str, Any] = {"use_mla": False, "is_encoder_decoder": False, "is_hybrid": False}
    default |= {"runner_type": "generate", "model": "m", "get_head_size": lambda: 64, "dtype": torch.bfloat16}
    return SimpleNamespace(**{**default, **values})


def vllm_config(block_size: int = BLOCK, **model: Any) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=model_config(max_model_len=1000, **model),
        cache_config=SimpleNamespace(block_size=block_size),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        additional_config={"vllm_ext": {"kv": KIVI}},
        num_speculative_tokens=0,
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
    specs = v1_kv_cache.encoded_specs(whole, {"one": stock, "two": stock})
    spec = v1_kv_cache.EncodedSpec.merge(list(specs.values()))
    assert spec == specs["one"]
    assert stock.page_size_bytes / spec.page_size_bytes == 256 / 72
    assert spec.tail_blocks == TAIL
    assert spec.max_num_blocks_per_req(whole, 1000) == 16 + TAIL
    assert spec.max_memory_usage_bytes(whole) == (16 + TAIL) * spec.page_size_bytes
    with pytest.raises(ValueError, match="layer one has FullAttentionSpec"):
        v1_kv_cache.encoded_specs(whole, {"one": stock_spec(sliding_window=128)})
    assert KVCacheSpecRegistry.get_manager_class(spec) is v1_kv_cache.EncodedManager
    assert KVCacheSpecRegistry.get_manager_class(stock) is not v1_kv_cache.EncodedManager


def test_blocks_are_handed_out_and_come_back() -> None:
    """What is asked for before is what is taken; a request has its tail at every length, and nothing is lost."""
    (spec,) = v1_kv_cache.encoded_specs(vllm_config(), {"one": stock_spec()}).values()
    pool = BlockPool(50, True, BLOCK)
    manager = v1_kv_cache.EncodedManager(spec, pool, True, 0, BLOCK)
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
