# SPDX-License-Identifier: Apache-2.0
"""Disaggregated prefill by `NixlConnector`: one engine reads prompts, another answers with trees as plain vLLM does.

Needs the packages nixl and nixl-cu12, which move memory of CPUs too: `pip install --no-deps nixl nixl-cu12`.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import engine
from helpers import assert_same_outputs, generate, long_and_short_prompts
from vllm import SamplingParams
from vllm.config import KVTransferConfig

pytestmark = [pytest.mark.engine, pytest.mark.slow]  # three engines, two of them with processes of their own

TREES = {"method": "token_recycling", "num_speculative_tokens": 12, "budget": "fixed"}
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 60, "ignore_eos": True},
    {"temperature": 0.8, "seed": 3, "max_tokens": 60, "ignore_eos": True},
] * 2
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def of_role(slice_dir: str, role: str, method: dict[str, Any] | None) -> Iterator[Any]:
    connector = KVTransferConfig(
        kv_connector="NixlConnector",
        kv_role=role,
        kv_connector_extra_config={"kv_lease_duration": 600},  # a busy machine is slow to ask
    )
    # Spawned as a server's are: a fork would share what UCX has opened.
    yield from engine(
        slice_dir,
        method,
        own_core=True,
        environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
        kv_transfer_config=connector,
        block_size=32,
        max_model_len=1024,
    )


@pytest.fixture(scope="module")
def producer(slice_dir: str) -> Iterator[Any]:
    pytest.importorskip("nixl")
    # With trees of its own. Of a prompt and one token none is drafted.
    yield from of_role(slice_dir, "kv_producer", TREES)


@pytest.fixture(scope="module")
def consumer(slice_dir: str, producer: Any) -> Iterator[Any]:
    yield from of_role(slice_dir, "kv_consumer", TREES)


def total(llm: Any, name: str) -> int:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def test_prompts_are_read_elsewhere(plain_slice_llm: Any, producer: Any, consumer: Any) -> None:
    texts = long_and_short_prompts(plain_slice_llm, 4)
    expected = generate(plain_slice_llm, texts, [SamplingParams(**values) for values in PARAMS])

    def ask(llm: Any, params: list[SamplingParams]) -> list[Any]:
        answers: list[Any] = llm.generate(
            [{"prompt_token_ids": text} for text in texts], params, use_tqdm=False
        )
        return answers

    read = ask(
        producer,
        [
            SamplingParams(**{**values, "max_tokens": 1}, extra_args={"kv_transfer_params": ASKED})
            for values in PARAMS
        ],
    )
    answers = ask(
        consumer,
        [
            SamplingParams(**values, extra_args={"kv_transfer_params": answer.kv_transfer_params})
            for values, answer in zip(PARAMS, read, strict=True)
        ],
    )
    assert_same_outputs(expected, [list(answer.outputs[0].token_ids) for answer in answers])
    # All of every prompt came from the other, but what an earlier prompt of the batch had brought.
    assert (
        total(consumer, "vllm:external_prefix_cache_hits")
        >= sum(len(text) // 32 * 32 for text in texts) - 3 * 32
    )
    assert total(consumer, "vllm:nixl_num_failed_transfers") == 0
    assert total(consumer, "vllm_ext:spec_accepted_tokens") > 20
    assert total(producer, "vllm_ext:spec_draft_tokens") == 0
